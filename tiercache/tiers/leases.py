"""Chunks in memory, and the leases that keep them there."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any, Protocol

from tiercache.core.budget import PREFETCH, READ, WRITE, Purpose
from tiercache.core.eviction import Resident
from tiercache.core.header import aligned
from tiercache.core.keys import ChunkKey
from tiercache.memory.slots import Slot

ONE = (1 << 32, 1 << 64, 1)
"""One lease, by its purpose, in the sum of a chunk's leases (`Leased.leases`). A lease for a write is more than any number
of leases for reads, and one for a read more than any number of pins, so one comparison finds the purpose."""


def purpose_of(leases: int) -> Purpose | None:
    """Return the purpose that the memory of a chunk with these leases counts for; None without a lease."""
    return WRITE if leases >= ONE[WRITE] else READ if leases >= ONE[READ] else PREFETCH if leases else None


def pins_in(leases: int) -> int:
    """Return how many of these leases are pins."""
    return leases % ONE[READ]


class Leased(Protocol):
    """A chunk in memory that leases are taken on: a resident of the hot cache, or a mapping."""

    key: ChunkKey
    payload_bytes: int
    leases: int
    """The sum of `ONE` of the purpose of each lease; 0 means that the memory may be reused."""
    hot: bool
    """True while a look-up finds the chunk."""


class Entry(Resident):
    """A chunk in a slot of the hot cache."""

    __slots__ = ("hot", "payload_bytes", "slot")

    def __init__(self, key: ChunkKey, slot: Slot, payload_bytes: int) -> None:
        super().__init__(key)
        self.slot = slot
        self.payload_bytes = payload_bytes
        self.hot = True


class LeaseOwner(Protocol):
    """The owner of the memory that leases are on: the CPU tier, or a tier's mappings. Each gets the entries that it made."""

    on_device: bool
    """True for device memory."""

    def view(self, entry: Any, length_bytes: int) -> Any:
        """Return the first bytes of a chunk and its padding, as its readers get them."""

    def begin_lease(self, entry: Any, purpose: Purpose) -> Lease: ...

    def serve(self, entry: Any, purpose: Purpose, *, counted: bool) -> Lease:
        """Return a lease for a caller that asked for the chunk. A read is an access unless that is `counted` already; a pin
        is none."""

    def end_lease(self, entry: Any, purpose: Purpose) -> None: ...

    def end_lease_from_anywhere(self, entry: Any, purpose: Purpose) -> None:
        """Called in the thread in which a lease was garbage-collected."""


class Lease:
    """A counted reference to a chunk in memory, which is not reused before `release`.

    `view` is uint8[payload length], read-only (a tensor for a chunk in device memory), and valid until `release`. A view
    that was taken before the cache was closed stays valid; taking one afterwards raises CacheClosed. Release on the event
    loop; using the lease as a context manager does.
    """

    __slots__ = ("_entry", "_owner", "_purpose")

    def __init__(self, owner: LeaseOwner, entry: Leased, purpose: Purpose) -> None:
        self._owner = owner
        self._entry: Leased | None = entry
        self._purpose = purpose

    @property
    def key(self) -> ChunkKey:
        return self._held().key

    @property
    def findable(self) -> bool:
        """True while a look-up finds the chunk: it was not removed."""
        return self._held().hot

    @property
    def on_device(self) -> bool:
        return self._owner.on_device

    @property
    def payload_bytes(self) -> int:
        return self._held().payload_bytes

    @property
    def view(self) -> Any:
        entry = self._entry or self._held()
        return self._owner.view(entry, entry.payload_bytes)

    @property
    def padded(self) -> Any:
        """The payload with its zero padding to 4096 bytes, for tiers that transfer whole pages."""
        entry = self._held()
        return self._owner.view(entry, aligned(entry.payload_bytes))

    def sibling(self) -> Lease | None:
        """Return one more lease on the same memory, for a tier to write from; None when the chunk was removed meanwhile."""
        entry = self._held()
        return self._owner.begin_lease(entry, WRITE) if entry.hot else None

    def reader(self) -> Lease:
        """Return one more lease on the same memory, for a reader, also when the chunk was removed meanwhile."""
        return self._owner.begin_lease(self._held(), READ)

    def another(self, purpose: Purpose, *, counted: bool) -> Lease:
        """Return one more lease for a caller that came for the chunk; see `LeaseOwner.serve`."""
        return self._owner.serve(self._held(), purpose, counted=counted)

    def release(self) -> None:
        """End the lease. Idempotent."""
        entry = self._entry
        if entry is not None:
            self._entry = None
            self._owner.end_lease(entry, self._purpose)

    def _held(self) -> Leased:
        if self._entry is None:
            raise ValueError("the lease was released; its memory may hold another chunk by now")
        return self._entry

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        entry = self._entry
        if entry is not None:
            self._entry = None
            warnings.warn(f"lease on chunk {entry.key.hex()[:12]} was never released", ResourceWarning, stacklevel=2)
            self._owner.end_lease_from_anywhere(entry, self._purpose)
