"""The plan of the prefetcher, on virtual time; nothing is moved."""

import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tiercache.core.prediction import Prediction
from tiercache.core.prefetch import Fetch, PrefetchPlan, PrefetchSettings

CHUNK = 1000


def plan_of(**known: float) -> PrefetchPlan:
    facts = {"hot_bytes": 100 * CHUNK, "share_bytes": 50 * CHUNK, "transfer_bytes_per_s": 100 * CHUNK, "margin_s": 0.0}
    return PrefetchPlan(PrefetchSettings(**(facts | known)), CHUNK)  # type: ignore[arg-type]


def expecting(
    keys: str, due_s: float = 0.0, *, probability: float = 0.95, subject: str = "", priority: int = 0
) -> Prediction:
    chunks = [key.encode() for key in keys]
    return Prediction("hints", subject or keys, chunks, probability, due_s, due_s, due_s + 1, priority, grace_s=10.0)


def fetches(plan: PrefetchPlan, now_s: float = 0.0, resident: str = "") -> str:
    """What is begun at `now_s`, until there is nothing to do."""
    there = {key.encode() for key in resident}
    begun = []
    while (fetch := plan.next(now_s, there.__contains__)) is not None:
        begun.append(fetch.key.decode())
    return "".join(begun)


def test_missing_chunks_are_fetched_from_the_first_on() -> None:
    plan = plan_of()
    plan.offer(expecting("abcd"), 0.0)
    assert fetches(plan, resident="b") == "acd"


def test_a_fetch_names_the_chunk_before_it() -> None:
    plan = plan_of()
    plan.offer(expecting("ab"), 0.0)
    first, second = plan.next(0.0, lambda key: False), plan.next(0.0, lambda key: False)
    assert first is not None and second is not None
    assert (first.parent, second.parent) == (None, b"a")


def test_nothing_is_fetched_before_it_must_be() -> None:
    plan = plan_of()
    plan.offer(expecting("abcdefghij", due_s=100.0), 0.0)
    assert fetches(plan) == ""
    assert plan.wake_s(0.0) == pytest.approx(100.0 - 10 / 100)
    assert fetches(plan, 99.95) == "abcdefghij"


def test_the_most_valuable_goes_first_and_priority_before_value() -> None:
    plan = plan_of()
    plan.offer(expecting("unsure", 0.0, probability=0.9), 0.0)
    plan.offer(expecting("AB", 0.0), 0.0)
    assert fetches(plan).startswith("AB")
    plan = plan_of()
    plan.offer(expecting("AB", 0.0, priority=1), 0.0)
    plan.offer(expecting("xy", 0.0, probability=0.9), 0.0)
    assert fetches(plan) == "xyAB"


def test_what_is_too_improbable_is_left() -> None:
    plan = plan_of()
    plan.offer(expecting("ab", probability=0.79), 0.0)
    assert fetches(plan) == ""


def test_what_would_be_evicted_before_it_is_used_is_left() -> None:
    plan = plan_of()
    plan.evicted([b"%d" % number for number in range(6000)], 0.0)
    assert plan.lifetime_s(0.0) == pytest.approx(1.0)
    far = Prediction("sessions", "s", [b"a"], 0.95, 0.0, 30.0, 60.0)
    plan.offer(far, 0.0)
    assert fetches(plan) == ""
    assert fetches(plan, 55.0, "") == "a" or plan.lifetime_s(55.0) < 5


def test_a_newer_prediction_replaces_the_older() -> None:
    plan = plan_of()
    plan.offer(expecting("ab", subject="s"), 0.0)
    plan.offer(expecting("cd", subject="s"), 0.0)
    assert fetches(plan) == "cd"


def test_the_share_of_the_hot_cache_is_kept() -> None:
    plan = plan_of(share_bytes=3 * CHUNK)
    plan.offer(expecting("abcdef"), 0.0)
    assert fetches(plan) == "abc"
    plan.transfers.fetched(b"a")
    assert fetches(plan) == ""
    plan.transfers.asked([b"a"])
    assert fetches(plan, resident="a") == "d"


def test_the_bytes_per_second_are_kept() -> None:
    plan = plan_of(bytes_per_s=10 * CHUNK)
    plan.offer(expecting("abcdefghijklmnop"), 0.0)
    assert fetches(plan) == "ab"
    wake_s = plan.wake_s(0.0)
    assert wake_s == pytest.approx(0.05)
    assert len(fetches(plan, 0.2)) == 2


