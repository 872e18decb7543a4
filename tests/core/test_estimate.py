"""Estimates: if a load is worth it, distributions of what was seen, and what a token costs the engine."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.estimate import Distribution, PrefillCost, TransferEstimate, worth_waiting_s
from tiercache.core.index import RememberedKeys


def test_unknown_speed_is_worth_a_try() -> None:
    estimate = TransferEstimate(4)
    assert estimate.expected_s(8, 0.0) is None
    assert estimate.worthwhile(8, 0.001, 0.0)


def test_chunks_in_flight_together_take_as_long_as_one() -> None:
    estimate = TransferEstimate(4)
    estimate.add(0.5, 0.0)
    assert [estimate.expected_s(chunks, 1.0) for chunks in (1, 4, 5, 8, 9)] == [0.5, 0.5, 1.0, 1.0, 1.5]


def test_slower_than_computing_is_not_worth_it_until_the_sample_is_old() -> None:
    estimate = TransferEstimate(2)
    estimate.add(1.0, 0.0)
    assert not estimate.worthwhile(1, 0.9, 1.0)
    assert estimate.worthwhile(2, 0.6, 1.0), "two together take a second, computing them 1.2"
    assert estimate.worthwhile(1, None, 1.0), "nobody knows how fast the engine is"
    assert estimate.worthwhile(1, 0.9, 31.0), "tried again, it may have become quick"


def test_average_follows_and_an_old_one_does_not_weigh() -> None:
    estimate = TransferEstimate(1)
    estimate.add(1.0, 0.0)
    estimate.add(2.0, 1.0)
    assert estimate.read_s == 1.2
    estimate.add(5.0, 100.0)
    assert estimate.read_s == 5.0


def test_remembered_keys_are_bounded_age_and_count_their_bytes() -> None:
    known = RememberedKeys(2, keep_s=10.0)
    for number, key in enumerate((b"a", b"b", b"c")):
        known.add(key, float(number), 100)
    assert len(known) == 2 and not known.has(b"a", 2.0) and known.bytes_known == 200
    assert known.has(b"b", 11.0) and not known.has(b"b", 11.1)
    known.add(b"b", 11.2)
    assert known.has(b"b", 21.0) and known.bytes_known == 200, "what it takes is remembered when it is seen again"
    assert known.discard(b"b") and not known.discard(b"b")
    assert known.bytes_known == 100
    known.clear()
    assert len(known) == known.bytes_known == 0


def test_remembered_keys_that_are_too_old_take_no_memory() -> None:
    known = RememberedKeys(1000, keep_s=10.0)
    for number in range(100):
        known.add(b"old %d" % number, 0.0, 10)
    for number in range(100):
        known.add(b"new %d" % number, 10.1, 1)
    assert len(known) == 100 and known.bytes_known == 100


def test_a_load_is_waited_for_as_long_as_computing_takes_or_until_it_is_unusual() -> None:
    assert worth_waiting_s(None, 2.0) == 2.0, "nobody knows how long it should take"
    assert worth_waiting_s(0.1, 2.0) == 0.4
    assert worth_waiting_s(0.01, 2.0) == 0.2, "a tenth of computing is a bargain"
    assert worth_waiting_s(1.5, 2.0) == 2.0, "computing begins when it would have ended"
    assert worth_waiting_s(30.0, 2.0) == 0.2, "it was slow: it may be well again, and is tried"
    assert worth_waiting_s(0.0, 0.0) > 0


def test_reads_that_take_too_long_already_keep_others_from_beginning() -> None:
    estimate = TransferEstimate(4)
    estimate.add(0.01, 0.0)
    assert estimate.worthwhile(4, 0.5, 1.0, oldest_s=0.2)
    assert not estimate.worthwhile(4, 0.5, 1.0, oldest_s=0.21)
    assert estimate.worthwhile(4, None, 1.0, oldest_s=10.0)
    assert estimate.worthwhile(4, 0.5, 100.0, oldest_s=31.0), "what hangs for good keeps nobody for good"


def test_who_is_ahead_counts() -> None:
    estimate = TransferEstimate(4)
    assert estimate.lasting_s(4) is None
    estimate.add(0.5, 0.0)
    assert [estimate.lasting_s(4, ahead) for ahead in (0, 1, 4, 5)] == [0.5, 1.0, 1.0, 1.5]


BOUNDS = (0.5, 2.0, 8.0)
AMOUNTS = st.lists(st.floats(0, 20))


def of(amounts: list[float]) -> Distribution:
    found = Distribution.of(BOUNDS)
    for amount in amounts:
        found.add(amount)
    return found


def test_bound_belongs_to_the_bucket_below_it() -> None:
    found = of([0.0, 0.5, 0.75, 8.0, 8.25, 100.0])
    assert found.counts == [2, 1, 1, 2]
    assert found.sums == [0.5, 0.75, 8.0, 108.25]
    assert (found.count, found.sum) == (6, 117.5)


@given(AMOUNTS, AMOUNTS)
def test_the_whole_less_a_copy_of_before_is_what_came_since(first: list[float], second: list[float]) -> None:
    whole = of(first)
    before = whole.copy()
    for amount in second:
        whole.add(amount)
    since = whole.since(before)
    assert since.counts == of(second).counts
    assert abs(since.sum - of(second).sum) < 1e-6


# The cost of a token, of an engine whose steps are known

BASE_S, TOKEN_S = 0.03, 0.001


def engine(prompts: list[int], budget: int = 512, tokens: int = 20) -> Iterator[tuple[list[str], int]]:
    """One request after the other joins those that decode, each for so many steps."""
    decoding: dict[str, int] = {}
    for number, prompt in enumerate(prompts):
        left = prompt
        while left:
            part = min(left, budget)
            left -= part
            yield [*decoding, f"r{number}"], part + len(decoding)
            decoding = {name: steps - 1 for name, steps in decoding.items() if steps > 1}
        decoding[f"r{number}"] = tokens
    while decoding:
        yield list(decoding), len(decoding)
        decoding = {name: steps - 1 for name, steps in decoding.items() if steps > 1}


def watch(cost: PrefillCost, steps: Iterator[tuple[list[str], int]], late: int = 0, now_s: float = 100.0) -> float:
    """An engine that says when it schedules a step: up to `late` steps before it computes it."""
    ends = [now_s] * (late + 1)
    for requests, tokens in steps:
        cost.began(requests, tokens, ends[0])
        ends = [*ends[1:], ends[-1] + BASE_S + TOKEN_S * tokens]
    return ends[-1]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_found_also_where_steps_are_scheduled_ahead(late: int) -> None:
    cost = PrefillCost()
    watch(cost, engine([900, 300, 1700, 40, 500, 1200, 800, 100, 350, 1500]), late)
    assert cost.token_s == pytest.approx(TOKEN_S, rel=0.15 if late else 1e-6)


def test_of_decoding_alone_nothing_is_known() -> None:
    cost = PrefillCost()
    watch(cost, engine([8] * 4, tokens=200))
    assert cost.token_s is None and cost.news() is None


def test_pauses_do_not_count() -> None:
    cost = PrefillCost()
    end_s = 0.0
    for _ in range(10):
        end_s = watch(cost, engine([900, 300, 1700]), now_s=end_s + 60)
    assert cost.token_s == pytest.approx(TOKEN_S, rel=1e-6)


def test_noise_does_not_make_the_engine_quick_beyond_belief() -> None:
    cost, now_s = PrefillCost(), 0.0
    for step in range(400):
        tokens = 512 if step // 8 % 2 else 1
        cost.began(["r"], tokens, now_s)
        now_s += 0.1 if tokens == 512 else 0.4
    assert cost.token_s == pytest.approx(0.25 * 0.1 / 512, rel=0.1)


def test_news_are_what_changed() -> None:
    cost = PrefillCost()
    end_s = watch(cost, engine([900, 300, 1700] * 2))
    assert cost.news() == cost.token_s is not None
    end_s = watch(cost, engine([900, 300, 1700] * 2), now_s=end_s)
    assert cost.news() is None
    steps = [(requests, 3 * tokens) for requests, tokens in engine([900, 300, 1700] * 20)]
    seen_s, now_s = [], end_s
    for requests, tokens in steps:  # a token takes three times as long as it says
        cost.began(requests, tokens // 3, now_s)
        now_s += BASE_S + TOKEN_S * tokens
        seen_s += [news] if (news := cost.news()) else []
    assert seen_s and seen_s[-1] == pytest.approx(3 * TOKEN_S, rel=0.15)
