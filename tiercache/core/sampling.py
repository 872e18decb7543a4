"""Estimate the hit rate of caches of every size from a bounded sample of the accesses.

The method is SHARDS with a fixed number of samples (Waldspurger et al., "Efficient MRC Construction with SHARDS",
FAST 2015): a chunk is sampled if its hash is in a salted window, which shrinks when the sample is full. An access of a
sampled chunk stands for 1 / rate accesses. The paper lets it also stand for 1 / rate chunks in the distances of others.
Here it stands for the chunks between it and the sampled chunk before it in its prefix, which are always asked for
together with it. So distances hardly vary with the choice of the sample.

Eviction takes the leaves of the prefix forest, coldest first. So a chunk leaves after the chunks that follow it, and the
cache of n chunks holds the first n chunks of one LRU order, in which the chunks of a request follow one another. The
distance of a chunk is its place in that order, and a cache of n chunks has all chunks up to distance n. A prefix hits up
to its first miss, so the distance of a chunk in a request is at least that of the chunks before it.

Prompts that begin alike have many accesses of few chunks. A sample by chunks misses all of them, or counts them several
times. So the beginning that a request shares with several others is sampled whatever its hash is: its last chunk stands
for exactly the chunks of the beginning, in accesses and in distances. The paper adds the difference between expected and
sampled accesses to the first bucket instead (SHARDS-adj), which is wrong where other chunks than the hottest were sampled
too often.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import log2
from typing import NamedTuple

import numpy as np

from tiercache.core.keys import ChunkKey

MOST_CHUNKS = 1 << 14
"""Limit of the sampled chunks, which take 4 MB together."""
_HASHES = 1 << 64
"""Number of hashes of `hash`, which Python salts, too."""
_FALL = 0.8
"""Factor of the rate when the sample is full."""
_MOST_AT_ONCE = 1024
"""Limit of the sampled chunks of a request, so that one request takes about three milliseconds of the loop at most."""
_PERIOD_S = 10.0
_MOST_A_PERIOD = 12_000
"""Limit of the sampled accesses in a period: about one per cent of a core."""
_OFTEN = 8
"""Requests that begin with a chunk before it counts as a shared beginning."""
_MARKS = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127)
"""Positions of the chunks that stand for a shared beginning, with its last one. It ends at the last of these."""
_MOST_COUNTED = 512
"""Limit of the chunks whose requests are counted."""
_STEPS = 32
"""Buckets for each doubling of the distance."""
_BUCKETS = 40 * _STEPS


class Curve:
    """Accesses by distance, and the hit rate of a cache of each size."""

    __slots__ = ("accesses", "buckets")

    def __init__(self) -> None:
        self.accesses = 0.0
        """Number of accesses, as estimated from the sample."""
        self.buckets = array("d", bytes(8 * _BUCKETS))
        """Accesses by the logarithm of their distance. Accesses without a distance are in none."""

    def add(self, weight: float, distance: float | None) -> None:
        """Record `weight` accesses at a distance in chunks; None means that no cache could have the chunk."""
        self.accesses += weight
        if distance is not None:
            self.buckets[_bucket(distance)] += weight

    def hits(self, chunks: float) -> float:
        """Return the accesses that hit in a cache of `chunks` chunks."""
        return sum(self.buckets[: _bucket(chunks) + 1]) if chunks >= 1 else 0.0

    def hit_rate(self, chunks: float) -> float:
        """Return the fraction of accesses that hit in a cache of `chunks` chunks; 0 without accesses."""
        return self.hits(chunks) / self.accesses if self.accesses else 0.0


def _bucket(distance: float) -> int:
    return min(int(_STEPS * log2(distance)), _BUCKETS - 1)


class Access(NamedTuple):
    """An access of a sampled chunk. It stands for `weight` accesses."""

    key: ChunkKey
    place: int
    """Its position in the prefix."""
    weight: float
    distance: float | None
    """The size in chunks from which on a cache has it, with all chunks before it; None if it was never stored."""
    was_stored: bool
    used_s: float
    """The time of the access or put before this one, or of this one if there was none."""


class _Chunk:
    __slots__ = ("is_stored", "slot", "used_s", "weight")

    def __init__(self) -> None:
        self.slot = 0
        """Its place in the LRU order: the highest is the most recent."""
        self.is_stored = False
        self.weight = 0.0
        """The chunks that it stands for in the distances of others, while it is stored."""
        self.used_s = 0.0


class Sample:
    """The sampled chunks in LRU order. Every call is synchronous, and takes a hash comparison per chunk not sampled."""

    def __init__(self, most: int = MOST_CHUNKS) -> None:
        """`most` limits the sampled chunks."""
        self.farthest = float("inf")
        """The largest distance of interest in chunks. Colder chunks leave a full sample before its rate falls."""
        self._most = most
        self._salt = secrets.randbits(64)
        self._sampled_hashes = _HASHES
        self._window = (-_HASHES // 2, _HASHES // 2)
        """Hashes of sampled chunks: from the first number to below the second. The salt is where it shrinks to."""
        self._chunks: dict[ChunkKey, _Chunk] = {}
        """Least recent first."""
        self._weights = np.zeros(3 * most)
        """What the stored chunks stand for, by slot."""
        self._next_slot = 0
        self._owed = 0
        """Chunks of requests without a sampled chunk, since the last request with one."""
        self._begun: dict[ChunkKey, int] = {}
        """Requests that begin with a chunk, after a shared beginning."""
        self._period_s = float("-inf")
        self._in_period = 0

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def rate(self) -> float:
        """The fraction of chunks that is sampled."""
        return self._sampled_hashes / _HASHES

    def asked(self, keys: Sequence[ChunkKey], found: int, coldest: float, now_s: float) -> list[Access]:
        """Record that a request asked for the prefix `keys` and the cache found the first `found`.

        Returns the accesses of the sampled chunks. Chunks that were found though they are new to the sample, because
        another process or an earlier one stored them, have the distance `coldest`.
        """
        if now_s - self._period_s >= _PERIOD_S:
            self._period_s, self._in_period = now_s, 0
        while len(places := self._in_window(keys)) > min(_MOST_AT_ONCE, _MOST_A_PERIOD - self._in_period):
            self._in_period = 0
            self._shrink()
        self._in_period += len(places)
        shared, is_new = self._shared_beginning(keys) if self.rate < 1 else (0, False)
        marks = [mark for mark in _MARKS if mark < shared - 1] + [shared - 1] * (shared > 0)
        weights = {mark: float(mark - before) for before, mark in pairwise([-1, *marks])}
        if is_new:
            weights[shared] = 0.0
        weights |= dict.fromkeys((place for place in places if place >= shared), 1 / self.rate)
        accesses: list[Access] = []
        farthest: float | None = 1.0
        for place, weight in weights.items():
            if not weight:
                continue
            chunk = self._chunks.get(keys[place])
            was_stored = chunk is not None and chunk.is_stored
            distance = coldest if place < found else None
            if chunk is not None and was_stored:
                distance = 1.0 + float(self._weights[chunk.slot + 1 : self._next_slot].sum())
            farthest = None if farthest is None or distance is None else max(farthest, distance)
            used_s = now_s if chunk is None else chunk.used_s
            accesses.append(Access(keys[place], place, weight, farthest, was_stored, used_s))
        self._ask_for(keys, list(weights), shared + is_new, found, now_s)
        return accesses

    def stored(self, keys: Iterable[ChunkKey], now_s: float) -> None:
        """Record that chunks were put, in the order of their prefix. A put of a known chunk is not an access of it."""
        low, high = self._window
        for key in reversed([key for key in keys if low <= hash(key) < high or key in self._chunks]):
            chunk = self._chunks.get(key)
            if chunk is None:
                chunk = self._touch(key, 1 / self.rate)
            self._weights[chunk.slot] = chunk.weight
            chunk.is_stored, chunk.used_s = True, now_s

    def forgotten(self, keys: Sequence[ChunkKey]) -> None:
        """Record that chunks were removed from every tier."""
        for key in keys:
            if (chunk := self._chunks.get(key)) is not None:
                self._weights[chunk.slot] = 0.0
                chunk.is_stored = False

    def _in_window(self, keys: Sequence[ChunkKey]) -> list[int]:
        low, high = self._window
        return [place for place, key in enumerate(keys) if low <= hash(key) < high]

    def _shared_beginning(self, keys: Sequence[ChunkKey]) -> tuple[int, bool]:
        """Return the length of the beginning that a request shares, and if the chunk after it is shared from now on.

        The chunk after the beginning is counted until it is shared. So a request adds one count.
        """
        begun = self._begun
        for place, key in enumerate(keys[: _MARKS[-1] + 1]):
            count = begun[key] = begun.get(key, 0) + 1
            if count <= _OFTEN:
                if len(begun) > _MOST_COUNTED:
                    self._begun = {key: count // 2 for key, count in begun.items() if count > 1}
                return place, count == _OFTEN
        return min(len(keys), _MARKS[-1] + 1), False

    def _ask_for(self, keys: Sequence[ChunkKey], places: list[int], shared: int, found: int, now_s: float) -> None:
        """Make the chunks of a request at `places` the most recent, the first of them last.

        A chunk stands for those between it and the place before it, too: whenever a request asks for it, it asks for
        them. The last stands for the rest of the request as well, and for requests without a sampled chunk, unless it is
        among the first `shared`, which other requests ask for without that rest.
        """
        self._owed += len(keys) - (places[-1] + 1 if places else 0)
        for place, before in zip(reversed(places), [*reversed(places[:-1]), -1], strict=False):
            rest = 0
            if place >= shared:
                rest, self._owed = self._owed, 0
            chunk = self._touch(keys[place], place - before + rest)
            chunk.is_stored |= place < found
            chunk.used_s = now_s
            self._weights[chunk.slot] = chunk.weight if chunk.is_stored else 0.0

    def _touch(self, key: ChunkKey, weight: float) -> _Chunk:
        """Make a chunk the most recent, and keep the limits. The caller sets the weight of its slot."""
        chunk = self._chunks.pop(key, None)
        if chunk is None:
            chunk = _Chunk()
            if len(self._chunks) >= self._most:
                self._make_room()
        else:
            self._weights[chunk.slot] = 0.0
        if self._next_slot == len(self._weights):
            self._renumber()
        self._chunks[key] = chunk
        chunk.slot, chunk.weight = self._next_slot, weight
        self._next_slot += 1
        return chunk

    def _make_room(self) -> None:
        """Shrink the window, or drop the coldest chunks if they are beyond the farthest distance of interest."""
        while len(self._chunks) >= self._most and self._most < self.farthest * self.rate:
            self._shrink()
        if len(self._chunks) >= self._most:
            for key in list(self._chunks)[: max(1, self._most // 8)]:
                del self._chunks[key]
            self._renumber()

    def _shrink(self) -> None:
        """Shrink the window, and drop the chunks that it excludes and that are no shared beginnings."""
        self._sampled_hashes = max(1, int(self._sampled_hashes * _FALL))
        low = (self._salt * (_HASHES - self._sampled_hashes)) // _HASHES - _HASHES // 2
        high = low + self._sampled_hashes
        self._window, begun = (low, high), self._begun
        chunks = self._chunks.items()
        self._chunks = {key: chunk for key, chunk in chunks if low <= hash(key) < high or begun.get(key, 0) >= _OFTEN}
        for key, chunk in self._chunks.items():
            if low <= hash(key) < high:
                chunk.weight /= _FALL
        self._renumber()

    def _renumber(self) -> None:
        self._weights[:] = 0.0
        self._next_slot = len(self._chunks)
        for slot, chunk in enumerate(self._chunks.values()):
            chunk.slot = slot
            self._weights[slot] = chunk.weight if chunk.is_stored else 0.0
