"""One accelerator as a cache uses it: the pool, streams of its own, and events for its loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time

import numpy as np

from tiercache.device.driver import DeviceError, Driver, Event, Stream
from tiercache.device.events import EventBridge
from tiercache.device.pool import DevicePool

logger = logging.getLogger("tiercache.device")

_STAGING_SLOTS = 8
_ATTEMPTS = 6
_FIRST_PAUSE_S = 0.05
_NEXT_THREAD_S = 0.1


class Device:
    """Belongs to the event loop that opened it. Streams: `gather` and `offload` (to the host) for what goes in, `load` (from
    the host) and `scatter` for what comes out, so that neither way waits for the other."""

    def __init__(
        self, driver: Driver, chunk_bytes: int, pool_bytes: int | None = None, *, owns_driver: bool = False
    ) -> None:
        """`pool_bytes` None takes a few slots, for paged copies only. Allocates device memory; blocks."""
        self.driver = driver
        self._owns_driver = owns_driver
        self.pool = DevicePool(driver, pool_bytes or _STAGING_SLOTS * (chunk_bytes + 8192), chunk_bytes)
        try:
            self.gather = driver.make_stream()
            self.offload = driver.make_stream()
            self.load = driver.make_stream()
            self.scatter = driver.make_stream()
        except BaseException:
            self.pool.close()
            raise
        self._waiting: list[Stream] = []
        self.unfinished = 0
        """Ends that could not be found out: what was enqueued then may still run."""
        self._pinned: list[np.ndarray] = []
        self.copies_block = False
        """Whether enqueuing a copy of host memory waits for it: so it is where the memory could not be pinned."""
        self.bridge: EventBridge

    def begin(self) -> None:
        """Called on the loop, once."""
        self.bridge = EventBridge(self.driver)

    def happened(self, event: Event) -> asyncio.Future[None]:
        """Done when an event of somebody else's stream has happened. Each wait has a stream of its own."""
        stream = self._waiting.pop() if self._waiting else self.driver.make_stream()
        self.driver.wait(stream, event)
        future = self.bridge.after(stream)

        def give_back(done: asyncio.Future[None]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._waiting.append(stream)

        future.add_done_callback(give_back)
        return future

    def follow(self, first: Stream, second: Stream) -> None:
        """Let later work on `second` begin after what is enqueued on `first`."""
        event = self.driver.record(first)
        try:
            self.driver.wait(second, event)
        finally:
            self.driver.release(event)

    def end_of(self, first: Stream, second: Stream) -> asyncio.Future[None]:
        """Done when all that is enqueued on both has ended, or the device is lost, and never before: memory that a copy may
        still touch belongs to nobody else.

        When the driver refuses to say, a thread waits for the streams, as soon as one can be started, and the future fails
        then. Where that fails as well it is never done, and `unfinished` counts it.
        """
        try:
            self.follow(first, second)
            return self.bridge.after(second)
        except DeviceError as error:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if error.lost:
                future.set_exception(error)
                return future
            self.unfinished += 1
            self._wait_in_thread(future, error, first, second)
            return future

    def _wait_in_thread(
        self, future: asyncio.Future[None], error: DeviceError, first: Stream, second: Stream
    ) -> None:
        waiting = threading.Thread(
            target=self._end_in_thread, args=(future, error, first, second), name="tiercache-device-end", daemon=True
        )
        try:
            waiting.start()
        except RuntimeError as no_thread:
            logger.warning("%s: nobody can wait for its copies now, their memory is kept: %s", self.driver.name, no_thread)
            asyncio.get_running_loop().call_later(_NEXT_THREAD_S, self._wait_in_thread, future, error, first, second)

    def _end_in_thread(
        self, future: asyncio.Future[None], error: DeviceError, first: Stream, second: Stream
    ) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                self.driver.finish(first)
                self.driver.finish(second)
                break
            except DeviceError as another:
                if another.lost:
                    break
                time.sleep(_FIRST_PAUSE_S * 2**attempt)
        else:
            logger.error("%s: refuses to say when its copies end; their memory is given up: %s", self.driver.name, error)
            return

        def ended() -> None:
            self.unfinished -= 1
            if not future.done():
                future.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.bridge.loop.call_soon_threadsafe(ended)

    def pin(self, memory: np.ndarray) -> None:
        """Lock host memory for fast copies, until `close`. Blocks for about a second for each 10 GB."""
        if self.driver.pin(memory):
            self._pinned.append(memory)
        else:
            self.copies_block = True

    def close(self) -> None:
        """Give everything back; memory that hung operations still use stays. Idempotent."""
        if hasattr(self, "bridge"):
            self.bridge.close()
        if self.unfinished:
            return
        try:
            for stream in (self.gather, self.offload, self.load, self.scatter, *self._waiting):
                self.driver.drop_stream(stream)
            for memory in self._pinned:
                self.driver.unpin(memory)
            self._pinned.clear()
            self.pool.close()
            if self._owns_driver:
                self.driver.close()
        except DeviceError as error:
            logger.warning("%s: could not give its memory back: %s", self.driver.name, error)


def gpu_in_use() -> int | None:
    """The GPU that the calling thread uses through torch; None when this process uses none yet."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_device())
