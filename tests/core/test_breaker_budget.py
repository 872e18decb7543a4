"""Breakers and budgets: all decisions, no loop."""

from tiercache.core.breaker import Breaker, BreakerState
from tiercache.memory.slots import Purpose, SlotBudget

SLOW_S = 5.0


def test_breaker_opens_after_consecutive_failures_only() -> None:
    breaker = Breaker(SLOW_S)
    for outcome in ("fail", "fail", "succeed", "fail", "fail"):
        breaker.failed(0.0) if outcome == "fail" else breaker.succeeded(0.0)
        assert breaker.allows(0.0)
    breaker.failed(0.0)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows(0.5)


def test_slow_success_counts_as_a_failure() -> None:
    breaker = Breaker(SLOW_S)
    for _ in range(3):
        breaker.succeeded(0.0, took_s=6.0)
    assert breaker.state is BreakerState.OPEN


def test_one_probe_at_a_time_then_closed_or_a_longer_pause() -> None:
    breaker = Breaker(SLOW_S)
    breaker.trip(0.0)
    assert not breaker.allows(0.9)
    assert breaker.allows(1.0)
    assert not breaker.allows(1.1), "a probe is under way"
    breaker.failed(1.2)
    assert not breaker.allows(3.1), "the pause has doubled"
    assert breaker.allows(3.3)
    breaker.succeeded(3.4)
    assert breaker.state is BreakerState.CLOSED


def test_probe_that_never_reports_does_not_block_for_ever() -> None:
    breaker = Breaker(SLOW_S)
    breaker.trip(0.0)
    assert breaker.allows(1.0)
    assert not breaker.allows(5.9)
    assert breaker.allows(6.1)


def test_probe_that_is_called_off_or_answers_a_lookup_leaves_its_place_to_the_next() -> None:
    breaker = Breaker(SLOW_S)
    breaker.trip(0.0)
    assert breaker.allows(1.0)
    breaker.abandoned(1.5, began_s=0.0)
    assert not breaker.allows(1.5), "that was not the probe"
    breaker.abandoned(1.6, began_s=1.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.allows(1.7) and not breaker.allows(1.8), "one operation probes"
    breaker.failed(1.9, began_s=1.7)
    assert not breaker.allows(3.8) and breaker.allows(4.0), "the pause has doubled"


def test_pause_has_a_ceiling() -> None:
    breaker = Breaker(SLOW_S)
    now_s = 0.0
    breaker.trip(now_s)
    for _ in range(10):
        now_s += 100.0
        assert breaker.allows(now_s)
        breaker.failed(now_s)
    assert breaker.allows(now_s + 60.0)


def test_many_that_find_the_device_full_together_are_one_bad_sign() -> None:
    breaker = Breaker(SLOW_S)
    for ended_s in (2.0, 2.1, 2.2):
        breaker.trip(ended_s, began_s=1.0)
    assert not breaker.allows(2.9)
    assert breaker.allows(3.0), "the pause is that of one failure"


def taken(budget: SlotBudget, purpose: Purpose, free: int) -> int:
    """Take as many slots as the budget allows. Return how many stay free."""
    while budget.allows(purpose, free):
        budget.take(purpose)
        free -= 1
    return free


def test_floors_keep_reads_writes_and_prefetches_from_starving_each_other() -> None:
    budget = SlotBudget(16)
    assert taken(budget, Purpose.WRITE, 16) == 2, "writes stop at the floor for reads"
    assert taken(budget, Purpose.READ, 2) == 0, "reads get all of their floor: writes have had theirs"
    budget = SlotBudget(16)
    assert taken(budget, Purpose.PREFETCH, 16) == 4, "what is kept for later is no demand read: both floors are whole"
    assert budget.allows(Purpose.WRITE, 4) and budget.allows(Purpose.READ, 4)
