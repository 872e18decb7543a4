"""Tombstones: a `forget` invalidates every operation that began before it.

A put, a read or a prefetch notes the epoch at which it begins, and calls `Tombstones.forgot` before its chunk becomes
visible, with no `await` in between. An operation that began before a `forget` of its key is discarded; a later
operation is stored. `KeyTraffic` does the same for the contents of a tier.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import xxhash

from tiercache.core.keys import ChunkKey

MAX_TOMBSTONES = 1 << 16
"""Largest number of tombstones, at about 150 bytes each. Operations older than a dropped tombstone count as forgotten."""


class Tombstones:
    """A counter that each `forget` advances, and the epoch of the latest `forget` of each key.

    A tombstone is dropped when every older operation has ended. An operation that hangs keeps at most `MAX_TOMBSTONES`
    of them: beyond that, it counts as forgotten for every key.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._forgotten: dict[ChunkKey, int] = {}
        """Epoch of the latest `forget` by key, in order of epochs."""
        self._in_flight: dict[int, int] = {}
        """Number of operations by the epoch at which they began, in order of epochs."""
        self._dropped_epoch = 0
        """Operations that began before this epoch count as forgotten."""

    def __len__(self) -> int:
        return len(self._forgotten)

    @property
    def in_flight(self) -> int:
        """Number of operations that have begun and not ended."""
        return sum(self._in_flight.values())

    def begin(self) -> int:
        """Begin an operation, and return its epoch, with which it must be ended."""
        epoch = self.epoch
        self._in_flight[epoch] = self._in_flight.get(epoch, 0) + 1
        return epoch

    def end(self, epoch: int) -> None:
        """End an operation that began at `epoch`. `forgot` must not be called for it afterwards."""
        left = self._in_flight[epoch] - 1
        if left:
            self._in_flight[epoch] = left
            return
        del self._in_flight[epoch]
        oldest = next(iter(self._in_flight), self.epoch)
        forgotten = self._forgotten
        while forgotten and forgotten[key := next(iter(forgotten))] <= oldest:
            del forgotten[key]

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """Invalidate operations in flight on `keys`."""
        if not self._in_flight:
            return
        self.epoch += 1
        forgotten = self._forgotten
        for key in keys:
            forgotten.pop(key, None)
            forgotten[key] = self.epoch
        while len(forgotten) > MAX_TOMBSTONES:
            self._dropped_epoch = forgotten.pop(next(iter(forgotten)))

    def forgot(self, key: ChunkKey, epoch: int) -> bool:
        """Return True if `key` was forgotten since an operation in flight began at `epoch`, or if that is unknown."""
        return epoch < self.epoch and (self._forgotten.get(key, 0) > epoch or self._dropped_epoch > epoch)

    def forgotten(self, keys: Collection[ChunkKey], epoch: int) -> set[ChunkKey]:
        """Return the keys of `keys` that were forgotten, as in `forgot`."""
        if epoch == self.epoch:
            return set()
        return {key for key in keys if self.forgot(key, epoch)}


_BITS_PER_KEY = 4


class KeyFilter:
    """A Bloom filter: a set of keys in a fixed amount of memory. Keys cannot be removed.

    It also contains some keys that were not added: one in 400 with a million keys in 2 MiB, and more with more keys.

    Source: Bloom, "Space/time trade-offs in hash coding with allowable errors" (1970); Kirsch and Mitzenmacher, "Less
    hashing, same performance" (2006).
    """

    def __init__(self, size_bytes: int = 2 << 20) -> None:
        """`size_bytes` is a power of two."""
        self._bits = bytearray(size_bytes)

    def __contains__(self, key: ChunkKey) -> bool:
        bits = self._bits
        return all(bits[place >> 3] >> (place & 7) & 1 for place in self._places(key))

    def add(self, key: ChunkKey) -> None:
        for place in self._places(key):
            self._bits[place >> 3] |= 1 << (place & 7)

    def _places(self, key: ChunkKey) -> list[int]:
        first = xxhash.xxh3_64_intdigest(key)
        step = (first >> 32) | 1
        last_place = 8 * len(self._bits) - 1
        return [(first + number * step) & last_place for number in range(_BITS_PER_KEY)]


class KeyTraffic:
    """Reads and writes of a tier, counted by key, and the keys to remove.

    A removal begins when no read or write of its key is in flight. From the request for it until its end no operation
    on the key begins: a late write cannot restore a forgotten chunk, a read cannot find it, and new bytes are written
    after it. Each read and write calls `begin` and `end`, abandoned operations included.
    """

    def __init__(self) -> None:
        self.in_flight: dict[ChunkKey, int] = {}
        self.removing: dict[ChunkKey, Any] = {}
        """Keys to remove, with the callers to notify. Operations on a key that is taken out find only later chunks."""
        self._refused: KeyFilter | None = None
        """Created with the first key that is refused for good."""
        self.on_clear: Callable[[ChunkKey], None] | None = None
        """Called when the last operation in flight on a key to remove has ended."""
        self.questions: set[Any] = set()
        """Lookups in flight, as futures."""
        self.answered = 0
        """Number of lookups that have ended."""

    def refuses(self, key: ChunkKey) -> bool:
        """Return True if no operation on `key` may begin now, whatever the tier holds."""
        return key in self.removing or (self._refused is not None and key in self._refused)

    @property
    def refuses_none(self) -> bool:
        return not self.removing and self._refused is None

    def begin(self, key: ChunkKey) -> None:
        self.in_flight[key] = self.in_flight.get(key, 0) + 1

    def end(self, key: ChunkKey) -> None:
        left = self.in_flight[key] - 1
        if left:
            self.in_flight[key] = left
            return
        del self.in_flight[key]
        if key in self.removing and self.on_clear is not None:
            self.on_clear(key)

    def asks(self, question: Any) -> None:
        """Record that a lookup begins."""
        self.questions.add(question)

    def asked(self, question: Any) -> None:
        """Record that a lookup has ended."""
        self.questions.discard(question)
        self.answered += 1

    def refuse(self, key: ChunkKey) -> None:
        """Refuse operations on `key` for good, since it was forgotten and is not removed here.

        A few other keys are refused with it (`KeyFilter`).
        """
        if self._refused is None:
            self._refused = KeyFilter()
        self._refused.add(key)
