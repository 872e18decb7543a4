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
        super().__init__()
        self.entries: dict[ChunkKey, V] = {}
        self._probation: OrderedDict[ChunkKey, None] = OrderedDict()
        self._protected: OrderedDict[ChunkKey, None] = OrderedDict()
        self._out: OrderedDict[ChunkKey, None] = OrderedDict()

    def insert(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        self._out.pop(key, None)
        self.entries[key] = value
        self._probation[key] = None
        self._join(key, parent)

    def insert_cold(self, key: ChunkKey, value: V) -> None:
        self._out.pop(key, None)
        self.entries[key] = value
        self._probation[key] = None
        self._probation.move_to_end(key, last=False)

    def _use(self, key: ChunkKey) -> None:
        protected = self._protected
        if key in protected:
            protected.move_to_end(key)
        else:
            del self._probation[key]
            protected[key] = None
        # Also where the key was there already: fewer residents than before may have made the segment too long.
        while len(protected) > max(1, int(self.PROTECTED * len(self.entries))):
            demoted, _ = protected.popitem(last=False)
            self._probation[demoted] = None

    def _renew(self, key: ChunkKey) -> None:
        (self._protected if key in self._protected else self._probation).move_to_end(key)

    def _take_back(self, key: ChunkKey, value: V, parent: ChunkKey | None) -> None:
        protected = key in self._out
        self.insert(key, value, parent)
        if protected:
            self._use(key)

    def _coldest(self) -> ChunkKey | None:
        return next(iter(self._probation or self._protected), None)

    def _spare(self, key: ChunkKey) -> OrderedDict[ChunkKey, None]:
        segment = self._protected if key in self._protected else self._probation
        del segment[key]
        return segment

    def _restore(self, key: ChunkKey, standing: OrderedDict[ChunkKey, None]) -> None:
        standing[key] = None

    def _remove(self, key: ChunkKey) -> V:
        self._probation.pop(key, None)
        self._protected.pop(key, None)
        return self.entries.pop(key)

    def _evict(self, key: ChunkKey) -> V:
        if key in self._protected:
            self._out[key] = None
            if len(self._out) > max(64, len(self.entries)):
                self._out.popitem(last=False)
        return self._remove(key)

    def _forget(self, key: ChunkKey) -> None:
        self._out.pop(key, None)


class S3Fifo(EvictionOrder[V]):
    """Three queues: a small one for newcomers, the main one, and the names of what the small one threw out.

    After Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023): newcomers that were used again when
    they reach the end of the small queue (`SMALL` of all residents) move to the main one, others go; who comes back while
    its name is remembered enters the main one; there a chunk gets one more round for each use, up to `MOST_USES`.
    """

    SMALL = 0.1
    MOST_USES = 3

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[ChunkKey, V] = {}
        self._uses: dict[ChunkKey, int] = {}
        self._small: OrderedDict[ChunkKey, None] = OrderedDict()
        self._main: OrderedDict[ChunkKey, None] = OrderedDict()
        self._ghosts: OrderedDict[ChunkKey, None] = OrderedDict()

    def insert(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        self.entries[key] = value
        self._uses[key] = 0
        known = self._ghosts.pop(key, False) is None
        (self._main if known else self._small)[key] = None
        self._join(key, parent)

    def insert_cold(self, key: ChunkKey, value: V) -> None:
        self._ghosts.pop(key, None)
        self.entries[key] = value
        self._uses[key] = 0
        self._small[key] = None
        self._small.move_to_end(key, last=False)

    def _use(self, key: ChunkKey) -> None:
        uses = self._uses[key]
        if uses < self.MOST_USES:
            self._uses[key] = uses + 1

    def _take_back(self, key: ChunkKey, value: V, parent: ChunkKey | None) -> None:
        self._ghosts.pop(key, None)
        self.insert(key, value, parent)

    def _renew(self, key: ChunkKey) -> None:
        (self._small if key in self._small else self._main).move_to_end(key)

    def _coldest(self) -> ChunkKey | None:
        """Moves what deserves to stay on the way."""
        small, main, uses = self._small, self._main, self._uses
        while small or main:
            if small and (len(small) >= self.SMALL * len(self.entries) or not main):
                key = next(iter(small))
                if not uses[key]:
                    return key
                del small[key]
                main[key] = None
                uses[key] = 0
            else:
                key = next(iter(main))
                if not uses[key]:
                    return key
                uses[key] -= 1
                main.move_to_end(key)
        return None

    def _spare(self, key: ChunkKey) -> OrderedDict[ChunkKey, None]:
        queue = self._small if key in self._small else self._main
        del queue[key]
        return queue

    def _restore(self, key: ChunkKey, standing: OrderedDict[ChunkKey, None]) -> None:
        standing[key] = None

    def _remove(self, key: ChunkKey) -> V:
        self._small.pop(key, None)
        self._main.pop(key, None)
        del self._uses[key]
        return self.entries.pop(key)

    def _evict(self, key: ChunkKey) -> V:
        if key in self._small:
            self._ghosts[key] = None
            if len(self._ghosts) > max(64, len(self.entries)):
                self._ghosts.popitem(last=False)
        return self._remove(key)

    def _forget(self, key: ChunkKey) -> None:
        self._ghosts.pop(key, None)
