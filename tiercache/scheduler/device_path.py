"""How chunks in device memory get into the cache and out of it.

A put gathers chunks into slots of device memory and copies them on to the arena, as far as anybody wants them there;
tiers that write from device memory get a lease on the slot. A get takes each chunk from where it is nearest: the arena, a
slot that is still being written, a device tier, and only then the host's cascade. Whole batches are enqueued on streams and
awaited once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tiercache.core.budget import Purpose
from tiercache.core.header import aligned
from tiercache.core.keys import ChunkKey, each_once
from tiercache.core.patience import Patience
from tiercache.core.tombstones import Operation
from tiercache.device.device import Device
from tiercache.device.driver import Event
from tiercache.device.payloads import DevicePayload
from tiercache.memory.slots import Slot
from tiercache.memory.workers import retrieve_exception
from tiercache.scheduler.deliverer import WithHeld, deliver
from tiercache.scheduler.device_copies import DeviceCopies, DeviceLanding, turn_by, when_done
from tiercache.scheduler.fan_out import FanOut
from tiercache.scheduler.reader import Reader
from tiercache.scheduler.together import all_or_none
from tiercache.tiers.cpu import CpuTier
from tiercache.tiers.leases import Lease
from tiercache.tiers.staging import StagingTier

_BATCH_BYTES = 64 << 20
_BATCHES_AT_ONCE = 2


@dataclass
class _Storing:
    """A chunk on its way in: the slots that it gets."""

    key: ChunkKey
    payload: DevicePayload
    staged: Slot | None = None
    hot: Slot | None = None


@dataclass
class _Batch:
    storing: list[_Storing] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    staged: list[Lease] = field(default_factory=list)
    """On device memory."""
    there: int = 0
    """Chunks that the cache has already."""


class DevicePath:
    """All methods belong to the event loop. Deadlines are loop times in seconds."""

    def __init__(
        self,
        device: Device,
        cpu: CpuTier,
        staging: StagingTier,
        host_reader: Reader,
        device_reader: Reader,
        fan_out: FanOut,
    ) -> None:
        self.device = device
        self.cpu = cpu
        self.staging = staging
        self.skipped = 0
        self._host_reader = host_reader
        self._device_reader = device_reader
        self._fan_out = fan_out
        self._copies = DeviceCopies(device, cpu.copiers)
        self._puts = asyncio.Semaphore(_BATCHES_AT_ONCE)
        self._gets = asyncio.Semaphore(_BATCHES_AT_ONCE)
        self._device_writers = [writer for writer in fan_out.writers if writer.tier.serves_device]
        self._host_writers = [writer for writer in fan_out.writers if not writer.tier.serves_device]
        self.lanes = 2 + max([2, *(writer.tier.traits.read_concurrency for writer in fan_out.writers)])

    # Putting

    async def put(
        self, chunks: Sequence[tuple[ChunkKey, DevicePayload]], after: Event | None, deadline_s: float
    ) -> int:
        """Returns how many of the chunks are in the cache (hot, or on their way to a device tier) when their memory may be
        changed again. Cancelled, it stores nothing more, and nothing reads their memory when CancelledError comes out."""
        chunks = each_once(chunks)
        pool = self.device.pool
        size = max(1, min(pool.count // 4, self.cpu.most_slots // 4, _BATCH_BYTES // pool.slot_bytes))
        patience = Patience(deadline_s)
        # The staging tier's too: a chunk is forgotten in both at the same time.
        operation = self.cpu.tombstones.begin()
        try:
            tasks = [
                asyncio.ensure_future(self._put_batch(chunks[start : start + size], operation, after, patience))
                for start in range(0, len(chunks), size)
            ]
            await all_or_none(tasks)
        finally:
            self.cpu.tombstones.end(operation)
        return sum(task.result() for task in tasks)

    async def _put_batch(
        self,
        chunks: Sequence[tuple[ChunkKey, DevicePayload]],
        operation: Operation,
        after: Event | None,
        patience: Patience,
    ) -> int:
        batch = _Batch()
        done: asyncio.Future[None] | None = None
        try:
            await turn_by(patience.deadline_s, self._puts)
        except TimeoutError:
            self.skipped += len(chunks)
            return 0
        try:
            try:
                for key, payload in chunks:
                    if not operation.forgot(key):
                        await self._admit(key, payload, batch, patience.deadline_s)
                if batch.storing:
                    try:
                        await self._enqueue_put(batch, after)
                    finally:
                        # Also what was enqueued before something failed reads the caller's memory.
                        done = self.device.end_of(self.device.gather, self.device.offload)
                        await self._copies.ended(done)
            except BaseException:
                when_done(done, batch.storing, self._abandon)
                for lease in (*batch.leases, *batch.staged):
                    lease.release()
                raise
        finally:
            self._puts.release()
        forgotten = [chunk for chunk in batch.storing if operation.forgot(chunk.key)]
        for chunk in forgotten:
            self._abandon(chunk)
            batch.storing.remove(chunk)
        for chunk in batch.storing:
            length = chunk.payload.payload_bytes
            if chunk.hot is not None:
                batch.leases.append(self.cpu.publish(chunk.key, chunk.hot, length, Purpose.WRITE))
            if chunk.staged is not None:
                batch.staged.append(self.staging.publish(chunk.key, chunk.staged, length, Purpose.WRITE))
        stored = batch.there + len(batch.storing)
        await self._fan_out.offer(batch.leases, patience, batch.staged)
        return stored

    async def _admit(self, key: ChunkKey, payload: DevicePayload, batch: _Batch, deadline_s: float) -> None:
        """Slots for a chunk where it is wanted and is not yet. Where none comes free in time it is skipped, and counted."""
        hot, staged = self.cpu.lease(key, writes=True), self.staging.lease(key, writes=True)
        if hot is not None:
            batch.leases.append(hot)
        if staged is not None:
            batch.staged.append(staged)
        if hot is not None or staged is not None:
            self.cpu.access([key])
            batch.there += 1
            return
        wants_host = self.cpu.keep or any(not writer.tier.offers(key) for writer in self._host_writers)
        wants_device = any(not writer.tier.offers(key) for writer in self._device_writers)
        if not wants_host and not wants_device:
            batch.there += 1
            return
        loop = asyncio.get_running_loop()
        chunk = _Storing(key, payload)
        # A chunk in one piece can go to the host without a slot; device tiers then write from the host's copy.
        must_stage = payload.span is None or not wants_host
        try:
            if must_stage:
                chunk.staged = await self.staging.reserve(Purpose.WRITE, deadline_s - loop.time())
                if chunk.staged is None:
                    self.skipped += 1
                    return
            elif wants_device:
                chunk.staged = self.staging.try_reserve(Purpose.WRITE)
            if wants_host:
                # Who is at his own quota does not keep the others from their turn while he waits for himself.
                waits_for_himself = self.cpu.turns.stands_aside(Purpose.WRITE, key)
                left_s = 0.0 if waits_for_himself else deadline_s - loop.time()
                chunk.hot = await self.cpu.reserve(Purpose.WRITE, left_s, key)
                if chunk.hot is None and not wants_device:
                    self.skipped += 1
                    self._abandon(chunk)
                    return
        except BaseException:
            self._abandon(chunk)
            raise
        batch.storing.append(chunk)

    async def _enqueue_put(self, batch: _Batch, after: Event | None) -> None:
        device, driver = self.device, self.device.driver
        if after is not None:
            driver.wait(device.gather, after)
            driver.wait(device.offload, after)
        for chunk in batch.storing:
            length = chunk.payload.payload_bytes
            source = chunk.payload.span
            if chunk.staged is not None:
                source = device.pool.view(chunk.staged, length)
                await self._copies.run(chunk.payload, chunk.payload.gather, source, device.gather)
                if padding := aligned(length) - length:
                    driver.fill(source.address + length, 0, padding, device.gather)
            if chunk.hot is not None:
                assert source is not None
                if chunk.staged is not None:
                    device.follow(device.gather, device.offload)
                hot = self.cpu.pool.view(chunk.hot, aligned(length))
                hot[length:] = 0
                await self._copies.copy(hot.ctypes.data, source.address, length, device.offload)

    def _abandon(self, chunk: _Storing) -> None:
        if chunk.hot is not None:
            self.cpu.abandon(chunk.hot, Purpose.WRITE)
        if chunk.staged is not None:
            self.staging.abandon(chunk.staged, Purpose.WRITE)

    # Getting

    async def get(
        self,
        keys: Sequence[ChunkKey],
        payloads: Sequence[DevicePayload],
        after: Event | None,
        deadline_s: float,
        held: Mapping[ChunkKey, Lease] | None = None,
    ) -> int:
        """Returns how many chunks of the contiguous prefix are in place. Nothing writes to the payloads' memory when this
        has returned or raised - but for a device that does not finish a copy within 30 s, which DeviceError says. `held` as
        `Reader.deliver` has it."""
        if after is not None and not await self._has_happened(after, deadline_s):
            return 0
        # Each of the two knows how quick it is itself; a chunk may come by either.
        waits = [wait for reader in (self._host_reader, self._device_reader) if (wait := reader.worth_waiting_s(keys))]
        if waits and held is None:
            deadline_s = min(deadline_s, asyncio.get_running_loop().time() + sum(waits))
        undelivered = self._host_reader.undelivered
        landing = DeviceLanding(self._copies, self.staging, self._gets, undelivered, payloads, deadline_s)
        return await deliver(self if held is None else WithHeld(self, held), keys, landing, deadline_s)

    def lease_now(self, key: ChunkKey, *, noted: bool = False) -> Lease | None:
        return self._host_reader.lease_now(key, noted=noted) or self._device_reader.lease_now(key)

    async def fetch(
        self, key: ChunkKey, deadline_s: float, parent: ChunkKey | None = None, time: int | None = None
    ) -> Lease | None:
        """From a device tier that has it, or may; else from the host's cascade."""
        known = any(writer.tier.contains(key) for writer in self._device_writers)
        if known or (self._device_writers and not any(writer.tier.contains(key) for writer in self._host_writers)):
            lease = await self._device_reader.fetch(key, deadline_s, parent, time)
            if lease is not None:
                return lease
        return await self._host_reader.fetch(key, deadline_s, parent, time)

    async def _has_happened(self, after: Event, deadline_s: float) -> bool:
        """Whether the caller's event came in time. Awaited here and not on the streams, where it would hold up others."""
        driver, loop = self.device.driver, asyncio.get_running_loop()
        if driver.query(after):
            return True
        happened = self.device.happened(after)
        done, _ = await asyncio.wait([happened], timeout=max(0.0, deadline_s - loop.time()))
        if not done:
            happened.add_done_callback(retrieve_exception)
            return False
        happened.result()
        return True
