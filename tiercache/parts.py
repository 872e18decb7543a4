"""What a cache is made of, and how that is taken: as each part is, `Closing` gets to know how it is given back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tiercache.assembly import arena_settings, make_cpu, make_device, make_fan_out, reader_settings
from tiercache.checks import check_loop, check_number
from tiercache.closing import Closing, Part
from tiercache.config import Config
from tiercache.core.keys import ChunkKey
from tiercache.core.layout import Layout
from tiercache.core.prefetch import PrefetchSettings
from tiercache.device.device import Device
from tiercache.device.driver import Driver, Event, gpu_in_use
from tiercache.device.paged import DevicePayload, device_payload
from tiercache.memory.arena import Arena
from tiercache.memory.slots import SlotPool
from tiercache.memory.workers import Workers, wait_shielded
from tiercache.opening import DEVICE_S, close_device, made, make_arena, make_tiers_in_time, open_tier
from tiercache.payloads import Source, source_of
from tiercache.scheduler.device_path import DevicePath
from tiercache.scheduler.ingest import Ingest
from tiercache.scheduler.prefetcher import Prefetcher
from tiercache.scheduler.reads import Reader
from tiercache.scheduler.writer import FanOut, FlushReport
from tiercache.statistics import DeviceStatistics, Statistics
from tiercache.tiers.base import Tier
from tiercache.tiers.cpu import CpuTier
from tiercache.tiers.leases import Lease
from tiercache.tiers.staging import StagingTier

logger = logging.getLogger("tiercache")

_COPYING_THREADS = 2
"""One direction has so many. Puts have their own, so that slow sources keep no get from what is hot."""


@dataclass
class OnDevice:
    """What a cache with an accelerator has besides."""

    device: Device
    staging: StagingTier
    reader: Reader
    """Of device tiers, into device memory."""
    path: DevicePath

    def payload(self, given: Any) -> DevicePayload | None:
        """`given` if it lies in device memory."""
        return device_payload(self.device.driver, given)

    def all_of(self, buffers: Sequence[Any]) -> list[DevicePayload]:
        """`buffers` that lie in device memory; none of those in host memory. Raises ValueError for both kinds."""
        there = [chunk for chunk in map(self.payload, buffers) if chunk is not None]
        if there and len(there) < len(buffers):
            raise ValueError("buffers: expected all in host memory or all in device memory, found both")
        return there

    def statistics(self) -> DeviceStatistics:
        pool = self.device.pool
        return DeviceStatistics(
            pool.count, pool.free, self.reader.counters, self.reader.reads(), self.reader.breakers()
        )

    def event(self, after: Event | None) -> Event:
        """Return `after`, or an event of the calling thread's own stream."""
        driver = self.device.driver
        return driver.record(driver.current_stream()) if after is None else after


