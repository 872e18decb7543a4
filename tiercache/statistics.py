"""The snapshot that `TierCache.statistics` returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tiercache.core.advice import Advice
from tiercache.core.prefetch import Account
from tiercache.scheduler.reads import ReaderStatistics, TierReadStatistics
from tiercache.scheduler.writer import WriterStatistics
from tiercache.tiers.base import TierStatistics


@dataclass(frozen=True)
class DeviceStatistics:
    """The slots of the pool in device memory, and the free ones."""

    slots: int
    slots_free: int


@dataclass(frozen=True)
class Statistics:
    """Contents and counters of each tier, counters and queues of the writers, and counters of the reads."""

    tiers: dict[str, TierStatistics]
    writers: dict[str, WriterStatistics]
    reader: ReaderStatistics
    reads: dict[str, TierReadStatistics]
    """Reads by the name of each tier below the hot cache, those into host and into device memory together."""
    breakers: dict[str, str]
    """States of the breakers of reads, into device memory where a tier has both; a writer has its own."""
    slots: int
    slots_free: int
    prefetch: dict[str, Account]
    """Prefetched bytes by source: used, late, wasted, cancelled."""
    puts_skipped: int
    stuck: int
    """Operations that exceeded their deadline and still hold a slot."""
    advice: Advice
    """What other sizes would be worth, and why requests missed; see `tiercache advise`."""
    device: DeviceStatistics | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries, lists and numbers, for JSON."""
        return asdict(self)
