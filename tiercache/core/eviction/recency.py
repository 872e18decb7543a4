"""Orders by when a chunk was used, or came."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping

from tiercache.core.eviction.base import EvictionOrder, V
from tiercache.core.keys import ChunkKey


class Lru(EvictionOrder[V]):
    """Least recently used first. A read is a use.

    What was used last is far from going without being noted. Only where prefixes are known does it have to be: a chunk may
    be old, and stand before one that was just stored. Once a use was noted later ones are, too, also when no prefix is left:
    else what was noted would be spared before what was used after it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: OrderedDict[ChunkKey, V] = OrderedDict()

    def insert(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        self.entries[key] = value
        if parent is not None or self._recent.ends or self._family.parents:
            self._join(key, parent)

    def insert_all(self, residents: Mapping[ChunkKey, V], parents: Mapping[ChunkKey, ChunkKey]) -> None:
        if parents or self._recent.ends or self._family.parents:
            super().insert_all(residents, parents)
        else:
            self.entries.update(residents)

    def insert_cold(self, key: ChunkKey, value: V) -> None:
        self.entries[key] = value
        self.entries.move_to_end(key, last=False)

    def age(self, key: ChunkKey) -> None:
        if key in self.entries:
            self._path.clear()
            self._leave(key)
            self.entries.move_to_end(key, last=False)  # a map that loses and gains keys is made anew, in one long step

    def touch(self, key: ChunkKey) -> None:
        if self._recent.ends or self._family.parents:
            super().touch(key)
        else:
            self.entries.move_to_end(key)

    def _use(self, key: ChunkKey) -> None:
        self.entries.move_to_end(key)

    def _coldest(self) -> ChunkKey | None:
        key = next(iter(self.entries))
        # What is spared is put behind all others. Where one is the first, they have had their turn.
        return None if key in self._spared.standings else key

    def _spare(self, key: ChunkKey) -> None:
        self.entries.move_to_end(key)

    def _restore(self, key: ChunkKey, standing: None) -> None:
        pass

    def _hasten(self, key: ChunkKey) -> None:
        self.entries.move_to_end(key, last=False)

    def _remove(self, key: ChunkKey) -> V:
        return self.entries.pop(key)


class Mru(EvictionOrder[V]):
    """Most recently used first, of what is not too recent to be judged: for cyclic scans, where LRU never hits."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[ChunkKey, V] = {}
        self._queue: OrderedDict[ChunkKey, None] = OrderedDict()

    def insert(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        self.entries[key] = value
        self._queue[key] = None
        self._join(key, parent)

    def insert_cold(self, key: ChunkKey, value: V) -> None:
        self.entries[key] = value
        self._queue[key] = None
        self._queue.move_to_end(key, last=False)

    def _use(self, key: ChunkKey) -> None:
        self._queue.move_to_end(key)

    def _coldest(self) -> ChunkKey | None:
        return next(reversed(self._queue), None)

    def _spare(self, key: ChunkKey) -> None:
        del self._queue[key]

    def _restore(self, key: ChunkKey, standing: None) -> None:
        self._queue[key] = None

    def _remove(self, key: ChunkKey) -> V:
        del self._queue[key]
        return self.entries.pop(key)


class Fifo(EvictionOrder[V]):
    """Oldest first, however often it was used."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[ChunkKey, V] = {}
        self._came: dict[ChunkKey, int] = {}
        self._clock = 0
        self._coldest_clock = 0
        self._queue: OrderedDict[ChunkKey, None] = OrderedDict()
        self._restored: list[tuple[int, ChunkKey]] = []
        """Those that were spared once stand here by their age, beside the queue."""
        self._out: OrderedDict[ChunkKey, int] = OrderedDict()

    def insert(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        self._out.pop(key, None)
        self._clock += 1
        self.entries[key] = value
        self._came[key] = self._clock
        self._queue[key] = None
        self._join(key, parent)

    def insert_cold(self, key: ChunkKey, value: V) -> None:
        self._out.pop(key, None)
        self._coldest_clock -= 1
        self.entries[key] = value
        self._came[key] = self._coldest_clock
        self._queue[key] = None
        self._queue.move_to_end(key, last=False)

    def _use(self, key: ChunkKey) -> None:
        pass

    def _take_back(self, key: ChunkKey, value: V, parent: ChunkKey | None) -> None:
        came = self._out.pop(key, None)
        self.insert(key, value, parent)
        if came is not None:
            self._came[key] = came
            del self._queue[key]
            heapq.heappush(self._restored, (came, key))

    def _coldest(self) -> ChunkKey | None:
        first = next(iter(self._queue), None)
        restored = self._restored
        while restored:
            came, key = restored[0]
            if self._came.get(key) == came and key not in self._queue and key not in self._spared.standings:
                if first is None or came < self._came[first]:
                    return key
                break
            heapq.heappop(restored)
        return first

    def _spare(self, key: ChunkKey) -> None:
        self._queue.pop(key, None)

    def _restore(self, key: ChunkKey, standing: None) -> None:
        heapq.heappush(self._restored, (self._came[key], key))

    def _remove(self, key: ChunkKey) -> V:
        self._queue.pop(key, None)
        del self._came[key]
        return self.entries.pop(key)

    def _evict(self, key: ChunkKey) -> V:
        self._out[key] = self._came[key]
        if len(self._out) > max(64, len(self.entries)):
            self._out.popitem(last=False)
        return self._remove(key)

    def _forget(self, key: ChunkKey) -> None:
        self._out.pop(key, None)