@dataclass
class Parts:
    """Of a cache that has started. They stay when it is closed."""

    loop: asyncio.AbstractEventLoop
    chunk_bytes: int
    blocking_s: float
    """What an operation waits that was given no deadline."""
    closing: Closing
    arena: Arena
    cpu: CpuTier
    tiers: list[Tier]
    """Below the hot cache."""
    fan_out: FanOut
    ingest: Ingest
    reader: Reader
    on_device: OnDevice | None
    ahead: Prefetcher

    def describe(self) -> str:
        arena = f"{self.arena.size_bytes / 2**30:.2f} GB of {self.arena.kind} memory in {self.cpu.pool.count} slots"
        device = [self.on_device.staging.describe()] if self.on_device is not None else []
        return " -> ".join([f"cpu ({arena})", *device, *(tier.describe() for tier in self.tiers)])

    def statistics(self) -> Statistics:
        on_device = self.on_device
        return Statistics(
            tiers={tier.name: tier.statistics() for tier in (self.cpu, *self.tiers)},
            writers={writer.tier.name: writer.statistics() for writer in self.fan_out.writers},
            reader=self.reader.counters,
            reads=self.reader.reads(),
            breakers=self.reader.breakers(),
            slots=self.cpu.pool.count,
            slots_free=self.cpu.pool.free,
            prefetch=self.ahead.accounts,
            puts_skipped=self.ingest.skipped + (on_device.path.skipped if on_device is not None else 0),
            device=on_device.statistics() if on_device is not None else None,
            stuck=self.closing.stuck,
        )

    def wait_s(self, deadline_s: float | None) -> float:
        if deadline_s is None:
            return self.blocking_s
        check_number("deadline_s", deadline_s)
        return deadline_s

    def until_s(self, deadline_s: float | None) -> float:
        """As a time of the loop."""
        return self.loop.time() + self.wait_s(deadline_s)

    def asked_until_s(self, deadline_s: float | None) -> float:
        """As `until_s`, of a look-up."""
        return self.until_s(self.reader.settings.probe_deadline_s if deadline_s is None else deadline_s)

    def check_length(self, length_bytes: int) -> None:
        if not 0 < length_bytes <= self.chunk_bytes:
            raise ValueError(
                f"payload: expected 1..{self.chunk_bytes} bytes (the layout's chunk), found {length_bytes}"
            )

    def by_memory(
        self, keys: Sequence[ChunkKey], payloads: Sequence[Any]
    ) -> tuple[list[tuple[ChunkKey, int, Source]], list[tuple[ChunkKey, DevicePayload]]]:
        """Chunks that lie in host memory, as calls that copy them, and those in device memory."""
        host, chunks = [], []
        for key, payload in zip(keys, payloads, strict=True):
            chunk = self.on_device.payload(payload) if self.on_device is not None else None
            if chunk is None:
                host.append((key, *source_of(payload)))
            else:
                self.check_length(chunk.payload_bytes)
                chunks.append((key, chunk))
        return host, chunks

    def used(self, keys: Sequence[ChunkKey]) -> None:
        """A request was served with `keys`."""
        self.fan_out.used(keys, self.cpu)

    def served(self, keys: Sequence[ChunkKey], delivered: int) -> None:
        """A request came for `keys`, and got so many of them."""
        self.used(keys[:delivered])
        self.ahead.served(keys)

    async def forget(self, keys: Sequence[ChunkKey], timeout_s: float) -> None:
        only_read = [tier for tier in self.tiers if tier.reads and not tier.writes]

        def from_memory(keys: Sequence[ChunkKey]) -> None:
            for key in keys:
                self.cpu.forget(key)
            for mapped in self.reader.mapped:
                for key in keys:
                    mapped.mappings.forget(key)
            if self.on_device is not None:
                for key in keys:
                    self.on_device.staging.forget(key)
            for tier in only_read:
                for key in keys:
                    tier.traffic.refuse(key)

        with self.closing.operations:
            await self.fan_out.forget(keys, timeout_s, from_memory)

    async def written(self) -> FlushReport:
        """What is left unwritten when a close has waited for all that is under way, or its deadline has come."""
        before = self.fan_out.counts()
        await self.closing.deadline.bounds(self._finished())
        report = self.fan_out.report(before)
        if not report.complete:
            logger.warning("closed before everything was written: %s", report.pending)
        return report

    async def _finished(self) -> None:
        """Until no operation is under way (a put has nothing queued before its end, and copies of a device go on without
        their waiters), everything is written or given up, and what was forgotten is removed."""
        await self.closing.operations.ended()
        await self.fan_out.drained()
        await self.fan_out.removed()


class Get:
    """What `TierCache.get` returns. A class and not a generator: it is on the path that must take microseconds."""

    __slots__ = ("_deadline_s", "_key", "_lease", "_parts")

    def __init__(self, parts: Parts, key: ChunkKey, deadline_s: float | None) -> None:
        self._parts = parts
        self._key = key
        self._deadline_s = deadline_s
        self._lease: Lease | None = None

    async def __aenter__(self) -> Lease | None:
        reader = self._parts.reader
        lease = reader.lease_now(self._key)
        if lease is None:
            check_loop(self._parts.loop)
            lease = await reader.fetch(self._key, self._parts.until_s(self._deadline_s))
        self._lease = lease
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lease is not None:
            self._lease.release()