def test_used_late_evicted_wasted_and_cancelled_are_told_apart() -> None:
    plan = plan_of()
    plan.offer(expecting("abcde"), 0.0)
    for _ in range(4):
        plan.next(0.0, lambda key: False)
    for key in (b"a", b"b", b"c"):
        plan.transfers.fetched(key)
    plan.evicted([b"b"], 0.0)
    plan.transfers.asked([b"a", b"d"])
    plan.transfers.fetched(b"d")
    plan.withdraw("hints", "abcde")
    plan.transfers.finish()
    account = plan.accounts["hints"]
    assert account.to_dict() == {
        "fetched_bytes": 4 * CHUNK,
        "used_bytes": CHUNK,
        "late_bytes": CHUNK,
        "evicted_bytes": CHUNK,
        "wasted_bytes": CHUNK,
        "cancelled_bytes": 4 * CHUNK,
    }
    assert account.lost_bytes == 2 * CHUNK


def test_a_failed_fetch_is_not_charged() -> None:
    plan = plan_of()
    plan.offer(expecting("a"), 0.0)
    plan.next(0.0, lambda key: False)
    plan.transfers.failed(b"a")
    assert plan.accounts["hints"].fetched_bytes == 0
    assert fetches(plan) == "", "it is not asked for again and again"


def test_what_was_evicted_while_it_is_expected_is_fetched_again() -> None:
    plan = plan_of()
    plan.offer(expecting("abc", 5.0), 4.99)
    assert fetches(plan, 4.99, "abc") == ""
    plan.evicted([b"c"], 4.995)
    assert fetches(plan, 4.996, "ab") == "c"


def test_a_victim_that_is_expected_sooner_stays() -> None:
    plan = plan_of()
    plan.offer(expecting("soon", 1.0), 0.0)
    plan.offer(expecting("LATE", 60.0), 0.0)
    late = Fetch(b"L", None, 0.95 / 2 / 60, 0)
    soon = Fetch(b"s", None, 0.95 / 2, 0)
    assert not plan.yields_to(b"s", late, 0.0)
    assert plan.yields_to(b"L", soon, 0.0)
    assert plan.yields_to(b"nobody's", late, 0.0)


def test_victims_that_are_expected_sooner_are_passed_over_with_all_that_comes_with_them() -> None:
    plan = plan_of()
    plan.offer(expecting("soon", 1.0), 0.0)
    plan.offer(expecting("L", 0.0, probability=0.9, subject="late"), 0.0)
    order: list[bytes] = [b"s", b"o", b"o", b"x"]
    renewed: list[bytes] = []

    def renew(keys: Sequence[bytes]) -> None:
        renewed.extend(keys)
        order[:] = [key for key in order if key not in keys]

    late = Fetch(b"L", None, 0.1, 0)
    assert plan.finds_room(lambda: order[0], renew, late, 0.0)
    assert (order, renewed) == ([b"x"], [b"s", b"o", b"o", b"n"])
    assert plan.finds_room(lambda: None, renew, late, 0.0), "nothing has to go"
    assert not plan.finds_room(lambda: b"s", lambda keys: None, late, 0.0), "and the search has an end"


def test_a_victim_goes_for_what_is_twice_as_likely_and_never_for_a_lower_priority() -> None:
    plan = plan_of()
    plan.offer(expecting("v", 10.0), 0.0)
    rate = 0.95 / 2 / 10
    assert not plan.yields_to(b"v", Fetch(b"f", None, 1.9 * rate, 0), 0.0), "not for a little"
    assert plan.yields_to(b"v", Fetch(b"f", None, 2.1 * rate, 0), 0.0)
    assert not plan.yields_to(b"v", Fetch(b"f", None, 100 * rate, priority=1), 0.0)


def test_without_room_it_is_tried_a_little_later() -> None:
    plan = plan_of()
    plan.offer(expecting("ab"), 0.0)
    fetch = plan.next(0.0, lambda key: False)
    assert fetch is not None
    plan.no_room(fetch, 0.0)
    assert fetches(plan, 0.1) == ""
    wake_s = plan.wake_s(0.1)
    assert wake_s is not None
    assert fetches(plan, wake_s) == "ab"


def test_what_nobody_expects_any_more_is_wasted() -> None:
    plan = plan_of()
    plan.offer(expecting("ab"), 0.0)
    fetches(plan)
    plan.transfers.fetched(b"a")
    assert fetches(plan, 100.0) == ""
    plan.offer(expecting("z", 200.0), 101.5)
    assert fetches(plan, 200.0) == "z"
    assert plan.accounts["hints"].wasted_bytes == CHUNK


KEYS = st.sampled_from([bytes([number]) for number in range(12)])


