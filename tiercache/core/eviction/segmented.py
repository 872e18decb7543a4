"""Orders that keep newcomers apart from what has proved itself."""

from __future__ import annotations

from collections import OrderedDict

from tiercache.core.eviction.base import EvictionOrder, V
from tiercache.core.keys import ChunkKey


class Slru(EvictionOrder[V]):
    """Segmented LRU: what was used again is protected, up to `PROTECTED` of all residents; the others go first.

    After Karedla, Love and Wherry, "Caching strategies to improve disk system performance" (1994). What leaves the
    protected segment is the newest of the others.
    """

    PROTECTED = 0.8

    def __init__(self) -> None:
        self.entries: dict[ChunkKey, V] = {}
        self._probation: OrderedDict[ChunkKey, None] = OrderedDict()
        self._protected: OrderedDict[ChunkKey, None] = OrderedDict()
        self._out: OrderedDict[ChunkKey, None] = OrderedDict()

    def insert(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        self._out.pop(key, None)
        self.entries[key] = value
        self._probation[key] = None

    def insert_cold(self, key: ChunkKey, value: V) -> None:
        self.insert(key, value)
        self._probation.move_to_end(key, last=False)

    def touch(self, key: ChunkKey) -> None:
        protected = self._protected
        if key in protected:
            protected.move_to_end(key)
            return
        del self._probation[key]
        protected[key] = None
        self._shrink()

    def discard(self, key: ChunkKey) -> V | None:
        self._out.pop(key, None)
        if key not in self.entries:
            return None
        self._probation.pop(key, None)
        self._protected.pop(key, None)
        return self.entries.pop(key)

    def pop_victim(self) -> tuple[ChunkKey, V]:
        if self._probation:
            key, _ = self._probation.popitem(last=False)
        else:
            key, _ = self._protected.popitem(last=False)
            self._out[key] = None
            if len(self._out) > max(64, len(self.entries)):
                self._out.popitem(last=False)
        return key, self.entries.pop(key)

    def readmit(self, key: ChunkKey, value: V) -> None:
        protected = key in self._out
        self.insert(key, value)
        if protected:
            self.touch(key)

    def _shrink(self) -> None:
        while len(self._protected) > max(1, int(self.PROTECTED * len(self.entries))):
            key, _ = self._protected.popitem(last=False)
            self._probation[key] = None


class S3Fifo(EvictionOrder[V]):
    """Three queues: a small one for newcomers, the main one, and the names of what the small one threw out.

    After Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023): newcomers that were used more than
    once when they reach the end of the small queue (`SMALL` of all residents) move to the main one, others go; who comes
    back while its name is remembered enters the main one; the main queue gives a chunk one more round for each use.
    """

    SMALL = 0.1
    MOST_USES = 3

    def __init__(self) -> None:
        self.entries: dict[ChunkKey, V] = {}
        self._uses: dict[ChunkKey, int] = {}
        self._small: OrderedDict[ChunkKey, None] = OrderedDict()
        self._main: OrderedDict[ChunkKey, None] = OrderedDict()
        self._ghosts: OrderedDict[ChunkKey, None] = OrderedDict()

    def insert(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        known = key in self._ghosts
        if known:
            del self._ghosts[key]
        self.entries[key] = value
        self._uses[key] = 0
        (self._main if known else self._small)[key] = None

    def insert_cold(self, key: ChunkKey, value: V) -> None:
        self.entries[key] = value
        self._uses[key] = 0
        self._small[key] = None
        self._small.move_to_end(key, last=False)

    def touch(self, key: ChunkKey) -> None:
        uses = self._uses[key]
        if uses < self.MOST_USES:
            self._uses[key] = uses + 1

    def discard(self, key: ChunkKey) -> V | None:
        if key not in self.entries:
            return None
        self._small.pop(key, None)
        self._main.pop(key, None)
        del self._uses[key]
        return self.entries.pop(key)

    def pop_victim(self) -> tuple[ChunkKey, V]:
        if not self.entries:
            raise KeyError("nothing is resident")
        while True:
            if self._small and (len(self._small) >= self.SMALL * len(self.entries) or not self._main):
                key, _ = self._small.popitem(last=False)
                if self._uses[key] > 1:
                    self._main[key] = None
                    self._uses[key] = 0
                    continue
                self._ghosts[key] = None
                if len(self._ghosts) > max(64, len(self.entries)):
                    self._ghosts.popitem(last=False)
            else:
                key, _ = self._main.popitem(last=False)
                if uses := self._uses[key]:
                    self._uses[key] = uses - 1
                    self._main[key] = None
                    continue
            del self._uses[key]
            return key, self.entries.pop(key)

    def readmit(self, key: ChunkKey, value: V) -> None:
        self.insert(key, value)
