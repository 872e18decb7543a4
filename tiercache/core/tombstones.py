"""Tombstones: a `forget` invalidates every operation that began before it.

A put, a read or a prefetch notes the epoch at which it begins, and asks `Tombstones.forgot` before its chunk becomes
visible, with no `await` in between. What began before a `forget` of its key is discarded; what begins after it is stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tiercache.core.keys import ChunkKey

MAX_TOMBSTONES = 1 << 16
"""Keys, at about 150 bytes each. Beyond these, operations older than the dropped tombstones count as forgotten."""


class Tombstones:
    """One counter, which each `forget` advances, and the epoch of the latest `forget` of each key.

    A tombstone is dropped when every operation that is older than it has ended. An operation that hangs keeps at most
    `MAX_TOMBSTONES` of them: when those are too many, it counts as forgotten whatever its key is.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._forgotten: dict[ChunkKey, int] = {}
        """Epoch of the latest `forget` by key, in the order of the epochs."""
        self._in_flight: dict[int, int] = {}
        """Operations by the epoch at which they began, in that order."""
        self._dropped_epoch = 0
        """Operations that began before this epoch count as forgotten."""

    def __len__(self) -> int:
        return len(self._forgotten)

    @property
    def in_flight(self) -> int:
        """Operations that have begun and not ended."""
        return sum(self._in_flight.values())

    def begin(self) -> int:
        """Begin an operation, and return its epoch, with which it must be ended."""
        epoch = self.epoch
        self._in_flight[epoch] = self._in_flight.get(epoch, 0) + 1
        return epoch

    def end(self, epoch: int) -> None:
        """End an operation that began at `epoch`. From now on `forgot` cannot be asked about it."""
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
        """Invalidate what the operations in flight would publish of `keys`."""
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
        """Return True if `key` was forgotten since an operation in flight began at `epoch`, or if that is not known any
        more."""
        return epoch < self.epoch and (self._forgotten.get(key, 0) > epoch or self._dropped_epoch > epoch)

    def forgotten(self, keys: Collection[ChunkKey], epoch: int) -> set[ChunkKey]:
        """Return those of `keys` that `forgot` is true of."""
        if epoch == self.epoch:
            return set()
        return {key for key in keys if self.forgot(key, epoch)}