class PlanAgainstModel(RuleBasedStateMachine):
    """A cache that does what the plan says, in random order: every byte is accounted for once, and limits hold."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = plan_of(share_bytes=4 * CHUNK, bytes_per_s=50 * CHUNK)
        self.now_s = 0.0
        self.hot: set[bytes] = set()
        self.flying: set[bytes] = set()
        self.begun = 0

    @rule(keys=st.lists(KEYS, min_size=1, max_size=6, unique=True), due_s=st.floats(0, 20), subject=st.integers(0, 3))
    def offer(self, keys: list[bytes], due_s: float, subject: int) -> None:
        due_s += self.now_s
        self.plan.offer(Prediction("p", str(subject), keys, 0.9, due_s, due_s, due_s + 2), self.now_s)

    @rule(subject=st.integers(0, 3))
    def withdraw(self, subject: int) -> None:
        self.plan.withdraw("p", str(subject))

    @rule(passed_s=st.floats(0, 5))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule()
    def fetch(self) -> None:
        fetch = self.plan.next(self.now_s, self.hot.__contains__)
        if fetch is not None:
            assert fetch.key not in self.hot
            self.flying.add(fetch.key)
            self.begun += 1

    @rule(key=KEYS, works=st.booleans())
    def land(self, key: bytes, works: bool) -> None:
        if key in self.flying:
            self.flying.discard(key)
            if works:
                self.hot.add(key)
                self.plan.transfers.fetched(key)
            else:
                before = self.plan.accounts["p"].fetched_bytes
                self.plan.transfers.failed(key)
                self.begun -= (before - self.plan.accounts["p"].fetched_bytes) // CHUNK

    @rule(keys=st.lists(KEYS, max_size=6))
    def ask(self, keys: list[bytes]) -> None:
        self.plan.transfers.asked(keys)
        self.hot.update(keys)

    @rule(key=KEYS)
    def evict(self, key: bytes) -> None:
        if key in self.hot:
            self.hot.discard(key)
            self.plan.evicted([key], self.now_s)

    @invariant()
    def adds_up(self) -> None:
        account = self.plan.accounts.get("p")
        if account is None:
            return
        settled = account.used_bytes + account.late_bytes + account.lost_bytes
        assert account.fetched_bytes == settled + self.plan.transfers.waiting_bytes == self.begun * CHUNK
        assert self.plan.transfers.waiting_bytes <= 4 * CHUNK
        assert self.begun * CHUNK <= (self.now_s + 0.25) * 50 * CHUNK + CHUNK + len(self.flying) * CHUNK + 1e9


TestPlan = PlanAgainstModel.TestCase
TestPlan.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)


def test_bandwidth_that_was_not_used_is_not_saved_up() -> None:
    plan = plan_of(bytes_per_s=4.0 * CHUNK, burst_s=0.5)
    assert fetches(plan, 0.0) == ""
    assert plan.wake_s(0.0) is None
    plan.offer(expecting("abcdefghij", 100.0), 0.0)
    assert fetches(plan, 100.0) == "ab", "half a second's worth, however long nothing was fetched"


def test_many_predictions_whose_time_is_over_are_ended_some_at_a_time() -> None:
    plan = plan_of()
    for number in range(2000):
        plan.offer(expecting("ab", subject=str(number)), 0.0)
    left = [2000]
    for step in range(20):
        assert plan.next(100.0 + step / 100, lambda key: True) is None
        left.append(sum(plan.acts_on("hints", str(number)) for number in range(2000)))
    assert left[-1] == 0
    assert max(before - after for before, after in pairwise(left)) < 1000
    assert not plan.expects(b"a") and plan.yields_to(b"a", Fetch(b"x", None, 0.0, 0), 101.0)


def test_keys_of_a_dropped_prediction_are_anybodys_before_they_are_cleared_away() -> None:
    """Clearing away 200,000 keys takes a tenth of a second: it is done in parts, and nothing depends on when."""
    plan = plan_of()
    keys = [number.to_bytes(4, "big") for number in range(260_000)]
    plan.offer(Prediction("hints", "long", keys, 0.95, 0.0, 0.0, 1.0, 0, grace_s=10.0), 0.0)
    began_s = time.thread_time()
    plan.withdraw("hints", "long")
    withdrawn_s = time.thread_time() - began_s
    assert not any(plan.expects(key) for key in keys)
    plan.offer(Prediction("hints", "short", keys[-2:], 0.95, 0.0, 0.0, 1.0, 0, grace_s=10.0), 0.0)
    assert plan.expects(keys[-1]) and not plan.expects(keys[-3])
    for step in range(100):
        plan.next(step / 100, lambda key: True)
    assert plan.expects(keys[-1])
    assert withdrawn_s < 0.02
