"""Distributions: what falls into which bucket, and that they add up and differ."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.estimate import Distribution

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


def test_copy_does_not_change_with_the_original() -> None:
    original = of([1.0])
    copy = original.copy()
    original.add(1.0)
    assert copy == of([1.0])
