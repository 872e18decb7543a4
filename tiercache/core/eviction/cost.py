"""An order by what a chunk is expected to save for the room that it takes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from zlib import crc32

from tiercache.core.eviction.base import EvictionOrder, V
from tiercache.core.eviction.reuse import Sample, worst
from tiercache.core.keys import ChunkKey

_CLASSES = 4
_USED, _CONTINUES = 1, 2


class CostAware(EvictionOrder[V]):
    """Out goes what saves least per byte and time, where that is clearly less than what the oldest would save: else LRU.

    Chunks of one layout have one size and nearly one saving, so what is left to know is when a chunk will be used again,
    if at all. Residents are divided into four classes: whether they were used since they came, and whether they continue a
    prefix that was used. Each is a queue, the least recent first. A sample of names learns at which ages the members of
    each class are used again, and what each age is worth (`expected_uses`). The first of the queue whose index is lowest
    goes, if the oldest of all is worth `MARGIN` times as much, else the oldest.

    After Beckmann, Chen and Cidon, "LHD: Improving cache hit rate by maximizing hit density" (NSDI 2018), with queues in
    place of sampled victims and Gittins' horizon in place of a whole life.
    """

    REMEMBERED = 4
    """Classes of evicted chunks, as a multiple of the residents."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[ChunkKey, V] = {}
        self._queues: list[OrderedDict[ChunkKey, int]] = [OrderedDict() for _ in range(_CLASSES)]
        self._classes: dict[ChunkKey, int] = {}
        self._gone: OrderedDict[ChunkKey, int] = OrderedDict()
        self._most_gone = 64
        self._clock = 0
        self.sample = Sample(_CLASSES)

    def insert(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        self._clock += 1
        class_ = self._gone.pop(key, None)
        if class_ is not None:
            class_ |= _USED
        else:
            class_ = _CONTINUES if parent is not None and self._classes.get(parent, 0) else 0
        self.entries[key] = value
        self._classes[key] = class_
        self._queues[class_][key] = self._clock
        self._join(key, parent)
        if not crc32(key) & self.sample.mask:
            self.sample.used(key, class_, self._clock)

    def insert_all(self, residents: Mapping[ChunkKey, V], parents: Mapping[ChunkKey, ChunkKey]) -> None:
        if parents or len(self.entries) + len(residents) > self._most:
            return super().insert_all(residents, parents)
        classes, gone, sample, now = self._classes, self._gone, self.sample, self._clock
        for key in residents:
            now += 1
            class_ = gone.pop(key, None)
            class_ = 0 if class_ is None else class_ | _USED
            classes[key] = class_
            self._queues[class_][key] = now
            if not crc32(key) & sample.mask:
                sample.used(key, class_, now)
        self._clock = now
        self.entries.update(residents)
        self._awaited = False
        self._recent.came(residents)
        self._trim()

    def insert_cold(self, key: ChunkKey, value: V) -> None:
        self._gone.pop(key, None)
        self._place(key, value, 0)
        self._queues[0][key] = self._clock - (1 << 40)
        self._queues[0].move_to_end(key, last=False)

    def _adopt(self, key: ChunkKey, parent: ChunkKey, tail: ChunkKey | None = None) -> ChunkKey | None:
        found = super()._adopt(key, parent, tail)
        if not self._classes[key] and self._classes[parent]:
            # It came without its parent; until it is used its class is that of what it continues.
            self._classes[key] = _CONTINUES
            self._queues[_CONTINUES][key] = self._queues[0].pop(key)
        return found

    def _use(self, key: ChunkKey) -> None:
        now = self._clock = self._clock + 1
        class_ = self._classes[key]
        if class_ & _USED:
            queue = self._queues[class_]
            queue.move_to_end(key)
        else:
            del self._queues[class_][key]
            class_ |= _USED
            self._classes[key] = class_
            queue = self._queues[class_]
        queue[key] = now
        if not crc32(key) & self.sample.mask:
            self.sample.used(key, class_, now)

    def _renew(self, key: ChunkKey) -> None:
        queue = self._queues[self._classes[key]]
        queue[key] = self._clock
        queue.move_to_end(key)

    def _take_back(self, key: ChunkKey, value: V, parent: ChunkKey | None) -> None:
        class_ = self._gone.pop(key, 0)
        self._place(key, value, class_)
        self._join(key, parent)

    def _coldest(self) -> ChunkKey | None:
        spared = self._spared.standings
        firsts = []
        for class_, queue in enumerate(self._queues):
            if queue:
                key = next(iter(queue))
                since = queue[key]
                if key not in spared:  # or all of this class are: they are behind all others
                    firsts.append((since, class_, key))
        if len(firsts) > 1:
            return worst(firsts, self.sample.table, self._clock)
        return firsts[0][2] if firsts else None

    def _spare(self, key: ChunkKey) -> None:
        self._renew(key)

    def _restore(self, key: ChunkKey, standing: None) -> None:
        pass

    def _hasten(self, key: ChunkKey) -> None:
        self._queues[self._classes[key]].move_to_end(key, last=False)

    def _remove(self, key: ChunkKey) -> V:
        del self._queues[self._classes.pop(key)][key]
        return self.entries.pop(key)

    def _evict(self, key: ChunkKey) -> V:
        self._gone[key] = class_ = self._classes.pop(key)
        if len(self._gone) > self._most_gone:
            self._gone.popitem(last=False)
        del self._queues[class_][key]
        return self.entries.pop(key)

    def _grown(self, residents: int) -> None:
        super()._grown(residents)
        self._most_gone = max(64, self.REMEMBERED * residents)
        self.sample.resize(residents)

    def _forget(self, key: ChunkKey) -> None:
        self._gone.pop(key, None)

    def _place(self, key: ChunkKey, value: V, class_: int) -> None:
        self.entries[key] = value
        self._classes[key] = class_
        self._queues[class_][key] = self._clock
