"""A failing list, made short."""

from collections.abc import Sequence

from tests.torture.simulation.shrink import shrunk


def test_what_is_left_still_fails_and_nothing_of_it_can_be_left_out() -> None:
    def fails(items: Sequence[int]) -> bool:
        return {3, 41, 77} <= set(items)

    assert shrunk(range(100), fails) == [3, 41, 77]


def test_it_ends_after_so_many_attempts() -> None:
    attempts = []

    def fails(items: Sequence[int]) -> bool:
        attempts.append(len(items))
        return sum(items) >= sum(range(50))

    assert sum(shrunk(range(100), fails, attempts=20)) >= sum(range(50))
    assert len(attempts) <= 20


def test_what_fails_without_any_is_left_with_none() -> None:
    assert shrunk(range(10), lambda items: True) == []
