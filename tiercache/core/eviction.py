"""Eviction orders: which resident goes first.

An order is also the map from key to value, so that a million residents cost one container. Everything is O(1) an
operation (LFU: O(1) amortised). The caller decides whether a victim may really go; one that may not (it is leased) is
handed back by `readmit` when it may, so it is met at most once per lease however many are held.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import MutableMapping
from typing import Generic, TypeVar

from tiercache.core.keys import ChunkKey

V = TypeVar("V")


class EvictionOrder(ABC, Generic[V]):
    """Residents, and the order in which they would be evicted."""

    entries: MutableMapping[ChunkKey, V]

    @abstractmethod
    def insert(self, key: ChunkKey, value: V) -> None:
        """Add a resident that was just used. `key` must not be resident."""

    @abstractmethod
    def insert_cold(self, key: ChunkKey, value: V) -> None:
        """Add a resident of unknown age (found on disk after a restart): first in line to go."""

    @abstractmethod
    def touch(self, key: ChunkKey) -> None:
        """Note a use of a resident key."""

    @abstractmethod
    def discard(self, key: ChunkKey) -> V | None:
        """Remove a key; None when it is not resident."""

    @abstractmethod
    def pop_victim(self) -> tuple[ChunkKey, V]:
        """Remove and return the resident that should go first; KeyError when empty."""

    def readmit(self, key: ChunkKey, value: V) -> None:
        """Take back a victim that could not go."""
        self.insert(key, value)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, key: object) -> bool:
        return key in self.entries


class Lru(EvictionOrder[V]):
    """Least recently used first. A read is a use."""

    def __init__(self) -> None:
        self.entries: OrderedDict[ChunkKey, V] = OrderedDict()

    def insert(self, key: ChunkKey, value: V) -> None:
        self.entries[key] = value

    def insert_cold(self, key: ChunkKey, value: V) -> None:
        self.entries[key] = value
        self.entries.move_to_end(key, last=False)

    def touch(self, key: ChunkKey) -> None:
        self.entries.move_to_end(key)

    def discard(self, key: ChunkKey) -> V | None:
        return self.entries.pop(key, None)

    def pop_victim(self) -> tuple[ChunkKey, V]:
        return self.entries.popitem(last=False)


class Mru(Lru[V]):
    """Most recently used first: for cyclic scans over more than fits, where LRU never hits."""

    def pop_victim(self) -> tuple[ChunkKey, V]:
        return self.entries.popitem(last=True)


class Fifo(Lru[V]):
    """Oldest first, however often it was used."""

    def touch(self, key: ChunkKey) -> None:
        pass

    def readmit(self, key: ChunkKey, value: V) -> None:
        self.insert_cold(key, value)


class Lfu(EvictionOrder[V]):
    """Least frequently used first, the least recent of those first. Counts stop at 255, so old fame fades from view.

    Buckets by count, after Shah, Mitra and Matani, "An O(1) algorithm for implementing the LFU cache eviction
    scheme" (2010).
    """

    MAX_COUNT = 255

    def __init__(self) -> None:
        self.entries: dict[ChunkKey, V] = {}
        self._counts: dict[ChunkKey, int] = {}
        self._buckets: dict[int, OrderedDict[ChunkKey, None]] = {}
        self._lowest = 1
        self._out: dict[ChunkKey, int] = {}

    def insert(self, key: ChunkKey, value: V) -> None:
        self._place(key, value, 1)

    def insert_cold(self, key: ChunkKey, value: V) -> None:
        self._place(key, value, 0)

    def touch(self, key: ChunkKey) -> None:
        count = self._counts[key]
        self._leave(key, count)
        count = min(count + 1, self.MAX_COUNT)
        self._counts[key] = count
        self._buckets.setdefault(count, OrderedDict())[key] = None

    def discard(self, key: ChunkKey) -> V | None:
        self._out.pop(key, None)
        if key not in self.entries:
            return None
        self._leave(key, self._counts.pop(key))
        return self.entries.pop(key)

    def pop_victim(self) -> tuple[ChunkKey, V]:
        if not self.entries:
            raise KeyError("nothing is resident")
        while self._lowest not in self._buckets:
            self._lowest += 1
        key = next(iter(self._buckets[self._lowest]))
        count = self._counts[key]
        value = self.discard(key)
        self._out[key] = count
        if len(self._out) > max(64, len(self.entries)):
            self._out.pop(next(iter(self._out)))
        return key, value  # type: ignore[return-value]

    def readmit(self, key: ChunkKey, value: V) -> None:
        self._place(key, value, self._out.pop(key, 1))

    def _place(self, key: ChunkKey, value: V, count: int) -> None:
        self._out.pop(key, None)
        self.entries[key] = value
        self._counts[key] = count
        self._buckets.setdefault(count, OrderedDict())[key] = None
        self._lowest = min(self._lowest, count)

    def _leave(self, key: ChunkKey, count: int) -> None:
        bucket = self._buckets[count]
        del bucket[key]
        if not bucket:
            del self._buckets[count]


ORDERS: dict[str, type[EvictionOrder]] = {"LRU": Lru, "LFU": Lfu, "FIFO": Fifo, "MRU": Mru}  # type: ignore[type-arg]


def make_order(policy: str) -> EvictionOrder[V]:
    """The order called `policy` in the configuration (`cache_policy`)."""
    return ORDERS[policy.upper()]()
