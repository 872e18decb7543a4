"""Orders by when a chunk was used, or came."""

from __future__ import annotations

from collections import OrderedDict

from tiercache.core.eviction.base import EvictionOrder, V
from tiercache.core.eviction.family import Family
from tiercache.core.keys import ChunkKey


class Lru(EvictionOrder[V]):
    """Least recently used first. A read is a use. Prefixes stay whole.

    Where parents are given, a chunk never goes while one that follows it is resident: when its turn has come, the last of
    those behind it goes instead, and the others after that one, from the tail up to the chunk itself. A chunk without the
    ones before it is of no use to anybody, however recently it was used.
    """

    def __init__(self) -> None:
        self.entries: OrderedDict[ChunkKey, V] = OrderedDict()
        self._family = Family()
        self._path: list[ChunkKey] = []

    def insert(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        self.entries[key] = value
        if parent is not None and parent in self.entries and parent != key:
            self._family.add(key, parent)

    def insert_cold(self, key: ChunkKey, value: V) -> None:
        self.entries[key] = value
        self.entries.move_to_end(key, last=False)

    def touch(self, key: ChunkKey) -> None:
        self.entries.move_to_end(key)

    def discard(self, key: ChunkKey) -> V | None:
        if len(self._family):
            self._family.remove(key)
        return self.entries.pop(key, None)

    def pop_victim(self) -> tuple[ChunkKey, V]:
        if not len(self._family):
            return self.entries.popitem(last=False)
        key = self._tail_behind(next(iter(self.entries)))
        self._family.remove(key)
        return key, self.entries.pop(key)

    def _tail_behind(self, key: ChunkKey) -> ChunkKey:
        """The end of the prefix that `key` is in. The way there is kept: it is walked once, not once for each victim."""
        path = self._path
        while path and (path[-1] not in self.entries or path[0] != key):
            path.pop()
        if not path:
            path.append(key)
        while (child := self._family.child(path[-1])) is not None:
            path.append(child)
        return path.pop()


class Mru(Lru[V]):
    """Most recently used first: for cyclic scans over more than fits, where LRU never hits."""

    def insert(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        self.entries[key] = value

    def pop_victim(self) -> tuple[ChunkKey, V]:
        return self.entries.popitem(last=True)


class Fifo(Lru[V]):
    """Oldest first, however often it was used."""

    def touch(self, key: ChunkKey) -> None:
        pass

    def readmit(self, key: ChunkKey, value: V) -> None:
        self.insert_cold(key, value)
