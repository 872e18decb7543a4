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
times. So chunks at the beginning of many requests are followed one by one, and each of their accesses counts once. The
paper adds the difference between expected and sampled accesses to the first bucket instead (SHARDS-adj), which is wrong
where other chunks than the hottest were sampled too often.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable, Sequence
from math import ceil, log2
from typing import NamedTuple

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
"""Requests that begin with a chunk before it is followed."""
_MOST_COUNTED = 512
"""Limit of the chunks that are followed, or counted until they are."""
_MOST_FOLLOWED = 128
_LEAST_FOLLOWED = 8
"""Limits of the first chunks of a request that are followed. It is halved whenever there are too many accesses."""
_STEPS = 8
"""Buckets for each doubling of the distance."""
_BUCKETS = 40 * _STEPS
_GROUP = 256
"""Slots with a common sum."""


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
            self.buckets[min(int(_STEPS * log2(distance)), _BUCKETS - 1)] += weight

    def include(self, other: Curve) -> None:
        self.accesses += other.accesses
        for bucket, weight in enumerate(other.buckets):
            self.buckets[bucket] += weight

    def hits(self, chunks: float) -> float:
        """Return the accesses that hit in a cache of `chunks` chunks."""
        whole = int(chunks)
        if whole < 1:
            return 0.0
        last = min(int(_STEPS * log2(whole)), _BUCKETS - 1)
        begin, end = (ceil(2 ** (bucket / _STEPS)) for bucket in (last, last + 1))
        return sum(self.buckets[:last]) + self.buckets[last] * min(1.0, (whole + 1 - begin) / (end - begin))

    def hit_rate(self, chunks: float) -> float:
        """Return the fraction of accesses that hit in a cache of `chunks` chunks; 0 without accesses."""
        return self.hits(chunks) / self.accesses if self.accesses else 0.0


class Access(NamedTuple):
    """An access of a sampled chunk. It stands for `weight` accesses."""

    key: ChunkKey
    place: int
    """Its position in the prefix."""
    weight: float
    distance: float | None
    """The size in chunks from which on a cache has it, with all chunks before it; None if it was never stored."""
    was_stored: bool
    used_s: float | None
    """The time of the access or put before this one, if known."""


class _Chunk:
    __slots__ = ("is_asked", "is_based", "is_stored", "slot", "used_s", "weight")

    def __init__(self, is_based: bool) -> None:
        self.slot = -1
        """Its place in the LRU order: the highest is the most recent."""
        self.is_based = is_based
        """Its hash is in the window."""
        self.is_stored = False
        self.weight = 0.0
        """The chunks that it stands for in the distances of others, while it is stored."""
        self.is_asked = False
        """A request asked for it since it was last stored. The put of that request is the same access."""
        self.used_s: float | None = None


