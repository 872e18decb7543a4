"""Put and get chunks in device memory.

A put gathers chunks into slots of device memory and copies them to the arena, if the hot cache or a host tier takes
them; tiers that write from device memory get a lease on the slot. A get takes each chunk from the nearest place: the
arena, a slot that is still being written, a device tier, then the host's cascade. A worker thread enqueues whole
batches on a stream, and each batch is awaited once; its memory is not reused before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from tiercache.core.header import aligned
from tiercache.core.keys import ChunkKey, each_once
from tiercache.device.device import Device
from tiercache.device.driver import Event, Tensor, host_tensor
from tiercache.device.paged import DevicePayload
from tiercache.errors import LayoutError
from tiercache.memory.slots import Lease, Purpose, Slot
from tiercache.memory.workers import all_or_none, once_ended, retrieve_exception
from tiercache.scheduler.batch import deliver, or_held
from tiercache.scheduler.reads import Reader
from tiercache.scheduler.writer import FanOut
from tiercache.tiers.cpu import StagingTier

_BATCH_BYTES = 64 << 20
BATCHES_AT_ONCE = 3
"""Limit for puts, and for gets. With two, the stream can be idle until the loop is notified of an end."""


@dataclass
class _Storing:
    """A chunk of a put, with its slots."""

    key: ChunkKey
    payload: DevicePayload
    staged: Slot | None = None
    hot: Slot | None = None


@dataclass
class _Batch:
    storing: list[_Storing] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    staged: list[Lease] = field(default_factory=list)
    """Leases on slots of device memory."""
    present: int = 0
    """Number of chunks that the cache had already."""


class DevicePath:
    """Bound to the event loop. Deadlines are loop times in seconds."""

    def __init__(self, staging: StagingTier, host_reader: Reader, reader: Reader, fan_out: FanOut) -> None:
        """`reader` reads device tiers into `staging`, and `host_reader` all tiers into the hot cache."""
        self.device = staging.device
        self.cpu = host_reader.cpu
        self.staging = staging
        self.reader = reader
        self.skipped = 0
        self._host_reader = host_reader
        self._fan_out = fan_out
        self._puts = asyncio.Semaphore(BATCHES_AT_ONCE)
        self._gets = asyncio.Semaphore(BATCHES_AT_ONCE)
        self._device_writers = [writer for writer in fan_out.writers if writer.tier.serves_device]
        self._host_writers = [writer for writer in fan_out.writers if not writer.tier.serves_device]
        self._lanes = 2 + max([2, *(writer.tier.traits.read_concurrency for writer in fan_out.writers)])

    # Put

    async def put(
        self,
        chunks: Sequence[tuple[ChunkKey, DevicePayload]],
        after: Event | None,
        deadline_s: float,
        *,
        prefix: bool = False,
    ) -> int:
        """Store chunks, and return how many are in the cache (hot, or queued for a device tier).

        Returns when the memory of the chunks may be changed again. A cancelled call stores no further chunk, and raises
        when their memory is no longer read.
        """
        chunks = each_once(chunks)
        pool = self.device.pool
        size = max(1, min(pool.count // 4, self.cpu.most_slots // 4, ceil(_BATCH_BYTES / pool.slot_bytes)))
        began_s = asyncio.get_running_loop().time()
        # This also covers the staging tier, since a chunk is forgotten in both at the same time.
        epoch = self.cpu.tombstones.epoch
        times = self.cpu.access_for_put([key for key, _ in chunks], prefix=prefix)
        tasks = [
            asyncio.ensure_future(
                self._put_batch(chunks[start : start + size], epoch, times, after, began_s, deadline_s)
            )
            for start in range(0, len(chunks), size)
        ]
        await all_or_none(tasks)
        return sum(task.result() for task in tasks)

    async def _put_batch(
        self,
        chunks: Sequence[tuple[ChunkKey, DevicePayload]],
        epoch: int,
        times: Mapping[ChunkKey, int],
        after: Event | None,
        began_s: float,
        deadline_s: float,
    ) -> int:
        batch = _Batch()
        copying: list[asyncio.Future[None]] = []
        try:
            await turn_by(deadline_s, self._puts)
        except TimeoutError:
            self.skipped += len(chunks)
            return 0
        try:
            try:
                for key, payload in chunks:
                    await self._admit(key, payload, batch, deadline_s)
                if batch.storing:
                    copying.append(self.device.run(self.device.storing, self._enqueue_put, batch, after))
                    await self.device.ended(copying[0])
            except BaseException:
                once_ended(copying, lambda: self._abandon(batch.storing))
                for lease in (*batch.leases, *batch.staged):
                    lease.release()
                raise
        finally:
            self._puts.release()
        forgotten = [chunk for chunk in batch.storing if self.cpu.tombstones.forgot(chunk.key, epoch)]
        self._abandon(forgotten)
        for chunk in forgotten:
            batch.storing.remove(chunk)
        for chunk in batch.storing:
            length = chunk.payload.payload_bytes
            if chunk.hot is not None:
                time = times[chunk.key]
                batch.leases.append(self.cpu.publish(chunk.key, chunk.hot, length, Purpose.WRITE, time=time))
            if chunk.staged is not None:
                batch.staged.append(self.staging.publish(chunk.key, chunk.staged, length, Purpose.WRITE))
        stored = batch.present + len(batch.storing)
        await self._fan_out.offer(batch.leases, began_s, deadline_s, batch.staged)
        return stored

    async def _admit(self, key: ChunkKey, payload: DevicePayload, batch: _Batch, deadline_s: float) -> None:
        """Reserve the slots for a chunk that the cache lacks.

        A chunk without slots by the deadline is counted as skipped.
        """
        hot, staged = self.cpu.lease(key, writes=True), self.staging.lease(key, writes=True)
        if hot is not None:
            batch.leases.append(hot)
        if staged is not None:
            batch.staged.append(staged)
        if hot is not None or staged is not None:
            batch.present += 1
            return
        wants_host = self.cpu.keep or any(not writer.tier.offers(key) for writer in self._host_writers)
        wants_device = any(not writer.tier.offers(key) for writer in self._device_writers)
        if not wants_host and not wants_device:
            batch.present += 1
            return
        loop = asyncio.get_running_loop()
        chunk = _Storing(key, payload)
        # A contiguous chunk can go to the host without a slot; device tiers then write from the host's copy.
        must_stage = payload.flat is None or not wants_host
        try:
            if must_stage:
                chunk.staged = await self.staging.reserve(Purpose.WRITE, deadline_s - loop.time())
                if chunk.staged is None:
                    self.skipped += 1
                    return
            elif wants_device:
                chunk.staged = self.staging.try_reserve(Purpose.WRITE)
            if wants_host:
                # A tenant at its quota does not wait: it would delay the other chunks of the batch.
                at_quota = self.cpu.wait_queue.blocks_only_itself(Purpose.WRITE, key)
                left_s = 0.0 if at_quota else deadline_s - loop.time()
                chunk.hot = await self.cpu.reserve(Purpose.WRITE, left_s, key)
                if chunk.hot is None and (chunk.staged is None or not wants_device):
                    self.skipped += 1
                    self._abandon([chunk])
                    return
        except BaseException:
            self._abandon([chunk])
            raise
        batch.storing.append(chunk)

    def _enqueue_put(self, batch: _Batch, after: Event | None) -> None:
        """Enqueue a put on a worker thread. Gathers come first, so that the engine's blocks are free again soon."""
        pool, driver, stream = self.device.pool, self.device.driver, self.device.storing.stream
        if after is not None:
            driver.wait(stream, after)
        for chunk in batch.storing:
            if chunk.staged is not None:
                length = chunk.payload.payload_bytes
                chunk.payload.gather(pool.view(chunk.staged, length), stream)
                if aligned(length) > length:
                    driver.enqueue(stream, pool.view(chunk.staged, aligned(length))[length:].zero_)
        for chunk in batch.storing:
            if chunk.hot is not None:
                length = chunk.payload.payload_bytes
                source = chunk.payload.flat if chunk.staged is None else pool.view(chunk.staged, length)
                hot = self.cpu.pool.view(chunk.hot, aligned(length))
                hot[length:] = 0
                driver.copy(host_tensor(hot[:length]), source, stream)

    def _abandon(self, chunks: Sequence[_Storing]) -> None:
        for chunk in chunks:
            if chunk.hot is not None:
                self.cpu.abandon(chunk.hot, Purpose.WRITE)
            if chunk.staged is not None:
                self.staging.abandon(chunk.staged, Purpose.WRITE)

    # Get

    async def get(
        self,
        keys: Sequence[ChunkKey],
        payloads: Sequence[DevicePayload],
        after: Event | None,
        deadline_s: float,
        held: Mapping[ChunkKey, Lease] | None = None,
    ) -> int:
        """Return how many chunks of the contiguous prefix are in place. `held` is as for `Reader.deliver`.

        After a return, error or cancellation, the payloads' memory is no longer written. Raises DeviceError if a copy
        does not end within 30 s; it may still write then.
        """
        if after is not None and not await self._has_happened(after, deadline_s):
            return 0
        # Each reader estimates its own tiers; a chunk may come through either.
        waits = [wait for reader in (self._host_reader, self.reader) if (wait := reader.worth_waiting_s(keys))]
        if waits and held is None:
            deadline_s = min(deadline_s, asyncio.get_running_loop().time() + sum(waits))
        landing = _Landing(self.device, self.staging, self._gets, self._host_reader, payloads, deadline_s)
        lease_hot = or_held(self._lease_hot, held)
        return await deliver(self.cpu, keys, landing, deadline_s, lease_hot, self._fetch, self._lanes)

    def _lease_hot(self, key: ChunkKey) -> Lease | None:
        return self._host_reader.lease_now(key, counted=True) or self.reader.lease_now(key)

    async def _fetch(
        self, key: ChunkKey, deadline_s: float, parent: ChunkKey | None = None, time: int | None = None
    ) -> Lease | None:
        """Return a lease on a chunk from a device tier that has it or may have it, else from the host's cascade."""
        known = any(writer.tier.contains(key) for writer in self._device_writers)
        if known or (self._device_writers and not any(writer.tier.contains(key) for writer in self._host_writers)):
            lease = await self.reader.fetch(key, deadline_s, parent, time)
            if lease is not None:
                return lease
        return await self._host_reader.fetch(key, deadline_s, parent, time)

    async def _has_happened(self, after: Event, deadline_s: float) -> bool:
        """Return True if the caller's event happens in time. Waiting on a stream instead would block other batches."""
        driver, loop = self.device.driver, asyncio.get_running_loop()
        if driver.query(after):
            return True
        happened = self.device.callers.after(after)
        happened.add_done_callback(retrieve_exception)  # if this is cancelled or times out
        done, _ = await asyncio.wait([happened], timeout=max(0.0, deadline_s - loop.time()))
        if not done:
            return False
        happened.result()
        return True


