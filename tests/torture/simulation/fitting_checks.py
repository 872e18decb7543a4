"""What must hold of device memory, device files and rings while nothing is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from tests.torture.simulation.oracle import Violation
from tiercache.cache import TierCache
from tiercache.errors import TierCacheError
from tiercache.memory.slots import Purpose
from tiercache.scheduler.device_path import BATCHES_AT_ONCE
from tiercache.tiers.base import Tier
from tiercache.tiers.files.tier import FileTier
from tiercache.tiers.gds import DeviceIO
from tiercache.tiers.hf3fs.tier import RingIO
from tiercache.tiers.shared_memory import MappingIO


def check_fittings(cache: TierCache) -> None:
    """Raises Violation."""
    kept: dict[str, Any] = {}
    if (on_device := cache.parts.on_device) is not None:
        device, staging = on_device.device, on_device.staging
        kept |= {
            "slots of the device": device.pool.count - device.pool.free,
            "slots held for writes to device tiers": staging.budget.held[Purpose.WRITE],
            "slots held for reads from device tiers": staging.budget.held[Purpose.READ],
            "who waits for the device's slots": sum(map(len, staging.wait_queue.waiting)),
            "reads into the device": len(on_device.reader.in_flight),
            "ends of the device": device.in_flight,
            "unknown ends of copies": device.unfinished,
            "batches of puts": BATCHES_AT_ONCE - on_device._puts._value,
            "batches of gets": BATCHES_AT_ONCE - on_device._gets._value,
        }
    for tier in cache.tiers:
        io = tier.directories.io if isinstance(tier, FileTier) else None
        if isinstance(io, DeviceIO) and (files := io.files) is not None:
            kept[f"pinned buffers of {tier.name}"] = files._threads - files._buffers.qsize()
        if isinstance(io, MappingIO):
            entries = list(io.mappings._entries.values())
            uncounted_bytes = io.mappings.mapped_bytes - sum(entry.length_bytes for entry in entries)
            kept |= {
                f"leases on what {tier.name} has mapped": sum(entry.leases > 0 for entry in entries),
                f"bytes that {tier.name} has mapped and does not find": uncounted_bytes,
                f"bytes without a name that {tier.name} has mapped": io.mappings.unlinked_bytes,
            }
        if isinstance(io, RingIO) and io.engine is not None:
            engine = io.engine
            unheard = engine.library.client.unheard  # each costs its place until the rings are made anew
            assert engine._buffers is not None
            lost = engine._buffers.count - engine._buffers._free.qsize()
            kept |= {
                f"missing rings of {tier.name}": not engine.serves,
                f"transfers of {tier.name}": max(0, len(engine._unfinished()) - unheard),
                f"transfer buffers of {tier.name}": max(0, lost - unheard),
                f"calls of {tier.name}": io.active,
            }
    left = {name: count for name, count in kept.items() if count}
    if left:
        raise Violation(f"nothing is under way, and there are still: {left}")


def watch_errors(tiers: Iterable[Tier], fail: Callable[[BaseException], None]) -> None:
    """Report errors outside of a tier's contract, which its callers would count as ordinary failures."""
    for tier in tiers:
        for name in ("read", "write", "remove", "probe", "read_device", "write_device"):
            if (method := getattr(tier, name, None)) is not None:
                setattr(tier, name, _watched(method, f"{tier.name}: {name}", fail))


def _watched(method: Any, what: str, fail: Callable[[BaseException], None]) -> Any:
    async def watched(*arguments: Any) -> Any:
        try:
            return await method(*arguments)
        except (TierCacheError, OSError, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            found = Violation(f"{what}: expected an error of the contract, found {type(error).__name__}: {error}")
            found.__cause__ = error
            fail(found)
            raise

    return watched
