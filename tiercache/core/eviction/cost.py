"""An order by what a chunk is expected to save for the room that it takes."""

from __future__ import annotations

from collections import OrderedDict
from math import log2

import numpy as np
import numpy.typing as npt

from tiercache.core.eviction.base import EvictionOrder, V
from tiercache.core.keys import ChunkKey

_USES = 4
_GENERATIONS = 4
_CLASSES = _USES * _GENERATIONS
_BUCKETS = 64
_PER_OCTAVE = 3
_LEAST_SAMPLES = 50.0

Floats = npt.NDArray[np.float64]


class CostAware(EvictionOrder[V]):
    """Out goes what saves least per byte and time: reuse probability times (recompute - load), over bytes and waiting.

    Chunks of one layout have one size and nearly one saving, so what is left to know is when a chunk will be used again,
    if at all. That is learnt. Residents are divided into classes by how often they were used and by how often the prefix
    that they continue was continued before (a first turn, a second one, ...). Each class is a queue, the least recent
    first, and has a histogram of the ages at which its members were used again, kept complete by remembering the names of
    evicted chunks. From it follows an index for each age: the best ratio, over all horizons, of expected uses to expected
    time in the cache (Gittins). The head of the queue with the lowest index goes. Time is counted in insertions.

    After Beckmann, Chen and Cidon, "LHD: Improving cache hit rate by maximizing hit density" (NSDI 2018), with queues in
    place of sampling and Gittins' horizon in place of a whole life.
    """

    REMEMBERED = 4
    """Names of evicted chunks, as a multiple of the residents."""
    DECAY = 0.97

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[ChunkKey, V] = {}
        self._queues: list[OrderedDict[ChunkKey, int]] = [OrderedDict() for _ in range(_CLASSES)]
        self._expected: OrderedDict[ChunkKey, int] = OrderedDict()
        self._classes: dict[ChunkKey, int] = {}
        self._ghosts: OrderedDict[ChunkKey, tuple[int, int]] = OrderedDict()
        self._clock = 0
        self._next_fit = 1000
        self._hits = [[0.0] * _BUCKETS for _ in range(_CLASSES)]
        self._lost = [[0.0] * _BUCKETS for _ in range(_CLASSES)]
        self._index = [[2 ** (-bucket / _PER_OCTAVE) for bucket in range(_BUCKETS)] for _ in range(_CLASSES)]

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

    def _adopt(self, key: ChunkKey, parent: ChunkKey) -> None:
        super()._adopt(key, parent)
        if not self._classes[key]:
            # It came without its parent; until it is used its class is that of what it continues.
            class_ = self._newcomer(parent)
            self._classes[key] = class_
            self._queues[class_][key] = self._queues[0].pop(key)

    def touch(self, key: ChunkKey) -> None:
        class_ = self._classes[key]
        if class_ >= _CLASSES:
            del self._expected[key]
            class_ -= _CLASSES
        else:
            since = self._queues[class_].pop(key)
            self._hits[class_][_bucket(self._clock - since)] += 1
        class_ = _used(class_)
        self._classes[key] = class_
        self._queues[class_][key] = self._clock

    def renew(self, key: ChunkKey) -> None:
        class_ = self._classes[key]
        if class_ < _CLASSES:
            del self._queues[class_][key]
            self._classes[key] = class_ + _CLASSES
        self._expected[key] = self._clock
        self._expected.move_to_end(key)

    def readmit(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        ghost = self._ghosts.pop(key, None)
        self.insert(key, value, parent)
        if ghost is not None:
            del self._queues[self._classes[key]][key]
            self._classes[key] = ghost[0]
            self._queues[ghost[0]][key] = self._clock

    def _coldest(self) -> ChunkKey:
        self._give_up()
        best, lowest, oldest = None, 0.0, 0
        for class_, queue in enumerate(self._queues):
            if queue:
                key = next(iter(queue))
                since = queue[key]
                index = self._index[class_][_bucket(self._clock - since)]
                if best is None or index < lowest or (index == lowest and since < oldest):
                    best, lowest, oldest = key, index, since
        return next(iter(self._expected)) if best is None else best

    def _give_up(self) -> None:
        """What was expected, and did not come while as much as all residents came in, is like its equals again."""
        while self._expected:
            key = next(iter(self._expected))
            since = self._expected[key]
            if self._clock - since <= len(self.entries):
                return
            del self._expected[key]
            class_ = self._classes[key] = self._classes[key] - _CLASSES
            self._queues[class_][key] = since

    def _remove(self, key: ChunkKey) -> V:
        class_ = self._classes.pop(key)
        del (self._expected if class_ >= _CLASSES else self._queues[class_])[key]
        return self.entries.pop(key)

    def _evict(self, key: ChunkKey) -> V:
        class_ = self._classes[key]
        if class_ >= _CLASSES:
            self._ghosts[key] = class_ - _CLASSES, self._expected[key]
        else:
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
        generation, uses = divmod(class_ % _CLASSES, _USES)
        return min(generation + (uses > 0), _GENERATIONS - 1) * _USES

    def _fit(self) -> None:
        """Make the table of indexes from the histograms, and let these fade."""
        self._next_fit = self._clock + max(1000, len(self.entries) // 4)
        hits, lost = np.array(self._hits), np.array(self._lost)
        total = float(hits.sum() + lost.sum())
        if total:
            # A class with few samples is taken to be like all others.
            share = _LEAST_SAMPLES / total
            self._index = _gittins(hits + share * hits.sum(axis=0), lost + share * lost.sum(axis=0)).tolist()
        self._hits, self._lost = (hits * self.DECAY).tolist(), (lost * self.DECAY).tolist()


def _used(class_: int) -> int:
    return class_ + 1 if (class_ + 1) % _USES else class_


def _bucket(age: int) -> int:
    return min(_BUCKETS - 1, int(_PER_OCTAVE * log2(age + 1)))


_LOWS = np.array([2 ** (bucket / _PER_OCTAVE) - 1 for bucket in range(_BUCKETS + 1)])
_WIDTHS = np.diff(_LOWS)


def _gittins(hits: Floats, lost: Floats) -> Floats:
    """For each class and age: the most uses per unit of time that staying can bring, over all times to give up."""
    ended = hits + lost
    # alive[:, b]: members that reach the end of bucket b.
    alive = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - ended
    uses = np.cumsum(hits, axis=1)
    time = np.cumsum((alive + ended / 2) * _WIDTHS, axis=1)
    before = np.zeros((len(hits), 1))
    uses_from = uses[:, None, :] - np.concatenate([before, uses[:, :-1]], axis=1)[:, :, None]
    time_from = time[:, None, :] - np.concatenate([before, time[:, :-1]], axis=1)[:, :, None]
    valid = np.triu(np.ones((_BUCKETS, _BUCKETS), dtype=bool)) & (time_from > 0)
    ratio: Floats = np.where(valid, uses_from / np.where(valid, time_from, 1.0), 0.0).max(axis=2)
    return ratio
