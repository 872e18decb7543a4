"""Chunks on their way between device memory and device tiers: the CPU tier's code over slots of device memory.

A chunk is here while somebody has a lease on it, and can be read meanwhile: what a queue has still to write is not a miss.
"""

from __future__ import annotations

import numpy as np

from tiercache.core.keys import ChunkKey
from tiercache.device.device import Device
from tiercache.memory.workers import Workers, wait_shielded
from tiercache.tiers.cpu import CpuTier


class StagingTier(CpuTier):
    name = "device"
    on_device = True

    def __init__(self, device: Device, copiers: Workers) -> None:
        super().__init__(device.pool, copiers, keep=False)
        self.device = device

    def describe(self) -> str:
        pool = self.device.pool
        return f"device ({pool.memory.length_bytes / 2**20:.0f} MiB of {self.device.driver.name} in {pool.count} slots)"

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        """Into host memory, for whoever wants a chunk there before its tier has it."""
        lease = self.lease(key)
        if lease is None:
            self._statistics.read_misses += 1
            return None
        with lease:
            span = lease.view
            device, stream = self.device, self.device.offload
            arguments = (into.ctypes.data, span.address, span.length_bytes, stream)
            try:
                if device.copies_block:
                    await wait_shielded(self.copiers.submit(device.driver.copy, *arguments))
                else:
                    device.driver.copy(*arguments)
            finally:
                await wait_shielded(device.end_of(device.gather, stream))
            return int(span.length_bytes)

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        """Nothing is put here from the host."""
        return False
