"""The contract between the cache and its storage tiers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tiercache.core.admission import Admission
from tiercache.core.keys import ChunkKey
from tiercache.core.tenants import TenantStatistics
from tiercache.core.tombstones import KeyTraffic
from tiercache.device.driver import Tensor
from tiercache.memory.arena import Arena


@dataclass(frozen=True)
class Traits:
    """The properties of a tier that the scheduler uses."""

    durable: bool = False
    """True if chunks outlive this process."""
    shared: bool = False
    """True if other processes may add and remove chunks, so that a `probe` for an unknown key is worthwhile."""
    read_concurrency: int = 4
    write_concurrency: int = 4
    prefetch_concurrency: int | None = None
    """Limit of prefetches among the concurrent reads; None: they may use all places that demand reads leave."""


@dataclass
class TierStatistics:
    """Counters since `open`, in chunks and payload bytes.

    `resident` and `occupied_bytes` (physical) are the current state.
    """

    reads: int = 0
    read_bytes: int = 0
    read_misses: int = 0
    writes: int = 0
    written_bytes: int = 0
    stored_bytes: int = 0
    """Bytes of `written_bytes` after compression; 0 if the tier never compresses.

    Includes chunks that another process stored first.
    """
    write_failures: int = 0
    evicted: int = 0
    corrupt: int = 0
    read_again: int = 0
    """Reads that failed verification and were tried again."""
    strays: int = 0
    resident: int = 0
    occupied_bytes: int = 0
    mapped_bytes: int = 0
    """Bytes currently mapped by this process, in a tier whose chunks are mapped."""
    unlinked_bytes: int = 0
    """Mapped bytes whose files have been deleted. They use memory that no `occupied_bytes` counts."""
    tenants: dict[str, TenantStatistics] = field(default_factory=dict)
    """Tenants by their tags in hex, if they have quotas; see `tiercache.core.tenants.shown`."""


class _Offered:
    """A container of the keys for which a call returns True."""

    __slots__ = ("_offers",)

    def __init__(self, offers: Callable[[ChunkKey], bool]) -> None:
        self._offers = offers

    def __contains__(self, key: Any) -> bool:
        return self._offers(key)


class Tier(ABC):
    """A store of chunks.

    All methods are called on one event loop and must not block it: anything slower than a dictionary lookup runs in a
    thread or is awaited. Every payload is a uint8 vector in page-aligned memory whose length is padded to 4096 bytes. A
    tier may transfer the padding, and returns only payload lengths.

    Cancellation: a cancelled `read` or `write` may continue in its thread, but raises CancelledError only when the tier
    no longer uses the payload's memory. The scheduler does not cancel: it stops waiting and keeps the memory.
    """

    name: str
    traits: Traits = Traits()
    reads: bool = True
    """False if the configuration excludes the tier from reads."""
    writes: bool = True
    """False if the configuration excludes the tier from writes. Set before `open`.

    Such a tier changes nothing in its storage: it evicts and removes nothing, corrupt chunks included.
    """
    admission: Admission | None = None
    """Decides which chunks the tier writes; None means all."""
    patience_s: float | None = None
    """Seconds after which a get continues with the next tier; None means the deadline of the get."""
    open_s: float = 30.0
    """Limit in seconds for `open`. After it the cache cancels `open`, and the start fails."""

    @property
    def serves_device(self) -> bool:
        """True if the tier reads and writes device memory as well: see `DeviceTier`. Known once the tier is open."""
        return False

    @property
    def capacity_bytes(self) -> int:
        """The present limit of the bytes that the tier occupies; 0 if it knows none."""
        return 0

    @cached_property
    def traffic(self) -> KeyTraffic:
        """The operations in flight by key, so that a removal excludes others on its key. Used only by the scheduler."""
        return KeyTraffic()

    def use_arena(self, arena: Arena) -> None:  # noqa: B027 - most tiers need not know
        """Called before `open` with the memory that holds payloads, for tiers that register it."""

    def load_library(self) -> None:  # noqa: B027 - most tiers import what they need with their module
        """Import the client of the tier's storage. Blocks. Raises ConfigError that says what to install."""

    def take_over(self, before: Tier) -> None:
        """Take the place of a tier of the same name and storage: its counters, and what others know of it by now.

        Called when this tier is open.
        """
        self.traffic = before.traffic

    @abstractmethod
    async def open(self) -> None:
        """Make the tier usable. Raises TierUnavailable or ConfigError that says what to do."""

    @abstractmethod
    async def close(self) -> None:
        """Release everything that the tier holds. Idempotent; does not wait for operations that hang."""

    def describe(self) -> str:
        """Return a phrase for a log line with the kind and place of the tier."""
        return self.name

    @abstractmethod
    def contains(self, key: ChunkKey) -> bool:
        """Return True if the tier knows that it has `key`, from memory. On shared tiers it may be wrong either way."""

    def tell(self, on_change: Callable[[ChunkKey], None]) -> None:  # noqa: B027 - most tiers are never asked to
        """Call `on_change` on the loop soon after the answer of `contains` changes for a key.

        This includes changes by other processes, and may include keys without a change. Called once the tier is open.
        """

    def offers(self, key: ChunkKey) -> bool:
        """Return True if the tier contains `key` and it is not being removed."""
        return self.contains(key) and not self.traffic.refuses(key)

    def offered(self) -> Sequence[Container[ChunkKey]]:
        """Return containers of the keys that `offers` is True for: a dictionary avoids a call for each key.

        They are valid until other code runs on the loop.
        """
        return (_Offered(self.offers),)

    def prefix(self, keys: Sequence[ChunkKey]) -> int:
        """Return the length of the prefix of `keys` that the tier knows it has."""
        for position, key in enumerate(keys):
            if not self.contains(key):
                return position
        return len(keys)

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        """Return the result of `prefix` after asking the storage about unknown keys. Only called on shared tiers."""
        return self.prefix(keys)

    async def probe_each(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return a flag per key, True if the storage has it. Override this if one request can ask for many keys."""
        return [bool(await self.probe([key])) for key in keys]

    @abstractmethod
    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        """Read and verify the chunk into `into` (uint8, at least the padded payload).

        Returns the payload's length, or None for a miss. The caller zeroes the padding. Raises CorruptChunk if
        verification fails; by then the chunk has been removed from the tier, or is no longer offered if the tier is
        read-only. Raises TierUnavailable or OSError if the tier failed.
        """

    @abstractmethod
    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        """Store `payload[:payload_bytes]`; `payload` itself is padded with zeroes to a multiple of 4096 bytes.

        Returns True if the chunk is stored or was there already, False if the tier declines it. Raises TierFull if
        there is no room and nothing to evict, TierUnavailable or OSError if the tier failed. A partial write is never
        visible.
        """

    def used(self, keys: Sequence[ChunkKey]) -> Sequence[ChunkKey]:
        """Called when a request was served with `keys` by any tier, or put `keys` that are resident.

        Returns the keys that the tier lacks and now wants.
        """
        return ()

    def continued(self, keys: Sequence[ChunkKey]) -> None:  # noqa: B027 - most tiers take everything
        """Called when a session with a further turn needs `keys`, some of which may still have to be put."""

    @abstractmethod
    async def remove(self, key: ChunkKey) -> bool:
        """Remove a chunk. Return True if it was there.

        What a `probe` that began before the end of this call has seen of the chunk must not make the tier contain it.
        """

    @abstractmethod
    def statistics(self) -> TierStatistics:
        """Return a snapshot of the counters."""


class DeviceTier(Tier):
    """A tier that also moves chunks between its storage and device memory.

    Payloads are tensors uint8[n] in a slot of the device pool, padded like host payloads. The tier may use the 4096
    bytes before a payload, which belong to the slot too: they hold the chunk's header, as in a file. Cancellation is as
    in `read` and `write`.
    """

    @property
    @abstractmethod
    def serves_device(self) -> bool:
        """True if there is a device that the two methods below work with."""

    @abstractmethod
    async def read_device(self, key: ChunkKey, into: Tensor) -> int | None:
        """Read as `read` does, verification included, into device memory. The tier zeroes the padding."""

    @abstractmethod
    async def write_device(self, key: ChunkKey, payload: Tensor, payload_bytes: int) -> bool:
        """Write as `write` does, from device memory that no stream is writing to."""
