"""How chunks in device memory get into the cache and out of it.

A put gathers chunks into slots of device memory and copies them on to the arena, as far as anybody wants them there;
tiers that write from device memory get a lease on the slot. A get takes each chunk from where it is nearest: the arena, a
slot that is still being written, a device tier, and only then the host's cascade. Whole batches are enqueued on streams and
awaited once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tiercache.core.budget import Purpose
from tiercache.core.header import aligned
from tiercache.core.keys import ChunkKey
from tiercache.core.patience import Patience
from tiercache.core.under_way import Passage
from tiercache.device.device import Device
from tiercache.device.driver import DeviceError, Event, Span, Stream
from tiercache.device.payloads import DevicePayload
from tiercache.errors import LayoutError
from tiercache.memory.slots import Slot
from tiercache.memory.workers import look_away, to_the_end
from tiercache.scheduler.fan_out import FanOut
from tiercache.scheduler.reader import Reader, prefix_of
from tiercache.scheduler.together import all_or_none
from tiercache.tiers.base import DeviceTier, Tier
from tiercache.tiers.cpu import CpuTier, Lease
from tiercache.tiers.staging import StagingTier

logger = logging.getLogger("tiercache.device")

T = TypeVar("T")

_BATCH_BYTES = 64 << 20
_BATCHES_AT_ONCE = 2
_LONGEST_COPY_S = 30.0


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
    there: int = 0
    """Chunks that the cache has already."""


class DevicePath:
    """All methods belong to the event loop. Deadlines are loop times in seconds."""

    def __init__(
        self, device: Device, cpu: CpuTier, staging: StagingTier, host_reader: Reader, device_reader: Reader, fan_out: FanOut
    ) -> None:
        self.device = device
        self.cpu = cpu
        self.staging = staging
        self.skipped = 0
        self._host_reader = host_reader
        self._device_reader = device_reader
        self._fan_out = fan_out
        self._puts = asyncio.Semaphore(_BATCHES_AT_ONCE)
        self._gets = asyncio.Semaphore(_BATCHES_AT_ONCE)
        tiers = [writer.tier for writer in fan_out.writers]
        self._device_tiers = [tier for tier in tiers if _serves_device(tier)]
        self._host_tiers = [tier for tier in tiers if not _serves_device(tier)]
        self._lanes = 2 + max([2, *(tier.traits.read_concurrency for tier in tiers)])

    # Putting

    async def put(
        self, chunks: Sequence[tuple[ChunkKey, DevicePayload]], after: Event | None, deadline_s: float
    ) -> int:
        """Returns how many of the chunks are in the cache (hot, or on their way to a device tier) when their memory may be
        changed again. Cancelled, it stores nothing more, and nothing reads their memory when CancelledError comes out."""
        pool = self.device.pool
        size = max(1, min(pool.count // 4, self.cpu.pool.count // 4, _BATCH_BYTES // pool.slot_bytes))
        patience = Patience(deadline_s)
        # The staging tier's too: a chunk is forgotten in both at the same time.
        passage = self.cpu.under_way.begin([key for key, _ in chunks])
        try:
            tasks = [
                asyncio.ensure_future(self._put_batch(chunks[start : start + size], passage, after, patience))
                for start in range(0, len(chunks), size)
            ]
            await all_or_none(tasks)
        finally:
            self.cpu.under_way.end(passage)
        return sum(task.result() for task in tasks)

    async def _put_batch(
        self,
        chunks: Sequence[tuple[ChunkKey, DevicePayload]],
        passage: Passage,
        after: Event | None,
        patience: Patience,
    ) -> int:
        batch = _Batch()
        done: asyncio.Future[None] | None = None
        try:
            await _by(patience.deadline_s, self._puts)
        except TimeoutError:
            self.skipped += len(chunks)
            return 0
        try:
            try:
                for key, payload in chunks:
                    if not passage.forgot(key):
                        await self._admit(key, payload, batch, patience.deadline_s)
                if batch.storing:
                    try:
                        await self._enqueue_put(batch, after)
                    finally:
                        # Also what was enqueued before something failed reads the caller's memory.
                        done = self.device.end_of(self.device.gather, self.device.offload)
                        await self._copied(done)
            except BaseException:
                _when_done(done, batch.storing, self._abandon)
                for lease in batch.leases:
                    lease.release()
                raise
        finally:
            self._puts.release()
        forgotten = [chunk for chunk in batch.storing if passage.forgot(chunk.key)]
        for chunk in forgotten:
            self._abandon(chunk)
            batch.storing.remove(chunk)
        for chunk in batch.storing:
            length = chunk.payload.payload_bytes
            if chunk.hot is not None:
                batch.leases.append(self.cpu.publish(chunk.key, chunk.hot, length, Purpose.WRITE))
            if chunk.staged is not None:
                batch.leases.append(self.staging.publish(chunk.key, chunk.staged, length, Purpose.WRITE))
        stored = batch.there + len(batch.storing)
        await self._fan_out.offer(batch.leases, self._lease_for, patience)
        return stored

    async def _admit(self, key: ChunkKey, payload: DevicePayload, batch: _Batch, deadline_s: float) -> None:
        """Slots for a chunk where it is wanted and is not yet. Where none comes free in time it is skipped, and counted."""
        lease = self.cpu.lease(key, writes=True) or self.staging.lease(key, writes=True)
        if lease is not None:
            self.cpu.touch([key])
            batch.leases.append(lease)
            batch.there += 1
            return
        wants_host = self.cpu.keep or any(not _stores(tier, key) for tier in self._host_tiers)
        wants_device = any(not _stores(tier, key) for tier in self._device_tiers)
        if not wants_host and not wants_device:
            batch.there += 1
            return
        loop = asyncio.get_running_loop()
        chunk = _Storing(key, payload)
        # A chunk in one piece can go to the host without a slot; device tiers then write from the host's copy.
        must_stage = payload.span is None or not wants_host
        try:
            if wants_device or must_stage:
                chunk.staged = self.staging.try_reserve(Purpose.WRITE)
                if chunk.staged is None and must_stage:
                    chunk.staged = await self.staging.reserve(Purpose.WRITE, deadline_s - loop.time())
                    if chunk.staged is None:
                        self.skipped += 1
                        return
            if wants_host:
                chunk.hot = self.cpu.try_reserve(Purpose.WRITE)
                if chunk.hot is None:
                    chunk.hot = await self.cpu.reserve(Purpose.WRITE, deadline_s - loop.time())
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
                await self._run(chunk.payload, chunk.payload.gather, source, device.gather)
                if padding := aligned(length) - length:
                    driver.fill(source.address + length, 0, padding, device.gather)
            if chunk.hot is not None:
                assert source is not None
                if chunk.staged is not None:
                    device.follow(device.gather, device.offload)
                hot = self.cpu.pool.view(chunk.hot, aligned(length))
                hot[length:] = 0
                await self._copy(hot.ctypes.data, source.address, length, device.offload)

    def _abandon(self, chunk: _Storing) -> None:
        if chunk.hot is not None:
            self.cpu.abandon(chunk.hot, Purpose.WRITE)
        if chunk.staged is not None:
            self.staging.abandon(chunk.staged, Purpose.WRITE)

    def _lease_for(self, key: ChunkKey, tier: Tier) -> Lease | None:
        staged = self.staging.lease(key, writes=True) if _serves_device(tier) else None
        return staged or self.cpu.lease(key, writes=True)

    # Getting

    async def get(
        self, keys: Sequence[ChunkKey], payloads: Sequence[DevicePayload], after: Event | None, deadline_s: float
    ) -> int:
        """Returns how many chunks of the contiguous prefix are in place. Nothing writes to the payloads' memory when this
        has returned or raised - but for a device that does not finish a copy within 30 s, which DeviceError says."""
        if after is not None and not await self._has_happened(after, deadline_s):
            return 0
        delivered = bytearray(len(keys))
        self.cpu.touch_prefix(keys)
        hot = {
            position: lease
            for position, key in enumerate(keys)
            if (lease := self._lease_now(key, noted=True)) is not None
        }
        size = max(1, self.device.pool.count // 4)
        positions = list(hot)
        work = [
            asyncio.ensure_future(
                self._hand_over_hot(positions[start : start + size], hot, payloads, delivered, deadline_s)
            )
            for start in range(0, len(positions), size)
        ]
        if len(hot) < len(keys):
            cold = iter([position for position in range(len(keys)) if position not in hot])
            gap = [len(keys)]
            work += [
                asyncio.ensure_future(self._lane(cold, keys, payloads, delivered, gap, deadline_s))
                for _ in range(min(self._lanes, len(keys) - len(hot)))
            ]
        try:
            await all_or_none(work)
        finally:
            for lease in hot.values():
                lease.release()
        return prefix_of(delivered)

    async def _has_happened(self, after: Event, deadline_s: float) -> bool:
        """Whether the caller's event came in time. Awaited here and not on the streams, where it would hold up others."""
        driver, loop = self.device.driver, asyncio.get_running_loop()
        if driver.query(after):
            return True
        happened = self.device.happened(after)
        done, _ = await asyncio.wait([happened], timeout=max(0.0, deadline_s - loop.time()))
        if not done:
            happened.add_done_callback(look_away)
            return False
        happened.result()
        return True

    async def _hand_over_hot(
        self,
        positions: Sequence[int],
        hot: dict[int, Lease],
        payloads: Sequence[DevicePayload],
        delivered: bytearray,
        deadline_s: float,
    ) -> None:
        """Takes the leases over once it runs: what is cancelled before stays in `hot`."""
        part = [(position, hot.pop(position)) for position in positions]
        await self._hand_over(part, payloads, delivered, deadline_s)

    def _lease_now(self, key: ChunkKey, *, noted: bool = False) -> Lease | None:
        return self._host_reader.lease_now(key, noted=noted) or self._device_reader.lease_now(key)

    async def _lane(
        self,
        positions: Iterator[int],
        keys: Sequence[ChunkKey],
        payloads: Sequence[DevicePayload],
        delivered: bytearray,
        gap: list[int],
        deadline_s: float,
    ) -> None:
        """Take one position after the other until a gap makes the rest worthless."""
        for position in positions:
            if position > gap[0]:
                return
            lease = await self._fetch(keys[position], deadline_s)
            if lease is not None:
                await self._hand_over([(position, lease)], payloads, delivered, deadline_s)
            if not delivered[position]:
                gap[0] = min(gap[0], position)

    async def _fetch(self, key: ChunkKey, deadline_s: float) -> Lease | None:
        known = any(tier.contains(key) for tier in self._device_tiers)
        if known or (self._device_tiers and not any(tier.contains(key) for tier in self._host_tiers)):
            lease = await self._device_reader.fetch(key, deadline_s)
            if lease is not None:
                return lease
        return await self._host_reader.fetch(key, deadline_s)

    async def _hand_over(
        self,
        part: Sequence[tuple[int, Lease]],
        payloads: Sequence[DevicePayload],
        delivered: bytearray,
        deadline_s: float,
    ) -> None:
        """Copy chunks to where they are wanted, and release their leases when that is done."""
        rooms: list[Slot] = []
        done: asyncio.Future[None] | None = None
        try:
            await _by(deadline_s, self._gets)
            try:
                try:
                    for position, lease in part:
                        await self._enqueue_get(lease, payloads[position], rooms, deadline_s)
                finally:
                    # Also what was enqueued before something failed writes to the caller's memory.
                    done = self.device.end_of(self.device.load, self.device.scatter)
                    await self._copied(done)
            finally:
                self._gets.release()
            for position, _ in part:
                delivered[position] = 1
        except (ValueError, LayoutError, TimeoutError) as error:
            self._host_reader.counters.sink_failures += 1
            logger.warning("a chunk could not be delivered to %s: %s", self.device.driver.name, error)
        finally:
            _when_done(done, rooms, lambda room: self.staging.abandon(room, Purpose.READ))
            _when_done(done, part, lambda item: item[1].release())

    async def _enqueue_get(
        self, lease: Lease, payload: DevicePayload, rooms: list[Slot], deadline_s: float
    ) -> None:
        device = self.device
        view = lease.view
        length = lease.payload_bytes
        if payload.payload_bytes != length:
            raise ValueError(f"expected a chunk of {payload.payload_bytes} bytes, found {length}")
        if isinstance(view, Span):
            await self._run(payload, payload.scatter, view, device.scatter)
        elif payload.span is not None:
            await self._copy(payload.span.address, view.ctypes.data, length, device.load)
        else:
            room = self.staging.try_reserve(Purpose.READ)
            if room is None:
                room = await self.staging.reserve(Purpose.READ, deadline_s - asyncio.get_running_loop().time())
            if room is None:
                raise TimeoutError("no room in the device's pool by the deadline")
            rooms.append(room)
            staged = device.pool.view(room, length)
            await self._copy(staged.address, view.ctypes.data, length, device.load)
            device.follow(device.load, device.scatter)
            await self._run(payload, payload.scatter, staged, device.scatter)

    async def _run(
        self, payload: DevicePayload, enqueue: Callable[[Span, Stream], None], chunk: Span, stream: Stream
    ) -> None:
        if payload.takes_long:
            await to_the_end(self.cpu.copiers.submit(enqueue, chunk, stream))
        else:
            enqueue(chunk, stream)

    async def _copy(self, destination: int, source: int, length: int, stream: Stream) -> None:
        """Enqueue a copy between host and device; in a thread where that waits for the copy."""
        copy = self.device.driver.copy
        if self.device.copies_block:
            await to_the_end(self.cpu.copiers.submit(copy, destination, source, length, stream))
        else:
            copy(destination, source, length, stream)

    async def _copied(self, done: asyncio.Future[None]) -> None:
        """Until what is enqueued has ended. Cancellation waits for it too: it touches the caller's memory."""
        done.add_done_callback(look_away)  # nobody does who was cancelled meanwhile
        await to_the_end(asyncio.ensure_future(asyncio.wait([done], timeout=_LONGEST_COPY_S)), _LONGEST_COPY_S)
        if not done.done():
            raise DeviceError(
                f"{self.device.driver.name}: a copy did not end within {_LONGEST_COPY_S:.0f} s; its memory is still in use"
            )
        done.result()


async def _by(deadline_s: float, places: asyncio.Semaphore) -> None:
    """One of the places. Raises TimeoutError when those before us, whose copies may hang, do not leave one in time."""
    try:
        async with asyncio.timeout_at(deadline_s):
            await places.acquire()
    except TimeoutError:
        raise TimeoutError("the copies before it did not end by the deadline") from None


def _serves_device(tier: Tier) -> bool:
    return isinstance(tier, DeviceTier) and tier.serves_device


def _stores(tier: Tier, key: ChunkKey) -> bool:
    """Whether it knows that it has `key`, and not only until it is removed."""
    return tier.contains(key) and not tier.traffic.refuses(key)


def _when_done(done: asyncio.Future[None] | None, items: Sequence[T], give_back: Callable[[T], None]) -> None:
    """Give back now, or when `done` is: what a device still copies to or from belongs to nobody else."""
    if done is None or done.done():
        for item in items:
            give_back(item)
    else:
        done.add_done_callback(lambda _: _when_done(None, items, give_back))
