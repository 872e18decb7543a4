"""Copies to and from device memory: enqueued on streams, awaited together; nobody else gets their memory before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tiercache.core.budget import Purpose
from tiercache.device.device import Device
from tiercache.device.driver import DeviceError, Span, Stream
from tiercache.device.payloads import DevicePayload
from tiercache.errors import LayoutError
from tiercache.memory.slots import Slot
from tiercache.memory.workers import Workers, retrieve_exception, wait_shielded
from tiercache.scheduler.undelivered import Undelivered
from tiercache.tiers.leases import Lease
from tiercache.tiers.staging import StagingTier

T = TypeVar("T")

_LONGEST_COPY_S = 30.0


class DeviceCopies:
    """`copiers` are for what would keep the event loop."""

    def __init__(self, device: Device, copiers: Workers) -> None:
        self.device = device
        self._copiers = copiers

    async def run(
        self, payload: DevicePayload, enqueue: Callable[[Span, Stream], None], chunk: Span, stream: Stream
    ) -> None:
        """Have a payload enqueue its gather or scatter."""
        if payload.takes_long:
            await wait_shielded(self._copiers.submit(enqueue, chunk, stream))
        else:
            enqueue(chunk, stream)

    async def copy(self, destination: int, source: int, length: int, stream: Stream) -> None:
        """Enqueue a copy between host and device; in a thread where that waits for the copy."""
        copy = self.device.driver.copy
        if self.device.copies_block:
            await wait_shielded(self._copiers.submit(copy, destination, source, length, stream))
        else:
            copy(destination, source, length, stream)

    async def ended(self, done: asyncio.Future[None]) -> None:
        """Until what is enqueued has ended (`Device.end_of`). Cancellation waits for it too: it touches the caller's memory.
        Raises DeviceError after 30 s."""
        done.add_done_callback(retrieve_exception)  # for whoever was cancelled meanwhile
        await wait_shielded(asyncio.ensure_future(asyncio.wait([done], timeout=_LONGEST_COPY_S)), _LONGEST_COPY_S)
        if not done.done():
            raise DeviceError(
                f"{self.device.driver.name}: a copy did not end within {_LONGEST_COPY_S:.0f} s; its memory is still in use"
            )
        done.result()


@dataclass
class DeviceLanding:
    """Of one batch: its parts are enqueued as a whole and awaited once. What has to be scattered and lies in the arena gets
    a room in the pool on its way (`staging`)."""

    copies: DeviceCopies
    staging: StagingTier
    batches: asyncio.Semaphore
    undelivered: Undelivered
    payloads: Sequence[DevicePayload]
    deadline_s: float

    def part_of(self, chunks: int) -> int:
        return max(1, self.staging.pool.count // 4)

    async def take(self, part: Sequence[tuple[int, Lease]], delivered: bytearray) -> None:
        device = self.copies.device
        rooms: list[Slot] = []
        done: asyncio.Future[None] | None = None
        try:
            await turn_by(self.deadline_s, self.batches)
            try:
                try:
                    for position, lease in part:
                        await self._enqueue(lease, self.payloads[position], rooms)
                finally:
                    # Also what was enqueued before something failed writes to the caller's memory.
                    done = device.end_of(device.load, device.scatter)
                    await self.copies.ended(done)
            finally:
                self.batches.release()
            for position, _ in part:
                delivered[position] = 1
        except (ValueError, LayoutError, TimeoutError) as error:
            self.undelivered.note(error, f" to {device.driver.name}")
        finally:
            when_done(done, rooms, lambda room: self.staging.abandon(room, Purpose.READ))
            when_done(done, part, lambda item: item[1].release())

    async def _enqueue(self, lease: Lease, payload: DevicePayload, rooms: list[Slot]) -> None:
        copies, device = self.copies, self.copies.device
        view = lease.view
        length = lease.payload_bytes
        if payload.payload_bytes != length:
            raise ValueError(f"expected a chunk of {payload.payload_bytes} bytes, found {length}")
        if isinstance(view, Span):
            await copies.run(payload, payload.scatter, view, device.scatter)
        elif payload.span is not None:
            await copies.copy(payload.span.address, view.ctypes.data, length, device.load)
        else:
            left_s = self.deadline_s - asyncio.get_running_loop().time()
            room = await self.staging.reserve(Purpose.READ, left_s)
            if room is None:
                raise TimeoutError("no room in the device's pool by the deadline")
            rooms.append(room)
            staged = device.pool.view(room, length)
            await copies.copy(staged.address, view.ctypes.data, length, device.load)
            device.follow(device.load, device.scatter)
            await copies.run(payload, payload.scatter, staged, device.scatter)


async def turn_by(deadline_s: float, batches: asyncio.Semaphore) -> None:
    """Raises TimeoutError when those before us, whose copies may hang, do not leave us one in time."""
    try:
        async with asyncio.timeout_at(deadline_s):
            await batches.acquire()
    except TimeoutError:
        raise TimeoutError("the copies before it did not end by the deadline") from None


def when_done(done: asyncio.Future[None] | None, items: Sequence[T], give_back: Callable[[T], None]) -> None:
    """Give back now, or when `done` is: what a device still copies to or from belongs to nobody else."""
    if done is None or done.done():
        for item in items:
            give_back(item)
    else:
        done.add_done_callback(lambda _: when_done(None, items, give_back))
