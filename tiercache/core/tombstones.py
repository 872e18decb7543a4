"""Tombstones: a `forget` invalidates every operation that began before it.

A put, a read or a prefetch notes the epoch at which it begins, and calls `Tombstones.forgot` before its chunk becomes
visible, with no `await` in between. An operation that began before a `forget` of its key is discarded; a later
operation is stored. `KeyTraffic` does the same for the contents of a tier.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

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


MAX_REFUSED = 1 << 18
"""Largest number of keys that a tier refuses for good, at about 100 bytes each. With as many it refuses all."""


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
        self._refused: set[ChunkKey] = set()
        """Keys that are refused for good."""
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
        refused = self._refused
        return self.detached or key in self.removing or key in refused or len(refused) >= MAX_REFUSED

    @property
    def refuses_none(self) -> bool:
        return not (self.detached or self.removing or self._refused)

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
        """Refuse operations on `key` for good, since it was forgotten and is not removed here."""
        if len(self._refused) < MAX_REFUSED:
            self._refused.add(key)
