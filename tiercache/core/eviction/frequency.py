"""Orders by how often a chunk was used."""

from __future__ import annotations

from collections import OrderedDict

from tiercache.core.eviction.base import EvictionOrder, V
from tiercache.core.keys import ChunkKey


class Lfu(EvictionOrder[V]):
    """Least frequently used first, the least recent of those first. Counts stop at 255, so old fame fades from view.

    Buckets by count, after Shah, Mitra and Matani, "An O(1) algorithm for implementing the LFU cache eviction
    scheme" (2010).
    """

    MAX_COUNT = 255

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[ChunkKey, V] = {}
        self._counts: dict[ChunkKey, int] = {}
        self._buckets: dict[int, OrderedDict[ChunkKey, None]] = {}
        self._lowest = 1
        self._out: dict[ChunkKey, int] = {}

    def insert(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        self._place(key, value, 1)
        self._join(key, parent)

    def insert_cold(self, key: ChunkKey, value: V) -> None:
        self._place(key, value, 0)

    def _use(self, key: ChunkKey) -> None:
        count = self._counts[key]
        self._leave_bucket(key, count)
        count = min(count + 1, self.MAX_COUNT)
        self._counts[key] = count
        self._buckets.setdefault(count, OrderedDict())[key] = None

    def _renew(self, key: ChunkKey) -> None:
        self._buckets[self._counts[key]].move_to_end(key)

    def _take_back(self, key: ChunkKey, value: V, parent: ChunkKey | None) -> None:
        self._place(key, value, self._out.pop(key, 1))
        self._join(key, parent)

    def _coldest(self) -> ChunkKey | None:
        if not self._buckets:
            return None
        while self._lowest not in self._buckets:
            self._lowest += 1
        return next(iter(self._buckets[self._lowest]))

    def _spare(self, key: ChunkKey) -> None:
        self._leave_bucket(key, self._counts[key])

    def _restore(self, key: ChunkKey, standing: None) -> None:
        count = self._counts[key]
        self._buckets.setdefault(count, OrderedDict())[key] = None
        self._lowest = min(self._lowest, count)

    def _remove(self, key: ChunkKey) -> V:
        self._leave_bucket(key, self._counts.pop(key))
        return self.entries.pop(key)

    def _evict(self, key: ChunkKey) -> V:
        self._out[key] = self._counts[key]
        value = self._remove(key)
        if len(self._out) > max(64, len(self.entries)):
            self._out.pop(next(iter(self._out)))
        return value

    def _forget(self, key: ChunkKey) -> None:
        self._out.pop(key, None)

    def _place(self, key: ChunkKey, value: V, count: int) -> None:
        self._out.pop(key, None)
        self.entries[key] = value
        self._counts[key] = count
        self._buckets.setdefault(count, OrderedDict())[key] = None
        self._lowest = min(self._lowest, count)

    def _leave_bucket(self, key: ChunkKey, count: int) -> None:
        bucket = self._buckets[count]
        del bucket[key]
        if not bucket:
            del self._buckets[count]
