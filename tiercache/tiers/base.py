"""The contract between the cache and anything that stores chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tiercache.core.budget import Purpose
from tiercache.core.keys import ChunkKey
from tiercache.core.tenants import TenantStatistics
from tiercache.core.traffic import KeyTraffic
from tiercache.device.driver import Tensor
from tiercache.memory.arena import Arena
from tiercache.tiers.leases import Lease
from tiercache.tiers.mappings import Mappings


@dataclass(frozen=True)
class Traits:
    """What a tier is like; the scheduler plans with these and asks nothing else."""

    durable: bool = False
    """Chunks outlive this process."""
    shared: bool = False
    """Other processes may add and remove chunks: an unknown key is worth a `probe`."""
    read_concurrency: int = 4
    write_concurrency: int = 4
    prefetches_apart: bool = False
    """As many prefetches as reads may be under way besides them, and give way to them: see `Tier.prefetch`."""


@dataclass
class TierStatistics:
    """Counters since `open`, in chunks and payload bytes; `resident_*` is now. `occupied_bytes` is physical."""

    reads: int = 0
    read_bytes: int = 0
    read_misses: int = 0
    writes: int = 0
    written_bytes: int = 0
    stored_bytes: int = 0
    """Of `written_bytes`, what was stored: fewer where the tier compresses; 0 where it never does. Chunks that somebody else
    was quicker to store count as well."""
    write_failures: int = 0
    evicted: int = 0
    corrupt: int = 0
    read_again: int = 0
    """Reads that failed verification, and were tried once more before the value was blamed."""
    strays: int = 0
    resident: int = 0
    occupied_bytes: int = 0
    mapped_bytes: int = 0
    """Of a tier whose chunks are mapped: how much this process has mapped now."""
    unlinked_bytes: int = 0
    """Of that, what was deleted since and is still held: it takes memory and is in no `occupied_bytes`."""
    tenants: dict[str, TenantStatistics] = field(default_factory=dict)
    """By their tags in hex, where tenants have quotas; see `tiercache.core.tenants.shown`."""


class _Offered:
    """The keys of which a call says that they are there."""

    __slots__ = ("_offers",)

    def __init__(self, offers: Callable[[ChunkKey], bool]) -> None:
        self._offers = offers

    def __contains__(self, key: Any) -> bool:
        return self._offers(key)


class Tier(ABC):
    """A place for chunks.

    All methods are called on one event loop and must not block it: whatever may take longer than a dictionary look-up
    runs elsewhere. Every payload is a uint8 vector in page-aligned memory whose length is padded to 4096 bytes; a tier
    may transfer the padding but never shows it to anybody.

    Cancellation: a cancelled `read` or `write` may go on in its thread; it raises CancelledError only when the tier no
    longer touches the payload's memory. (The scheduler does not cancel; it stops waiting, and keeps the memory.)
    """

    name: str
    traits: Traits = Traits()
    reads: bool = True
    """Whether the cascade asks it. The configuration's choice, not the tier's."""
    writes: bool = True
    """Whether chunks are written to it. Set before `open`. A tier that is only read changes nothing where chunks are stored:
    it evicts and removes nothing there, not even a chunk that is bad."""
    patience_s: float | None = None
    """How long a get waits for this tier before it goes on with the next one; None: as long as its deadline allows."""
    open_s: float = 30.0
    """What `open` may take: a cache that starts waits no longer, cancels it, and says so."""

    @property
    def serves_device(self) -> bool:
        """Whether it reads and writes device memory as well: see `DeviceTier`. Known once the tier is open."""
        return False

    @cached_property
    def traffic(self) -> KeyTraffic:
        """Kept by those who read, write and remove, so that a removal has its key to itself. A tier need not look at it."""
        return KeyTraffic()

    def use_arena(self, arena: Arena) -> None:  # noqa: B027 - most tiers need not know
        """Told before `open`: the memory that payloads lie in, for tiers that register it with something."""

    @abstractmethod
    async def open(self) -> None:
        """Make the tier usable. Raises TierUnavailable or ConfigError with what to do about it."""

    @abstractmethod
    async def close(self) -> None:
        """Give back everything that the tier holds. Idempotent; does not wait for hung operations."""

    def describe(self) -> str:
        """One phrase for a log line: what and where."""
        return self.name

    @abstractmethod
    def contains(self, key: ChunkKey) -> bool:
        """Whether the tier knows that it has `key`. From memory, at once; may err in both directions on shared tiers."""

    def tell(self, on_change: Callable[[ChunkKey], None]) -> None:  # noqa: B027 - of most nobody wants to know
        """Once it is open: call `on_change` on the loop, and with little delay, when `contains` says another thing of a key,
        also because of what others do. A key may be named though nothing has changed."""

    def offers(self, key: ChunkKey) -> bool:
        """As `contains`, without what is being removed."""
        return self.contains(key) and not self.traffic.refuses(key)

    def offered(self) -> Sequence[Container[ChunkKey]]:
        """Where `offers` finds keys, for whoever looks for many of them: no call a key where that is a dictionary. What it
        returns is true until something else runs on the loop."""
        return (_Offered(self.offers),)

    def prefix(self, keys: Sequence[ChunkKey]) -> int:
        """How many of `keys`, from the first on without a gap, the tier knows that it has."""
        for position, key in enumerate(keys):
            if not self.contains(key):
                return position
        return len(keys)

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        """As `prefix`, but asks the storage itself about what memory does not know. Only on shared tiers."""
        return self.prefix(keys)

    async def probe_each(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """As `probe`, of each key by itself: gaps end nothing. To be overridden where one question can be about many."""
        return [bool(await self.probe([key])) for key in keys]

    @abstractmethod
    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        """Read and verify the chunk into `into` (uint8, at least the padded payload). Returns the payload's length. Whoever
        calls this makes the padding zero.

        None is a miss. Raises CorruptChunk when what lies there is not what it should be (it is gone from the tier by
        then, or is not offered any more where the tier is only read), TierUnavailable or OSError when the tier failed.
        """

    async def prefetch(self, key: ChunkKey, into: np.ndarray) -> int | None:
        """As `read`, of a chunk that nobody waits for: it may take a little longer so that reads go first."""
        return await self.read(key, into)

    def hurry(self, key: ChunkKey) -> None:  # noqa: B027 - most tiers prefetch as they read
        """Somebody waits by now for a chunk that is being prefetched."""

    @abstractmethod
    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        """Store `payload[:payload_bytes]`; `payload` itself is padded with zeroes to a multiple of 4096 bytes.

        True when stored or already there, False when the tier declines. Raises TierFull when there is no room and nothing
        to evict, TierUnavailable or OSError when the tier failed; nothing half-written is ever visible.
        """

    def used(self, keys: Sequence[ChunkKey]) -> Sequence[ChunkKey]:
        """A request was served with `keys` from somewhere, or put them though they are here; returns those that the tier
        lacks and has reason to want now."""
        return ()

    def continued(self, keys: Sequence[ChunkKey]) -> None:  # noqa: B027 - most tiers take everything
        """A session that has come back at least once needs `keys`, some of which may be still to come."""

    @abstractmethod
    async def remove(self, key: ChunkKey) -> bool:
        """Forget a chunk; whether it was there."""

    @abstractmethod
    def statistics(self) -> TierStatistics:
        """A snapshot."""


class DeviceTier(Tier):
    """A tier that also moves chunks between its storage and device memory.

    Payloads are tensors uint8[n] in a slot of the device pool, padded like host payloads. The 4096 bytes before them belong
    to the slot too and are the tier's to use: a chunk's header lies there, as it does in a file. Cancellation as for `read`
    and `write`.
    """

    @property
    @abstractmethod
    def serves_device(self) -> bool:
        """Whether there is a device that the two methods below can be used with."""

    @abstractmethod
    async def read_device(self, key: ChunkKey, into: Tensor) -> int | None:
        """As `read`, verified as well, into device memory, and with zeroes behind it up to the next page."""

    @abstractmethod
    async def write_device(self, key: ChunkKey, payload: Tensor, payload_bytes: int) -> bool:
        """As `write`, from device memory that no stream is writing any more."""


class MappedTier(Tier):
    """A tier whose chunks lie in memory that this process can map: each is mapped and verified once, and then read where it
    lies. What is mapped counts as hot: it is leased at once, and nothing is copied to the hot cache."""

    mappings: Mappings
    """Whose leases these are."""
    maps_ahead: bool = False
    """Whether it is to map, in the background and within bounds, what other processes store: set by whoever maps."""

    @abstractmethod
    def lease(self, key: ChunkKey, *, noted: bool = False) -> Lease | None:
        """A reader's lease on a chunk that is mapped; None where it is not. A use, unless that is `noted` already."""

    @abstractmethod
    def hold(self, key: ChunkKey) -> Lease | None:
        """As `lease`, for a reader who may come; not a use."""

    @abstractmethod
    async def map(self, key: ChunkKey, purpose: Purpose) -> Lease | None:
        """As `read`, but map the chunk and verify it there. Returns a lease of that purpose; None is a miss."""
