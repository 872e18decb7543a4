"""Tombstones: a `forget` invalidates every operation that began before it.

A put, a read or a prefetch begins an `Operation`, and asks it before its chunk becomes visible, with no `await` in between.
What began before a `forget` of its key is discarded; what begins after it is stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tiercache.core.keys import ChunkKey

MAX_TOMBSTONES = 1 << 16
"""Keys, at about 150 bytes each. Beyond these, operations older than the dropped tombstones count as forgotten."""


class Operation:
    """An operation in flight, from `Tombstones.begin` to `Tombstones.end`. Once it has ended it cannot be asked."""

    __slots__ = ("_tombstones", "epoch", "has_ended")

    def __init__(self, tombstones: Tombstones, epoch: int) -> None:
        self._tombstones = tombstones
        self.epoch = epoch
        self.has_ended = False

    def forgot(self, key: ChunkKey) -> bool:
        """Return True if `key` was forgotten since this operation began."""
        tombstones = self._tombstones
        assert not self.has_ended, "its tombstones may be gone"
        return self.epoch < tombstones.epoch and tombstones.forgot(key, self.epoch)

    def forgotten(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Return those of `keys` that were forgotten since this operation began."""
        if self.epoch == self._tombstones.epoch:
            return set()
        return {key for key in keys if self.forgot(key)}


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

    def begin(self) -> Operation:
        """Begin an operation. It must be ended."""
        epoch = self.epoch
        self._in_flight[epoch] = self._in_flight.get(epoch, 0) + 1
        return Operation(self, epoch)

    def end(self, operation: Operation) -> None:
        operation.has_ended = True
        left = self._in_flight[operation.epoch] - 1
        if left:
            self._in_flight[operation.epoch] = left
            return
        del self._in_flight[operation.epoch]
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
        """Return True if `key` was forgotten after `epoch`, or if that is not known any more."""
        return self._forgotten.get(key, 0) > epoch or self._dropped_epoch > epoch
