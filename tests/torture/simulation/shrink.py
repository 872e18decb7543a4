"""A failing list of operations, made short: delta debugging (Zeller and Hildebrandt, 2002)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrunk(items: Sequence[T], fails: Callable[[Sequence[T]], bool], attempts: int = 400) -> list[T]:
    """A part of `items`, in their order, that still fails and of which nothing more can be left out (within `attempts`)."""
    left = list(items)
    size = max(1, len(left) // 2)
    while attempts > 0:
        place, found = 0, False
        while place < len(left) and attempts > 0:
            fewer = left[:place] + left[place + size :]
            attempts -= 1
            if fails(fewer):
                left, found = fewer, True
            else:
                place += size
        if size == 1 and not found:
            break
        size = max(1, size // 2)
    return left
