"""One accelerator as a cache uses it: the pool, streams of its own, and events for its loop."""

from __future__ import annotations

import logging
import sys

import numpy as np

from tiercache.device.driver import DeviceError, Driver
from tiercache.device.events import EventBridge
from tiercache.device.pool import DevicePool

logger = logging.getLogger("tiercache.device")

_STAGING_SLOTS = 8


class Device:
    """Belongs to the event loop that opened it. `gather`, `offload` (to the host) and `load` (from it) are streams: a gather
    and the copies of other chunks run side by side."""

    def __init__(
        self, driver: Driver, chunk_bytes: int, pool_bytes: int | None = None, *, owns_driver: bool = False
    ) -> None:
        """`pool_bytes` None takes a few slots, for paged copies only. Allocates device memory; blocks."""
        self.driver = driver
        self._owns_driver = owns_driver
        self.pool = DevicePool(driver, pool_bytes or _STAGING_SLOTS * (chunk_bytes + 8192), chunk_bytes)
        self.gather = driver.make_stream()
        self.offload = driver.make_stream()
        self.load = driver.make_stream()
        self.has_kernels = driver.has_kernels
        self._pinned: list[np.ndarray] = []
        self.copies_block = False
        """Whether enqueuing a copy of host memory waits for it: so it is where the memory could not be pinned."""
        self.bridge: EventBridge

    def begin(self) -> None:
        """Called on the loop, once."""
        self.bridge = EventBridge(self.driver)

    def pin(self, memory: np.ndarray) -> None:
        """Lock host memory for fast copies, until `close`. Blocks for about a second for each 10 GB."""
        if self.driver.pin(memory):
            self._pinned.append(memory)
        else:
            self.copies_block = True

    def close(self, *, memory_in_use: bool = False) -> None:
        """Give everything back; memory that hung operations still use stays. Idempotent."""
        if hasattr(self, "bridge"):
            self.bridge.close()
        if memory_in_use:
            return
        try:
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
