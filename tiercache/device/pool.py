"""A pool of device memory, cut into slots of one chunk each: a page for its header, and the payload behind it."""

from __future__ import annotations

from tiercache.core.header import HEADER_BYTES, aligned
from tiercache.device.driver import DeviceError, Driver, Span
from tiercache.errors import ConfigError
from tiercache.memory.slots import FEWEST_SLOTS, Slot


class DevicePool:
    """Taken at once from the driver. Raises ConfigError when it is larger than the free memory or too small for four chunks.

    The same interface as the arena's `SlotPool`; views are spans instead of arrays.
    """

    def __init__(self, driver: Driver, size_bytes: int, chunk_bytes: int) -> None:
        self.slot_bytes = HEADER_BYTES + aligned(chunk_bytes)
        self.count = size_bytes // self.slot_bytes
        self.driver = driver
        if self.count < FEWEST_SLOTS:
            needed = FEWEST_SLOTS * self.slot_bytes
            raise ConfigError(
                f"gds_buffer_size: {size_bytes / 2**20:.0f} MiB of device memory hold {self.count} chunks of "
                f"{chunk_bytes / 2**20:.2f} MiB; at least {FEWEST_SLOTS} are needed: set {-(-needed // 2**20)} or more"
            )
        free_bytes, total_bytes = driver.memory_bytes()
        try:
            if size_bytes > free_bytes:
                raise DeviceError("not enough free memory")
            self.memory = driver.allocate(self.count * self.slot_bytes)
        except DeviceError as error:
            raise ConfigError(
                f"gds_buffer_size: {size_bytes / 2**20:.0f} MiB asked, {free_bytes / 2**20:.0f} of "
                f"{total_bytes / 2**20:.0f} MiB of {driver.name} are free ({error}); lower it, or leave the engine less "
                "(gpu_memory_utilization)"
            ) from error
        self._free: list[Slot] = list(range(self.count - 1, -1, -1))
        self._closed = False

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> Slot | None:
        return self._free.pop() if self._free else None

    def give_back(self, slot: Slot) -> None:
        self._free.append(slot)

    def view(self, slot: Slot, length_bytes: int | None = None) -> Span:
        """The payload's room, or its first bytes. The header's page lies before it."""
        return self.memory.part(slot * self.slot_bytes + HEADER_BYTES, length_bytes or self.slot_bytes - HEADER_BYTES)

    def readable(self, slot: Slot, length_bytes: int) -> Span:
        return self.view(slot, length_bytes)

    def close(self) -> None:
        """Give the memory back. No slot may be used after. Idempotent."""
        if not self._closed:
            self._closed = True
            self._free.clear()
            self.driver.free(self.memory)
