"""When things are to be looked at again."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")

_STALE = 64
"""Entries of the heap that may be out of date, beside as many as are not."""


class Alarms(Generic[T]):
    """One time for each thing; a new one replaces the one before. Of equal times, the least thing is first."""

    def __init__(self) -> None:
        self._times: dict[T, float] = {}
        self._heap: list[tuple[float, T]] = []

    def set(self, thing: T, at_s: float) -> None:
        times = self._times
        if times.get(thing) == at_s:
            return
        times[thing] = at_s
        heapq.heappush(self._heap, (at_s, thing))
        if len(self._heap) > 2 * len(times) + _STALE:
            self._heap = [(at_s, thing) for thing, at_s in times.items()]
            heapq.heapify(self._heap)

    def cancel(self, thing: T) -> None:
        self._times.pop(thing, None)

    @property
    def next_s(self) -> float | None:
        """The first time; None: there is none."""
        heap, times = self._heap, self._times
        while heap and times.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop(self) -> T:
        """What has the first time, of which there is one."""
        while True:
            at_s, thing = heapq.heappop(self._heap)
            if self._times.get(thing) == at_s:
                del self._times[thing]
                return thing

    def __len__(self) -> int:
        """With those that are out of date."""
        return len(self._heap)
