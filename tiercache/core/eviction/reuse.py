"""What is known of when chunks are used again: learnt from a sample of names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from zlib import crc32

import numpy as np
import numpy.typing as npt

from tiercache.core.keys import ChunkKey

BUCKETS = 96
_LEAST_SAMPLES = 50.0
MARGIN = 1.5
"""How much more than another one the oldest must be worth for that to go before it."""

Floats = npt.NDArray[np.float64]
Table = list[list[float]]


def bucket_of(age: int) -> int:
    """Four buckets an octave."""
    shift = age.bit_length() - 3
    if shift <= 0:
        return age
    bucket = 4 * shift + (age >> shift)
    return bucket if bucket < BUCKETS else BUCKETS - 1


def _buckets_of(ages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`bucket_of` of each."""
    shifts = np.maximum(np.frexp(ages.astype(float))[1] - 3, 0)
    buckets: npt.NDArray[np.int64] = np.where(shifts > 0, 4 * shifts + (ages >> shifts), ages)
    return np.minimum(buckets, BUCKETS - 1)


def _first_age(bucket: int) -> int:
    return bucket if bucket < 8 else (4 + bucket % 4) << (bucket // 4 - 1)


_WIDTHS = np.diff(np.array([float(_first_age(bucket)) for bucket in range(BUCKETS + 1)]))

_LATER = np.triu(np.ones((BUCKETS, BUCKETS), dtype=bool))


def expected_uses(hits: Floats, pending: Floats) -> Floats:
    """For each class and age: the most uses per unit of time that staying can bring, over all times to give up (Gittins).

    `hits` were used again at that age. `pending` were not, up to that age: they count among those who could have been
    (Kaplan and Meier, "Nonparametric estimation from incomplete observations", 1958).
    """
    ended = hits + pending
    at_risk = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - pending / 2
    hazard = np.minimum(1.0, np.divide(hits, at_risk, out=np.zeros_like(hits), where=at_risk > 0))
    left = np.cumprod(1 - hazard, axis=1)
    before = np.concatenate([np.ones((len(hits), 1)), left[:, :-1]], axis=1)
    uses, time = np.cumsum(before * hazard, axis=1), np.cumsum((before + left) / 2 * _WIDTHS, axis=1)
    none = np.zeros((len(hits), 1))
    uses_from = uses[:, None, :] - np.concatenate([none, uses[:, :-1]], axis=1)[:, :, None]
    time_from = time[:, None, :] - np.concatenate([none, time[:, :-1]], axis=1)[:, :, None]
    valid = _LATER & (time_from > 1e-12)
    ratio: Floats = np.where(valid, uses_from / np.where(valid, time_from, 1.0), 0.0).max(axis=2)
    return ratio


class Sample:
    """A sample of names: when they are used again, by class.

    Time is counted in uses of any chunk, in the sample or not.
    """

    NAMES = 1024
    """At most so many of the residents."""
    REMEMBERED = 5
    """Names, as a multiple of that."""
    DECAY = 0.97

    def __init__(self, classes: int) -> None:
        self.table: Table | None = None
        self.mask = 7
        """A name is in the sample if its checksum has none of these bits."""
        self._capacity = 1
        self._names: OrderedDict[ChunkKey, tuple[int, int]] = OrderedDict()
        self._hits = [[0.0] * BUCKETS for _ in range(classes)]
        self._lost = [[0.0] * BUCKETS for _ in range(classes)]
        self._next_fit = 0

    def resize(self, residents: int) -> None:
        """The cache has grown to so many residents."""
        while residents > self.NAMES * (self.mask + 1):
            self.mask = 2 * self.mask + 1
            for key in [key for key in self._names if crc32(key) & self.mask]:
                del self._names[key]
        self._capacity = max(1, residents // (self.mask + 1))

    def used(self, key: ChunkKey, class_: int, now: int) -> None:
        """A name of the sample was used, and is of that class from now on."""
        before = self._names.pop(key, None)
        self._names[key] = class_, now
        if before is not None:
            self._hits[before[0]][bucket_of(now - before[1])] += 1
        elif len(self._names) > self.REMEMBERED * self._capacity:
            _, (gone, since) = self._names.popitem(last=False)
            self._lost[gone][bucket_of(now - since)] += 1
        if now >= self._next_fit:
            self._fit(now)

    def _fit(self, now: int) -> None:
        """Make the table from the histograms, and let these fade."""
        self._next_fit = now + max(4000, self._capacity * (self.mask + 1))
        hits, pending = np.array(self._hits), np.array(self._lost)
        classes, since = np.array(list(self._names.values())).T
        np.add.at(pending, (classes, _buckets_of(now - since)), 1)
        if hits.any():
            # A class with few samples is taken to be like all others.
            share = _LEAST_SAMPLES / float(hits.sum() + pending.sum())
            hits += share * hits.sum(axis=0)
            pending += share * pending.sum(axis=0)
            self.table = expected_uses(hits, pending).tolist()
        self._hits = (np.array(self._hits) * self.DECAY).tolist()
        self._lost = (np.array(self._lost) * self.DECAY).tolist()


def worst(firsts: Sequence[tuple[int, int, ChunkKey]], table: Table | None, now: int) -> ChunkKey:
    """Of the first of each class (since when it is there, its class, its key), the one that is worth least; the oldest where
    that is hardly worth more, or nothing is known."""
    oldest = min(firsts)
    since, class_, key = oldest
    if table is None:
        return key
    lowest = table[class_][bucket_of(now - since)] / MARGIN
    for first in firsts:
        if first is not oldest:
            since, class_, other = first
            index = table[class_][bucket_of(now - since)]
            if index < lowest:
                key, lowest = other, index
    return key
