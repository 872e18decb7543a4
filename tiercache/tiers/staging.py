"""Chunks on their way between device memory and device tiers: the CPU tier's code over slots of device memory.

A chunk is resident while it is leased and can be read meanwhile, so a chunk in a write queue is not a miss.
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
        """Copy a chunk to host memory. Returns its length; None if it is not resident."""
        lease = self.lease(key)
        if lease is None:
            self._statistics.read_misses += 1
            return None
        with lease:
            device, lane, host = self.device, self.device.storing, host_tensor(into[: lease.payload_bytes])
            await device.ended(device.run(lane, device.driver.copy, host, lease.view, lane.stream))
            return lease.payload_bytes

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        """Decline: chunks come from device memory only."""
        return False