class _Slots:
    """The slots of the LRU order: the chunks that each stands for, and their sum in each group of slots."""

    def __init__(self, weights: Iterable[float] = ()) -> None:
        self._weights = list(weights)
        self._sums = [sum(self._weights[first : first + _GROUP]) for first in range(0, len(self._weights), _GROUP)]

    def __len__(self) -> int:
        return len(self._weights)

    def append(self, weight: float) -> None:
        """Add a slot above all others."""
        if not len(self._weights) % _GROUP:
            self._sums.append(0.0)
        self._weights.append(weight)
        self._sums[-1] += weight

    def set(self, slot: int, weight: float) -> None:
        self._sums[slot // _GROUP] += weight - self._weights[slot]
        self._weights[slot] = weight

    def above(self, slot: int) -> float:
        """Return the chunks that the slots above a slot stand for."""
        group = slot // _GROUP
        return sum(self._weights[slot + 1 : (group + 1) * _GROUP]) + sum(self._sums[group + 1 :])


class Sample:
    """The sampled chunks in LRU order. Every call is synchronous, and takes a hash comparison per chunk not sampled."""

    def __init__(self, most: int = MOST_CHUNKS, farthest: float = float("inf")) -> None:
        """`most` limits the sampled chunks. `farthest` is the largest distance of interest in chunks."""
        self._most = most
        self._farthest = farthest
        self._salt = secrets.randbits(64)
        self._sampled_hashes = _HASHES
        self._window = (-_HASHES // 2, _HASHES // 2)
        """Hashes of sampled chunks: from the first number to below the second. The salt is where it shrinks to."""
        self._most_followed = _MOST_FOLLOWED
        self._chunks: dict[ChunkKey, _Chunk] = {}
        """Least recent first."""
        self._slots = _Slots()
        self._owed = 0
        """Chunks of requests without a sampled chunk, since the last request with one."""
        self._begun: dict[ChunkKey, int] = {}
        """Requests that begin with a chunk, after chunks that are followed."""
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
        places = self._places(keys)
        while len(places) > _MOST_AT_ONCE:
            self._shrink()
            places = self._places(keys)
        followed, is_new = self._follow(keys)
        places = [*range(followed + is_new), *(place for place in places if place >= followed + is_new)]
        weight, accesses = 1 / self.rate, []
        farthest: float | None = 1.0
        for place in places:
            key = keys[place]
            chunk = self._chunks.get(key)
            if chunk is None:
                chunk = self._chunks[key] = _Chunk(self._is_based(key))
            if place < followed or chunk.is_based:
                was_stored = chunk.is_stored
                distance = self._distance(chunk) if was_stored else coldest if place < found else None
                farthest = None if farthest is None or distance is None else max(farthest, distance)
                counts = 1.0 if place < followed else weight
                accesses.append(Access(key, place, counts, farthest, was_stored, chunk.used_s))
            chunk.is_stored |= place < found
        weights = self._stand_for(places, followed + is_new, len(keys))
        self._renew([keys[place] for place in places], weights, now_s, asked=True)
        return accesses

    def stored(self, keys: Iterable[ChunkKey], now_s: float) -> None:
        """Record that chunks were put, in the order of their prefix."""
        (low, high), chunks = self._window, self._chunks
        sampled = [key for key in keys if low <= hash(key) < high or key in chunks]
        moved = []
        for key in sampled[: 2 * _MOST_AT_ONCE]:
            chunk = chunks.get(key)
            if chunk is None:
                chunk = chunks[key] = _Chunk(True)
            if not chunk.is_asked:
                moved.append(key)
            else:
                self._slots.set(chunk.slot, chunk.weight)
            chunk.is_stored, chunk.is_asked, chunk.used_s = True, False, now_s
        self._renew(moved, [1 / self.rate] * len(moved), now_s, asked=False)

    def forgotten(self, keys: Sequence[ChunkKey]) -> None:
        """Record that chunks were removed from every tier."""
        for key in keys:
            if (chunk := self._chunks.get(key)) is not None:
                self._slots.set(chunk.slot, 0.0)
                chunk.is_stored = False

    def _is_based(self, key: ChunkKey) -> bool:
        low, high = self._window
        return low <= hash(key) < high

    def _places(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Return the positions of the chunks whose hash is in the window."""
        low, high = self._window
        return [place for place, key in enumerate(keys) if low <= hash(key) < high]

    def _follow(self, keys: Sequence[ChunkKey]) -> tuple[int, bool]:
        """Count a request by its beginning. Return how many of its first chunks are followed, and if the next now is, too.

        The chunk after those is counted until it is followed. So counting takes one step a request.
        """
        begun, followed = self._begun, 0
        for key in keys[: self._most_followed + 1]:
            count = begun[key] = begun.get(key, 0) + 1
            if count <= _OFTEN:
                if len(begun) > _MOST_COUNTED:
                    self._forget_beginnings()
                return followed, count == _OFTEN
            followed += 1
        return min(followed, self._most_followed), False

    def _forget_beginnings(self) -> None:
        """Halve the counts of beginnings, and drop the chunks that are no longer followed."""
        before, self._begun = self._begun, {key: count // 2 for key, count in self._begun.items() if count > 1}
        for key, count in before.items():
            if count >= _OFTEN > count // 2 and (chunk := self._chunks.get(key)) is not None and not chunk.is_based:
                self._slots.set(chunk.slot, 0.0)
                del self._chunks[key]

    def _distance(self, chunk: _Chunk) -> float:
        return self._slots.above(chunk.slot) + 1

    def _stand_for(self, places: Sequence[int], followed: int, length: int) -> list[float]:
        """Return how many chunks of a request each of those at `places` stands for, the first `followed` for themselves.

        A chunk stands for those between it and the place before it, too: whenever a request asks for it, it asks for
        them. The last stands for the rest of the request as well, and for requests without a sampled chunk.
        """
        weights, before = [], -1
        for place in places:
            weights.append(float(place - before))
            before = place
        rest = length - 1 - before
        if len(places) > followed:
            weights[-1] += rest + self._owed
            self._owed = 0
        else:
            self._owed += rest
        return weights

    def _renew(self, keys: Sequence[ChunkKey], weights: Sequence[float], now_s: float, *, asked: bool) -> None:
        """Make chunks the most recent, the first of them last, and keep the limits."""
        chunks, slots = self._chunks, self._slots
        for key, weight in zip(reversed(keys), reversed(weights), strict=True):
            chunk = chunks.pop(key)
            chunks[key] = chunk
            if chunk.slot >= 0:
                slots.set(chunk.slot, 0.0)
            chunk.slot, chunk.weight, chunk.is_asked, chunk.used_s = len(slots), weight, asked, now_s
            slots.append(weight if chunk.is_stored else 0.0)
        if now_s - self._period_s >= _PERIOD_S:
            self._period_s, self._in_period = now_s, 0
        self._in_period += len(keys)
        if self._in_period > _MOST_A_PERIOD:
            self._in_period = 0
            self._most_followed = max(_LEAST_FOLLOWED, self._most_followed // 2)
            self._shrink()
        while len(self._chunks) > self._most:
            self._make_room()
        if len(slots) > 3 * self._most:
            self._renumber()

    def _make_room(self) -> None:
        """Drop chunks beyond the farthest distance of interest, or shrink the window if there are few."""
        beyond = len(self._chunks) - int(min(self._farthest * self.rate, self._most))
        if beyond < self._most // 8:
            self._shrink()
            return
        for key in list(self._chunks)[:beyond]:
            del self._chunks[key]
        self._renumber()

    def _shrink(self) -> None:
        """Shrink the window, and drop the chunks that it excludes and that are not followed."""
        self._sampled_hashes = max(1, int(self._sampled_hashes * _FALL))
        low = (self._salt * (_HASHES - self._sampled_hashes)) // _HASHES - _HASHES // 2
        high = low + self._sampled_hashes
        self._window, begun = (low, high), self._begun
        for key, chunk in self._chunks.items():
            chunk.is_based = low <= hash(key) < high
        is_followed = {key for key, count in begun.items() if count >= _OFTEN}
        self._chunks = {key: chunk for key, chunk in self._chunks.items() if chunk.is_based or key in is_followed}
        for key, chunk in self._chunks.items():
            if key not in is_followed:
                chunk.weight /= _FALL
        self._renumber()

    def _renumber(self) -> None:
        for slot, chunk in enumerate(self._chunks.values()):
            chunk.slot = slot
        self._slots = _Slots(chunk.weight if chunk.is_stored else 0.0 for chunk in self._chunks.values())
