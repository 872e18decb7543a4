"""Tombstones: a `forget` invalidates every operation that began before it.

A put, a read or a prefetch notes the epoch at which it begins, and calls `Tombstones.forgot` before its chunk becomes
visible, with no `await` in between. An operation that began before a `forget` of its key is discarded; a later
operation is stored. `KeyTraffic` does the same for the contents of a tier.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import xxhash

from tiercache.core.keys import ChunkKey

MAX_TOMBSTONES = 1 << 16
"""Largest number of tombstones, at about 150 bytes each. Operations older than a dropped tombstone count as forgotten."""


class Tombstones:
    """A counter that each `forget` advances, and the epoch of the latest `forget` of each key.

    They are kept in two halves, and the older half is dropped when the newer one is full: at least the latest
    `MAX_TOMBSTONES / 2` are kept. An operation that lasts longer counts as forgotten for every key.
    """

    def __init__(self) -> None:
        self.epoch = 0
        """Number of `forget` calls so far. An operation notes it when it begins."""
        self._newer: dict[ChunkKey, int] = {}
        """Epoch of the latest `forget` by key."""
        self._older: dict[ChunkKey, int] = {}
        self._older_epoch = 0
        """The epoch of the latest tombstone in the older half."""
        self._dropped_epoch = 0
        """Operations that began before this epoch count as forgotten."""

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def forget(self, key: ChunkKey) -> None:
        """Invalidate operations in flight on `key`."""
        self.epoch += 1
        self._newer[key] = self.epoch
        if len(self._newer) >= MAX_TOMBSTONES // 2:
            self._older, self._newer = self._newer, {}
            self._dropped_epoch, self._older_epoch = self._older_epoch, self.epoch

    def forgot(self, key: ChunkKey, epoch: int) -> bool:
        """Return True if `key` was forgotten since an operation began at `epoch`, or if that is unknown."""
        if epoch >= self.epoch:
            return False
        latest = max(self._newer.get(key, 0), self._older.get(key, 0), self._dropped_epoch)
        return latest > epoch

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

    A removal begins when no read or write of its key is in flight. No operation on the key begins between the
    request for the removal and its end: a late write cannot restore a forgotten chunk, a read cannot find it, and new
    bytes are written after the removal. Each read and write calls `begin` and `end`, abandoned operations included.
    """

    def __init__(self) -> None:
        self.in_flight: dict[ChunkKey, int] = {}
        self.removing: dict[ChunkKey, Any] = {}
        """Keys to remove, with the attempts of `Removals`. Once a key is taken out, operations find only later chunks."""
        self._refused: KeyFilter | None = None
        """Created with the first key that is refused for good."""
        self.draining = False
        """True from the beginning of a detach to the next attach: the tier gets no new chunks."""
        self.detached = False
        """True while the tier is closed on request: no operation may begin."""
        self.on_clear: Callable[[ChunkKey], None] | None = None
        """Called when the last operation in flight on a key to remove has ended."""
        self.questions: set[Any] = set()
        """Lookups in flight, as futures."""

    def refuses(self, key: ChunkKey) -> bool:
        """Return True if no operation on `key` may begin now, even if the tier holds the chunk."""
        return self.detached or key in self.removing or (self._refused is not None and key in self._refused)

    @property
    def refuses_none(self) -> bool:
        return not self.detached and not self.removing and self._refused is None

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

    def refuse(self, key: ChunkKey) -> None:
        """Refuse operations on `key` for good, since it was forgotten and is not removed here.

        A few other keys are refused with it (`KeyFilter`).
        """
        if self._refused is None:
            self._refused = KeyFilter()
        self._refused.add(key)