@dataclass
class _Landing:
    """The device memory of one get. Its parts are enqueued as a whole and awaited once.

    Arena chunks with scattered destinations are copied through slots of the device pool (`staging`).
    """

    device: Device
    staging: StagingTier
    batches: asyncio.Semaphore
    reader: Reader
    payloads: Sequence[DevicePayload]
    deadline_s: float

    def part_of(self, chunks: int) -> int:
        return max(1, self.device.pool.count // 4)

    async def take(self, part: Sequence[tuple[int, Lease]], delivered: bytearray) -> None:
        device = self.device
        slots: dict[int, Slot] = {}
        copying: list[asyncio.Future[None]] = []

        def release() -> None:
            for slot in slots.values():
                self.staging.abandon(slot, Purpose.READ)
            for _, lease in part:
                lease.release()

        try:
            for position, lease in part:
                expected = self.payloads[position].payload_bytes
                if expected != lease.payload_bytes:
                    raise ValueError(f"expected a chunk of {expected} bytes, found {lease.payload_bytes}")
            await turn_by(self.deadline_s, self.batches)
            try:
                await self._take_slots(part, slots)
                views = [(position, lease.view) for position, lease in part]
                copying.append(device.run(device.loading, self._enqueue, views, slots))
                await device.ended(copying[0])
            finally:
                self.batches.release()
            for position, _ in part:
                delivered[position] = 1
        except (ValueError, LayoutError, TimeoutError) as error:
            self.reader.undelivered(error, f" to {device.driver.name}")
        finally:
            once_ended(copying, release)

    async def _take_slots(self, part: Sequence[tuple[int, Lease]], slots: dict[int, Slot]) -> None:
        """Reserve slots, by position, for host chunks with scattered destinations. Raises TimeoutError."""
        for position, lease in part:
            if not lease.on_device and self.payloads[position].flat is None:
                left_s = self.deadline_s - asyncio.get_running_loop().time()
                slot = await self.staging.reserve(Purpose.READ, left_s)
                if slot is None:
                    raise TimeoutError("no room in the device's pool by the deadline")
                slots[position] = slot

    def _enqueue(self, views: Sequence[tuple[int, np.ndarray | Tensor]], slots: Mapping[int, Slot]) -> None:
        """Enqueue copies on a worker thread."""
        driver, stream = self.device.driver, self.device.loading.stream
        for position, view in views:
            payload = self.payloads[position]
            chunk = host_tensor(view) if isinstance(view, np.ndarray) else view
            if position in slots:
                staged = self.device.pool.view(slots[position], payload.payload_bytes)
                driver.copy(staged, chunk, stream)
                chunk = staged
            payload.scatter(chunk, stream)


async def turn_by(deadline_s: float, batches: asyncio.Semaphore) -> None:
    """Acquire `batches`. Raises TimeoutError if earlier batches, whose copies may hang, do not end in time."""
    try:
        async with asyncio.timeout_at(deadline_s):
            await batches.acquire()
    except TimeoutError:
        raise TimeoutError("the copies before it did not end by the deadline") from None
