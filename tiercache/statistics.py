"""What `TierCache.statistics` returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tiercache.core.prefetch import Account
from tiercache.scheduler.reads import ReaderStatistics, TierReadStatistics
from tiercache.scheduler.writer import WriterStatistics
from tiercache.tiers.base import TierStatistics


@dataclass(frozen=True)
class DeviceStatistics:
    """Of the pool in device memory: its slots, those free now, and what was read into it from device tiers."""

    slots: int
    slots_free: int
    reader: ReaderStatistics
    reads: dict[str, TierReadStatistics]
    breakers: dict[str, str]
    """Of reads into device memory; the other ones are of reads into host memory."""


@dataclass(frozen=True)
class Statistics:
    """A snapshot: what each tier holds and did, what the writers did and still have to do, what the readers found."""

    tiers: dict[str, TierStatistics]
    writers: dict[str, WriterStatistics]
    reader: ReaderStatistics
    reads: dict[str, TierReadStatistics]
    """By tier, of those below the hot cache."""
    breakers: dict[str, str]
    """Of reads; a writer has its own."""
    slots: int
    slots_free: int
    prefetch: dict[str, Account]
    """What prefetching did, by source: bytes that were used, late, evicted unused, wasted, cancelled."""
    puts_skipped: int
    stuck: int
    """Operations that outlived their deadline and still hold a slot."""
    device: DeviceStatistics | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
