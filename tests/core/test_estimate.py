"""Whether a load is worth it, and distributions of what was seen."""

from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.estimate import Distribution, TransferEstimate, worth_waiting_s
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
def test_parts_add_up_to_the_whole_and_the_whole_less_one_is_the_other(first: list[float], second: list[float]) -> None:
    whole = of(first)
    before = whole.copy()
    whole.include(of(second))
    assert whole.counts == of(first + second).counts
    since = whole.since(before)
    assert since.counts == of(second).counts
    assert abs(since.sum - of(second).sum) < 1e-6
