"""Sizes by chunk key in the order of their last accesses, in parts that grow one at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

from tiercache.core.keys import ChunkKey

PARTS = 256
"""One for each first byte of a key. Keys are hashes, so parts have about the same size."""

TIME = 1 << 44
"""One step of the clock. A size in bytes is less."""
_SIZE = TIME - 1


class LruMap:
    """Sizes in bytes by chunk key, least recently used first.

    A dict grows in one call, which takes hundreds of milliseconds for a million entries. So a map of many entries is divided
    into 256 dicts by the first byte of the key. A value holds the time of the last access, a counter, above the size, so
    the coldest entry is the smallest of the parts' first values. A heap has a lower bound of each part's first value; a
    bound that is too low is raised when it surfaces.

    Every operation takes O(1), `coldest` O(log 256) more.
    """

    __slots__ = ("_bounds", "_clock", "_count", "_divided", "_front", "_heap", "_undivided", "parts")

    def __init__(self, undivided: int = 4096) -> None:
        """`undivided` is the number of entries from which on the map is divided."""
        self.parts: list[OrderedDict[ChunkKey, int]] = [OrderedDict()] * PARTS
        """`key in parts[key[0]]` is the quickest look-up. The list stays the same object; its items change."""
        self._count = 0
        self._divided = False
        self._undivided = undivided
        self._clock = 0
        """The time of the last access, in steps of `TIME`."""
        self._front = 0
        """The time of the coldest entry that was put, or moved, in front of all others."""
        self._bounds: list[int | None] = [None]
        """The valid item of each part in the heap; None where it has none, since the part is empty. One while undivided."""
        self._heap: list[tuple[int, int]] = []
        """(bound, part), items that are not in `_bounds` among them."""

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: Any) -> bool:
        return key in self.parts[key[0]]

    def __iter__(self) -> Iterator[ChunkKey]:
        """All keys, by part. Nothing may be added or removed meanwhile."""
        for part in self.parts if self._divided else self.parts[:1]:
            yield from dict.keys(part)

    def part(self, first_byte: int) -> list[ChunkKey]:
        """Return the keys that begin with this byte, in no order of accesses: to list those takes ten times as long."""
        keys = list(dict.keys(self.parts[first_byte]))
        return keys if self._divided else [key for key in keys if key[0] == first_byte]

    def get(self, key: ChunkKey) -> int | None:
        """Return the size; None where there is no such key. No access."""
        value = self.parts[key[0]].get(key)
        return None if value is None else value & _SIZE

    def time(self, key: ChunkKey) -> int | None:
        """Return the time of the last access as `put` got it; None where there is no such key."""
        value = self.parts[key[0]].get(key)
        return None if value is None else value // TIME

    def put(self, key: ChunkKey, size_bytes: int, *, cold: bool = False, time: int = 0) -> int | None:
        """Set the size of `key`, as its last access. Return the size that it had, None if it is new.

        A new key that is `cold` comes before all others, and a known one keeps its place. The clock moves on to `time` at
        least.
        """
        part = self.parts[key[0]]
        before = part.get(key)
        if cold:
            if before is not None:
                part[key] = before - (before & _SIZE) + size_bytes
                return before & _SIZE
            self._front -= TIME
            part[key] = self._front + size_bytes
            part.move_to_end(key, last=False)
            self._lower(key[0], self._front + size_bytes)
        else:
            clock = self._clock + TIME
            if time and clock < time * TIME:
                clock = time * TIME
            self._clock = clock
            part[key] = value = clock + size_bytes
            if before is not None:
                part.move_to_end(key)
                return before & _SIZE
            if len(part) == 1:
                self._lower(key[0], value)
        self._count += 1
        if self._count > self._undivided and not self._divided:
            self._divide()
        return None

    def touch(self, key: ChunkKey) -> bool:
        """Make `key` the last that was used; return False where there is no such key."""
        part = self.parts[key[0]]
        value = part.get(key)
        if value is None:
            return False
        self._clock = clock = self._clock + TIME
        part[key] = clock + (value & _SIZE)
        part.move_to_end(key)
        return True

    def age(self, key: ChunkKey) -> bool:
        """Move `key` before all others; return False where there is no such key."""
        part = self.parts[key[0]]
        value = part.get(key)
        if value is None:
            return False
        self._front -= TIME
        part[key] = value = self._front + (value & _SIZE)
        part.move_to_end(key, last=False)
        self._lower(key[0], value)
        return True

    def pop(self, key: ChunkKey) -> int | None:
        """Remove `key`; return its size, None where there is no such key."""
        value = self.parts[key[0]].pop(key, None)
        if value is None:
            return None
        self._count -= 1
        return value & _SIZE

    def coldest(self) -> ChunkKey | None:
        """Return the key whose last access is the longest ago; None where the map is empty."""
        heap, bounds = self._heap, self._bounds
        while heap:
            bound, number = heap[0]
            if bounds[number] != bound:
                heappop(heap)
                continue
            part = self.parts[number]
            if not part:
                bounds[number] = None
                heappop(heap)
                continue
            key = next(iter(part))
            if (value := part[key]) == bound:
                return key
            bounds[number] = value
            heapreplace(heap, (value, number))
        return None

    def _lower(self, first_byte: int, value: int) -> None:
        """The first value of a part is `value` now."""
        number = first_byte if self._divided else 0
        bounds = self._bounds
        if (bound := bounds[number]) is not None and bound <= value:
            return
        bounds[number] = value
        heappush(self._heap, (value, number))
        if len(self._heap) > 2 * PARTS:
            self._heap = [(bound, number) for number, bound in enumerate(bounds) if bound is not None]
            heapify(self._heap)

    def _divide(self) -> None:
        whole = self.parts[0]
        self.parts[:] = [OrderedDict() for _ in range(PARTS)]
        self._divided = True
        for key, value in whole.items():
            self.parts[key[0]][key] = value
        self._bounds = [next(iter(part.values()), None) for part in self.parts]
        self._heap = [(bound, number) for number, bound in enumerate(self._bounds) if bound is not None]
        heapify(self._heap)