async def build(config: Config, layout: Layout, driver: Driver | None, closing: Closing) -> Parts:
    """Take what the configuration describes, each part by a deadline of its own. `closing` knows what there is of it, also
    when this raises."""
    settings = arena_settings(config, layout)
    closing.device = device = await made(
        "device", DEVICE_S, close_device, make_device, config, layout, driver, gpu_in_use()
    )
    tiers = await make_tiers_in_time(config, layout, device)
    closing.arena = arena = await make_arena(settings)
    copiers = Workers("copy", _COPYING_THREADS)
    fillers = Workers("fill", _COPYING_THREADS)
    for workers in (copiers, fillers):
        closing.taken.callback(workers.close)
    closing.pool = pool = SlotPool(arena, layout.chunk_bytes)
    if device is not None:
        await wait_shielded(copiers.submit(device.pin, arena.memory, pool.slot_bytes))
    cpu = make_cpu(config, pool, copiers)
    await cpu.open()
    closing.taken.push_async_callback(closing.let_end)
    closing.taken.push_async_callback(cpu.close)
    closing.taken.push_async_callback(closing.settle)
    opened: list[Part] = []
    closing.push(opened)
    for tier in tiers:
        tier.use_arena(arena)
        await open_tier(tier, closing.abandoned)
        opened.append((tier.name, tier.close))
    return await _connected(config, layout, closing, arena, cpu, tiers, fillers)


async def _connected(
    config: Config, layout: Layout, closing: Closing, arena: Arena, cpu: CpuTier, tiers: list[Tier], fillers: Workers
) -> Parts:
    """Add readers, writers and the prefetcher to tiers that are open. `fillers` run the sources of puts."""
    loop, device = asyncio.get_running_loop(), closing.device
    reading, readable = reader_settings(config, layout), [tier for tier in tiers if tier.reads]
    fan_out = make_fan_out(config, layout, tiers, arena.size_bytes, cpu.pool.slot_bytes, cpu.budget)
    # Half of the time: the other half is for the tiers.
    closing.push([("writing", lambda: fan_out.close((loop.time() + closing.deadline.until_s) / 2))])
    on_device = None
    if device is None:
        reader = Reader(cpu, readable, reading, maps=True)
    else:
        # Copies of a device come from pinned memory, which mappings are not.
        staging = StagingTier(device, cpu.copiers)
        await staging.open()
        reader = Reader(cpu, [staging, *readable], reading)
        serving = [tier for tier in readable if tier.serves_device]
        device_reader = Reader(staging, serving, reading)
        path = DevicePath(device, cpu, staging, reader, device_reader, fan_out)
        on_device = OnDevice(device, staging, device_reader, path)
    readers = [reader] if on_device is None else [reader, on_device.reader]
    closing.push([("reading", reader.close) for reader in readers])
    closing.users += [*fan_out.writers, *readers]
    chunk_bytes, slots = layout.chunk_bytes, cpu.pool.count
    share_bytes = int(config.prefetch_share * slots) * chunk_bytes
    prefetching = PrefetchSettings(slots * chunk_bytes, share_bytes, bytes_per_s=config.prefetch_bytes_per_s)
    ahead = Prefetcher(reader, prefetching, chunk_bytes, read_s=reading.deadline_s, on_continued=fan_out.continued)
    closing.push([("prefetching", ahead.close)])
    return Parts(
        loop=loop,
        chunk_bytes=chunk_bytes,
        blocking_s=float(config.blocking_timeout_secs),
        closing=closing,
        arena=arena,
        cpu=cpu,
        tiers=tiers,
        fan_out=fan_out,
        ingest=Ingest(cpu, fan_out, fillers),
        reader=reader,
        on_device=on_device,
        ahead=ahead,
    )
