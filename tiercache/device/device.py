"""An accelerator: a pool of device memory, a stream for each direction, and futures for the end of their work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from tiercache.core.header import HEADER_BYTES, aligned
from tiercache.device.driver import Driver, Event, Stream, Tensor
from tiercache.errors import ConfigError, DeviceError, TierUnavailable
from tiercache.memory.slots import FEWEST_SLOTS, Pool, Slot
from tiercache.memory.workers import Workers, retrieve_exception, wait_shielded

logger = logging.getLogger("tiercache.device")

LONGEST_COPY_S = 30.0
"""Timeout of a copy in seconds. Its caller then gets a DeviceError, and the memory stays reserved."""
_STAGING_SLOTS = 8
_ENQUEUING_THREADS = 2


class Lane:
    """A stream, and a thread that waits for its events.

    Events of a stream happen in their order, so one thread that waits for the oldest serves them all.
    """

    def __init__(self, driver: Driver, name: str) -> None:
        self._driver = driver
        self.stream = driver.make_stream()
        self._waits = Workers(f"{driver.name}-{name}", 1)
        try:
            self._waits.start_thread()  # not at the first event, whose copy has begun by then
        except TierUnavailable as error:
            raise ConfigError(f"device: {error}") from error

    def end(self) -> asyncio.Future[None]:
        """Return a future for the end of all work given to the stream so far.

        It is done when that work has ended, or the device is lost (DeviceError), and never before: memory that a copy
        may still use must not be reused. Cancelling the future cancels nothing on the device.
        """
        try:
            event = self._driver.record(self.stream)
        except DeviceError:
            return self._wait(self._driver.finish, self.stream)
        return self.after(event)

    def after(self, event: Event) -> asyncio.Future[None]:
        """Return a future that is done when `event`, of any stream, has happened. It waits for earlier futures first."""
        try:
            if self._driver.query(event):
                future = asyncio.get_running_loop().create_future()
                future.set_result(None)
                return future
        except DeviceError:
            pass  # the thread reports it
        return self._wait(self._driver.synchronize, event)

    def close(self) -> None:
        """Let the thread end after its current waits. Does not wait."""
        self._waits.close()

    def _wait(self, wait: Callable[[Any], None], until: Event | Stream) -> asyncio.Future[None]:
        """Call `wait(until)` in the thread."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ended(work: asyncio.Future[None]) -> None:
            error = work.exception()
            if error is None or (isinstance(error, DeviceError) and error.lost):
                settle(future, error)
            else:
                logger.error("%s: does not report the end of copies; their memory is given up: %s", self._driver.name, error)

        self._waits.submit(wait, until).add_done_callback(ended)
        return future


def settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


