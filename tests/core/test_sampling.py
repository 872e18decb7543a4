"""The sample of accesses: distances in LRU order, hit rates of every size, and its limits."""

import random
import tracemalloc
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.keys import ChunkKey, chunk_keys
from tiercache.core.sampling import MOST_CHUNKS, Curve, Sample

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40)


def keys_of(prompt: Sequence[int]) -> list[ChunkKey]:
    return chunk_keys(b"", prompt, 1)


def one(number: int) -> list[ChunkKey]:
    return keys_of([number])


class Naive:
    """The chunks in LRU order, the most recent first, and the distances of a prefix."""

    def __init__(self) -> None:
        self.order: list[ChunkKey] = []

    def asked(self, keys: list[ChunkKey]) -> list[float | None]:
        places = [self.order.index(key) + 1 if key in self.order else None for key in keys]
        return list(accumulate(places, lambda most, place: max(most, place) if most and place else None))

    def stored(self, keys: list[ChunkKey]) -> None:
        self.order = [*keys, *(key for key in self.order if key not in keys)]


def ask(sample: Sample, keys: list[ChunkKey], curve: Curve | None = None, now_s: float = 0.0) -> list[float | None]:
    """A request that finds nothing and stores everything."""
    accesses = sample.asked(keys, 0, 0, now_s)
    for access in accesses:
        if curve is not None:
            curve.add(access.weight, access.distance)
    sample.stored(keys, now_s)
    return [access.distance for access in accesses]


@given(PROMPTS, st.integers(1, 20))
def test_distances_and_hits_are_those_of_a_stack_while_every_chunk_is_sampled(prompts: list[list[int]], size: int) -> None:
    sample, naive, curve = Sample(), Naive(), Curve()
    hits = asked = 0
    for prompt in prompts:
        keys = keys_of(prompt)
        distances = naive.asked(keys)
        assert ask(sample, keys, curve) == distances
        hits += sum(1 for distance in distances if distance is not None and distance <= size)
        asked += len(keys)
        naive.stored(keys)
    assert sample.rate == 1.0 and len(sample) == len(naive.order)
    assert curve.accesses == asked
    if size < 11:  # buckets are as fine as chunks
        assert curve.hits(size) == pytest.approx(hits)
    assert curve.hits(0) == 0 and curve.hits(1 << 20) == pytest.approx(curve.hits(64))


def test_what_was_asked_for_and_not_stored_takes_no_room() -> None:
    sample = Sample()
    ask(sample, one(1))
    sample.asked(one(2), 0, 0, 0.0)
    (again,) = sample.asked(one(2), 0, 0, 5.0)
    assert again.distance is None and not again.was_stored and again.used_s == 0.0
    assert ask(sample, one(1)) == [1.0]


def test_a_put_of_what_was_asked_for_before_is_the_same_access() -> None:
    sample = Sample()
    sample.asked(one(1), 0, 0, 0.0)
    sample.asked(one(2), 0, 0, 0.0)
    sample.stored(one(2), 0.0)
    sample.stored(one(1), 0.0)
    assert [access.distance for access in sample.asked(one(1), 0, 0, 0.0)] == [2.0]
    sample.stored(one(2), 0.0)
    assert [access.distance for access in sample.asked(one(1), 0, 0, 0.0)] == [1.0]


def test_a_forgotten_chunk_is_in_no_cache() -> None:
    sample = Sample()
    ask(sample, one(1))
    ask(sample, one(2))
    sample.forgotten([*one(2), *one(9)])
    assert ask(sample, one(1)) == [1.0]
    assert ask(sample, one(2)) == [None]


def test_what_another_process_stored_has_the_given_distance() -> None:
    sample = Sample()
    ask(sample, one(1))
    keys = keys_of([5, 6, 7])
    assert [access.distance for access in sample.asked(keys, 2, 100, 0.0)] == [100.0, 100.0, None]
    assert [access.distance for access in sample.asked(keys, 2, 100, 0.0)] == [1.0, 2.0, None]


def test_a_cache_of_a_fraction_of_a_chunk_more_hits_as_often() -> None:
    curve = Curve()
    curve.add(1.0, 1.0)
    assert (curve.hits(0.9), curve.hits(1.1), curve.hits(1.9)) == (0.0, 1.0, 1.0)


def test_the_sample_has_a_limit_and_its_rate_falls() -> None:
    sample = Sample(most=256)
    curve = Curve()
    for number in range(20_000):
        ask(sample, one(number), curve, number / 100)
        assert len(sample) <= 256
    assert 0.004 < sample.rate < 0.03
    assert curve.accesses == pytest.approx(20_000, rel=0.5)


def test_chunks_beyond_the_farthest_distance_leave_the_sample_instead() -> None:
    sample = Sample(most=256)
    sample.farthest = 100.0
    for number in range(5000):
        ask(sample, one(number), now_s=number / 100)
    assert sample.rate == 1.0 and len(sample) <= 256
    assert ask(sample, one(4900), now_s=60.0) == [100.0]


def test_a_request_of_many_chunks_is_sampled_in_part() -> None:
    sample = Sample()
    keys = keys_of(range(10_000))
    assert len(ask(sample, keys)) <= 1024
    assert sample.rate < 0.2


def test_a_flood_of_accesses_lowers_the_rate() -> None:
    sample = Sample()
    keys = [one(number) for number in range(200)]
    for turn in range(500):
        ask(sample, keys[turn % 200], now_s=0.0)
    assert sample.rate == 1.0
    for turn in range(20_000):
        ask(sample, keys[turn % 200], now_s=0.0)
    assert sample.rate < 1.0


def test_hit_rates_of_a_small_sample_are_close() -> None:
    choose = random.Random(1)
    prompts = [keys_of([1, 2, 3, int(choose.paretovariate(0.5)) % 5000, 7]) for _ in range(20_000)]
    whole, part = (Sample(), Curve()), (Sample(most=1024), Curve())
    for position, prompt in enumerate(prompts):
        for sample, curve in (whole, part):
            ask(sample, prompt, curve, position / 10)
    assert whole[0].rate == 1.0 and part[0].rate < 0.6
    for size in (10, 100, 1000, 10_000):
        assert part[1].hit_rate(size) == pytest.approx(whole[1].hit_rate(size), abs=0.05)


def test_beginnings_that_prompts_share_are_counted_whatever_is_sampled() -> None:
    """60 % of the accesses are of three chunks, of which a sample of one in a hundred has none or counts a hundredfold."""
    sample, curve = Sample(most=256), Curve()
    for number in range(20_000):
        ask(sample, keys_of([1, 2, 3, 1000 + number, number]), curve, number / 10)
    assert sample.rate < 0.02
    assert curve.hit_rate(100) == pytest.approx(0.6, abs=0.05)


def test_a_full_sample_takes_less_than_8_mb() -> None:
    tracemalloc.start()
    try:
        sample = Sample()
        number = 0
        while sample.rate == 1.0:
            ask(sample, keys_of([number, number]), now_s=number / 10)
            number += 1
        for later in range(number, 2 * number):
            ask(sample, keys_of([later, later]), now_s=later / 10)
        size_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(sample) > 0.7 * MOST_CHUNKS
    assert size_bytes < peak_bytes < 8 << 20
