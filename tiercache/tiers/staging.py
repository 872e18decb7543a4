"""Chunks on their way between device memory and device tiers: the CPU tier's code over slots of device memory.

A chunk is here while somebody has a lease on it, and can be read meanwhile: what a queue has still to write is not a miss.
"""

from __future__ import annotations

import numpy as np

from tiercache.core.keys import ChunkKey
from tiercache.device.device import Device
from tiercache.device.driver import host_tensor
from tiercache.memory.workers import Workers
from tiercache.tiers.cpu import CpuTier


class StagingTier(CpuTier):
    name = "device"
    on_device = True

    def __init__(self, device: Device, copiers: Workers) -> None:
        super().__init__(device.pool, copiers, keep=False)
        self.device = device

    def describe(self) -> str:
        pool = self.device.pool
        return f"device ({pool.count * pool.slot_bytes / 2**20:.0f} MiB of {self.device.driver.name} in {pool.count} slots)"

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        """Into host memory, for whoever wants a chunk there before its tier has it."""
        lease = self.lease(key)
        if lease is None:
            self._statistics.read_misses += 1
            return None
        with lease:
            device, lane, host = self.device, self.device.storing, host_tensor(into[: lease.payload_bytes])
            await device.ended(device.run(lane, device.driver.copy, host, lease.view, lane.stream))
            return lease.payload_bytes

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        """Nothing is put here from the host."""
        return False
