"""An order by what a chunk is expected to save for the room that it takes."""

from __future__ import annotations

from collections import OrderedDict
from math import log

from tiercache.core.eviction.base import EvictionOrder, V
from tiercache.core.keys import ChunkKey

_USES = 4
_GENERATIONS = 4
_CLASSES = _USES * _GENERATIONS
_BUCKETS = 64
_PER_OCTAVE = 3
_LEAST_SAMPLES = 50.0


class CostAware(EvictionOrder[V]):
    """Out goes what saves least per byte and time: reuse probability times (recompute - load), over bytes and waiting.

    Chunks of one layout have one size and nearly one saving, so what is left to know is when a chunk will be used again, if
    at all. That is learnt. Residents are divided into classes by how often they were used and by how often the prefix that
    they continued had been continued before (a first turn, a second one, ...). Each class is a queue, the least recent first,
    and has a histogram of the ages at which its members were used again, kept complete by remembering the names of evicted
    chunks. From it follows an index for each age: the best ratio, over all horizons, of expected uses to expected time in
    the cache (Gittins). The head of the queue with the lowest index goes. Time is counted in insertions.

    After Beckmann, Chen and Cidon, "LHD: Improving cache hit rate by maximizing hit density" (NSDI 2018), with queues in place
    of sampling and Gittins' horizon in place of a whole life.
    """

    REMEMBERED = 4
    """Names of evicted chunks, as a multiple of the residents."""
    DECAY = 0.9

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[ChunkKey, V] = {}
        self._queues: list[OrderedDict[ChunkKey, int]] = [OrderedDict() for _ in range(_CLASSES)]
        self._classes: dict[ChunkKey, int] = {}
        self._ghosts: OrderedDict[ChunkKey, tuple[int, int]] = OrderedDict()
        self._clock = 0
        self._next_fit = 1000
        self._hits = [[0.0] * _BUCKETS for _ in range(_CLASSES)]
        self._lost = [[0.0] * _BUCKETS for _ in range(_CLASSES)]
        self._index = [[1.0 / _ages(bucket)[1] for bucket in range(_BUCKETS)] for _ in range(_CLASSES)]

    def insert(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        self._clock += 1
        ghost = self._ghosts.pop(key, None)
        if ghost is None:
            class_ = self._newcomer(parent)
        else:
            class_, since = ghost
            self._hits[class_][_bucket(self._clock - since)] += 1
            class_ = _used(class_)
        self.entries[key] = value
        self._classes[key] = class_
        self._queues[class_][key] = self._clock
        self._join(key, parent)
        if self._clock >= self._next_fit:
            self._fit()

    def insert_cold(self, key: ChunkKey, value: V) -> None:
        self.entries[key] = value
        self._classes[key] = 0
        self._queues[0][key] = self._clock - (1 << 40)
        self._queues[0].move_to_end(key, last=False)

    def touch(self, key: ChunkKey) -> None:
        class_ = self._classes[key]
        since = self._queues[class_].pop(key)
        self._hits[class_][_bucket(self._clock - since)] += 1
        class_ = _used(class_)
        self._classes[key] = class_
        self._queues[class_][key] = self._clock

    def readmit(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        ghost = self._ghosts.pop(key, None)
        self.insert(key, value, parent)
        if ghost is not None:
            del self._queues[self._classes[key]][key]
            self._classes[key] = ghost[0]
            self._queues[ghost[0]][key] = self._clock

    def _coldest(self) -> ChunkKey:
        best, lowest, oldest = None, 0.0, 0
        for class_, queue in enumerate(self._queues):
            if queue:
                key = next(iter(queue))
                since = queue[key]
                index = self._index[class_][_bucket(self._clock - since)]
                if best is None or index < lowest or (index == lowest and since < oldest):
                    best, lowest, oldest = key, index, since
        assert best is not None
        return best

    def _remove(self, key: ChunkKey) -> V:
        del self._queues[self._classes.pop(key)][key]
        return self.entries.pop(key)

    def _evict(self, key: ChunkKey) -> V:
        class_ = self._classes[key]
        self._ghosts[key] = class_, self._queues[class_][key]
        if len(self._ghosts) > max(1024, self.REMEMBERED * len(self.entries)):
            _, (class_, since) = self._ghosts.popitem(last=False)
            self._lost[class_][_bucket(self._clock - since)] += 1
        return self._remove(key)

    def _forget(self, key: ChunkKey) -> None:
        self._ghosts.pop(key, None)

    def _newcomer(self, parent: ChunkKey | None) -> int:
        """The class of a chunk that nobody knows: one generation after the prefix that it continues, if that was used."""
        class_ = self._classes.get(parent) if parent is not None else None
        if class_ is None:
            return 0
        generation, uses = divmod(class_, _USES)
        return min(generation + (uses > 0), _GENERATIONS - 1) * _USES

    def _fit(self) -> None:
        """Make the table of indexes from the histograms, and let these fade."""
        self._next_fit = self._clock + max(1000, len(self.entries) // 4)
        whole_hits = [sum(column) for column in zip(*self._hits, strict=True)]
        whole_lost = [sum(column) for column in zip(*self._lost, strict=True)]
        total = sum(whole_hits) + sum(whole_lost)
        for class_ in range(_CLASSES):
            hits, lost = self._hits[class_], self._lost[class_]
            # A class with few samples is taken to be like all others.
            share = _LEAST_SAMPLES / total if total else 0.0
            self._index[class_] = _gittins(
                [mine + share * all_ for mine, all_ in zip(hits, whole_hits, strict=True)],
                [mine + share * all_ for mine, all_ in zip(lost, whole_lost, strict=True)],
            )
            self._hits[class_] = [count * self.DECAY for count in hits]
            self._lost[class_] = [count * self.DECAY for count in lost]


def _used(class_: int) -> int:
    return class_ + 1 if (class_ + 1) % _USES else class_


def _bucket(age: int) -> int:
    return min(_BUCKETS - 1, int(_PER_OCTAVE * log(age + 1, 2)))


def _ages(bucket: int) -> tuple[float, float]:
    return 2 ** (bucket / _PER_OCTAVE) - 1, 2 ** ((bucket + 1) / _PER_OCTAVE) - 1


def _gittins(hits: list[float], lost: list[float]) -> list[float]:
    """For each age: the most uses per unit of time that staying can bring, over all times to give up."""
    alive = [0.0] * (_BUCKETS + 1)
    for bucket in range(_BUCKETS - 1, -1, -1):
        alive[bucket] = alive[bucket + 1] + hits[bucket] + lost[bucket]
    found = [0.0] * _BUCKETS
    for begin in range(_BUCKETS):
        uses = time = best = 0.0
        for end in range(begin, _BUCKETS):
            low, high = _ages(end)
            uses += hits[end]
            time += alive[end + 1] * (high - low) + (hits[end] + lost[end]) * (high - low) / 2
            if time > 0:
                best = max(best, uses / time)
        found[begin] = best
    return found
