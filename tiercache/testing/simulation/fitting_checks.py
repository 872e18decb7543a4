"""What must hold of device memory, device files and rings while nothing is under way."""

from __future__ import annotations

from typing import Any

from tiercache.cache import TierCache
from tiercache.core.budget import Purpose
from tiercache.testing.simulation.oracle import Violation
from tiercache.tiers.cufile import CuFileFiles
from tiercache.tiers.device_files import BounceFiles
from tiercache.tiers.gds import GdsTier


def check_fittings(cache: TierCache) -> None:
    """Raises Violation."""
    kept: dict[str, Any] = {}
    path = cache._device_path
    if path is not None:
        device, staging = path.device, path.staging
        kept |= {
            "slots of the device": device.pool.count - device.pool.free,
            "slots held for writes to device tiers": staging.budget.held[Purpose.WRITE],
            "slots held for reads from device tiers": staging.budget.held[Purpose.READ],
            "who waits for the device's slots": sum(map(len, staging._waiting)),
            "reads into the device": len(cache._device_reader.flights._flights),
            "events of the device": device.bridge.pending,
            "unknown ends of copies": device.unfinished,
            "batches of puts": _BATCHES - path._puts._value,
            "batches of gets": _BATCHES - path._gets._value,
        }
    for tier in cache.tiers:
        if isinstance(tier, GdsTier):
            files = tier.files
            if isinstance(files, BounceFiles):
                kept[f"pinned buffers of {tier.name}"] = files._threads - files._buffers.qsize()
            elif isinstance(files, CuFileFiles):
                deleted = [name for name, file in files._open_files.items() if not file.exists]
                kept[f"deleted files that {tier.name} has open"] = deleted
    left = {name: count for name, count in kept.items() if count}
    if left:
        raise Violation(f"nothing is under way, and there are still: {left}")


_BATCHES = 2
"""`device_path._BATCHES_AT_ONCE`: all are free."""