class DevicePool(Pool):
    """Device memory cut into slots of a chunk each: a page for its header, followed by the payload. Views are uint8[n]
    tensors.

    Allocated at once. Raises ConfigError if it is larger than the free memory or too small for four chunks.
    """

    def __init__(self, driver: Driver, size_bytes: int, chunk_bytes: int) -> None:
        slot_bytes = HEADER_BYTES + aligned(chunk_bytes)
        super().__init__(size_bytes // slot_bytes, slot_bytes)
        if self.count < FEWEST_SLOTS:
            needed = FEWEST_SLOTS * slot_bytes
            raise ConfigError(
                f"gds_buffer_size: {size_bytes / 2**20:.0f} MiB of device memory hold {self.count} chunks of "
                f"{chunk_bytes / 2**20:.2f} MiB; at least {FEWEST_SLOTS} are needed: set {-(-needed // 2**20)} or more"
            )
        free_bytes, total_bytes = driver.memory_bytes()
        try:
            if size_bytes > free_bytes:
                raise DeviceError("not enough free memory")
            self.memory = driver.empty(self.count * slot_bytes)
        except DeviceError as error:
            raise ConfigError(
                f"gds_buffer_size: {size_bytes / 2**20:.0f} MiB asked, {free_bytes / 2**20:.0f} of "
                f"{total_bytes / 2**20:.0f} MiB of {driver.name} are free ({error}); lower it, or leave the engine less "
                "(gpu_memory_utilization)"
            ) from error

    def view(self, slot: Slot, length_bytes: int | None = None) -> Tensor:
        """Return the payload's memory, or its first bytes. The header's page is before it."""
        start = slot * self.slot_bytes + HEADER_BYTES
        return self.memory[start : start + (length_bytes or self.slot_bytes - HEADER_BYTES)]

    def readable(self, slot: Slot, length_bytes: int) -> Tensor:
        return self.view(slot, length_bytes)

    def close(self) -> None:
        super().close()
        self.memory = None


class Device:
    """A device, bound to the event loop that uses it first.

    `storing` is the lane of puts (gather, then copy to the host), `loading` is the lane of gets (copy from the host,
    then scatter); `callers` waits for events of callers' streams. torch operations run in `workers`: they hold the GIL
    briefly, and may block if a stream's queue is full.
    """

    def __init__(self, driver: Driver, chunk_bytes: int, pool_bytes: int | None = None) -> None:
        """Allocate device memory; blocks. `pool_bytes` None means a few slots, for paged copies only."""
        self.driver = driver
        self.pool = DevicePool(driver, pool_bytes or _STAGING_SLOTS * (chunk_bytes + 8192), chunk_bytes)
        self.workers = Workers("device", _ENQUEUING_THREADS)
        self.unfinished = 0
        """Number of abandoned copies, which may still run and whose memory is kept."""
        self.in_flight = 0
        """Number of copies that have not ended."""
        self._closed = False
        self._pinned: list[np.ndarray] = []
        self._lanes: list[Lane] = []
        try:
            self.storing = self._lane("store")
            self.loading = self._lane("load")
            self.callers = self._lane("callers")
        except BaseException:
            self.close()
            raise

    def run(self, lane: Lane, enqueue: Callable[..., object], *arguments: Any) -> asyncio.Future[None]:
        """Call `enqueue(*arguments)`, which enqueues work on the lane's stream, in a worker thread.

        The future is done when the call has returned or raised and all enqueued work has ended. It has the exception of
        either.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        work = self.workers.submit(enqueue, *arguments)

        def enqueued(work: asyncio.Future[object]) -> None:
            error = work.exception()
            lane.end().add_done_callback(lambda end: settle(done, end.exception() or error))

        work.add_done_callback(enqueued)
        self.in_flight += 1
        done.add_done_callback(self._copied)
        return done

    async def ended(self, done: asyncio.Future[None]) -> None:
        """Wait for a future of `run`. A cancelled caller waits as well, since the work uses its memory.

        Raises DeviceError after 30 s; the work counts as unfinished until it ends.
        """
        done.add_done_callback(retrieve_exception)  # if the caller is cancelled meanwhile
        try:
            await wait_shielded(asyncio.ensure_future(asyncio.wait([done], timeout=LONGEST_COPY_S)))
        finally:
            if not done.done():
                self.unfinished += 1
                done.add_done_callback(self._finished)
        if not done.done():
            raise DeviceError(
                f"{self.driver.name}: a copy did not end within {LONGEST_COPY_S:.0f} s; its memory is still in use"
            )
        done.result()

    def pin(self, memory: np.ndarray, slot_bytes: int) -> None:
        """Lock host memory for fast copies, until `close`. Blocks for about a second for each 10 GB."""
        if self.driver.pin(memory, slot_bytes):
            self._pinned.append(memory)

    def close(self) -> None:
        """Release everything once no copy is in flight: the copies' memory stays pinned and mapped until then.

        Idempotent.
        """
        self._closed = True
        if self.in_flight:
            logger.warning("%s: %d copies are abandoned; their memory stays", self.driver.name, self.in_flight)
            return
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()
        self.workers.close()
        try:
            while self._pinned:
                self.driver.unpin(self._pinned.pop())
        except DeviceError as error:
            logger.warning("%s: could not give its memory back: %s", self.driver.name, error)
        self.pool.close()

    def _lane(self, name: str) -> Lane:
        lane = Lane(self.driver, name)
        self._lanes.append(lane)
        return lane

    def _copied(self, done: asyncio.Future[None]) -> None:
        self.in_flight -= 1
        if self._closed and not self.in_flight:
            self.close()

    def _finished(self, done: asyncio.Future[None]) -> None:
        self.unfinished -= 1
