"""Orders by when a chunk was used, or came."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tiercache.core.eviction.base import EvictionOrder, V
from tiercache.core.keys import ChunkKey


class Lru(EvictionOrder[V]):
    """Least recently used first. A read is a use."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: OrderedDict[ChunkKey, V] = OrderedDict()

    def insert(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        self.entries[key] = value
        if parent is not None:
            self._join(key, parent)

    def insert_cold(self, key: ChunkKey, value: V) -> None:
        self.entries[key] = value
        self.entries.move_to_end(key, last=False)

    def touch(self, key: ChunkKey) -> None:
        self.entries.move_to_end(key)

    def _coldest(self) -> ChunkKey:
        return next(iter(self.entries))

    def _remove(self, key: ChunkKey) -> V:
        return self.entries.pop(key)


class Mru(Lru[V]):
    """Most recently used first: for cyclic scans over more than fits, where LRU never hits."""

    def _coldest(self) -> ChunkKey:
        return next(reversed(self.entries))


class Fifo(Lru[V]):
    """Oldest first, however often it was used. Parents are ignored: the oldest of all is a prefix that everybody shares."""

    def insert(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        self.entries[key] = value

    def follow(self, keys: Sequence[ChunkKey]) -> None:
        pass

    def touch(self, key: ChunkKey) -> None:
        pass

    def readmit(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        self.insert_cold(key, value)
