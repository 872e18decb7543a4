"""Tiers with controllable faults. They are real tiers that store their chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from tiercache.core.keys import ChunkKey
from tiercache.device.driver import Tensor
from tiercache.testing.wrapped import WrappedTier
from tiercache.tiers.base import Tier, TierStatistics, Traits


class MemoryTier(Tier):
    """The smallest tier that satisfies the contract: a dictionary. For tests of the layers above a tier."""

    def __init__(self, name: str = "memory", traits: Traits | None = None) -> None:
        self.name = name
        self.traits = traits or Traits()
        self.chunks: dict[ChunkKey, bytes] = {}
        self.counters = TierStatistics()

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    def contains(self, key: ChunkKey) -> bool:
        return key in self.chunks

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        stored = self.chunks.get(key)
        if stored is None:
            self.counters.read_misses += 1
            return None
        into[: len(stored)] = np.frombuffer(stored, dtype=np.uint8)
        self.counters.reads += 1
        self.counters.read_bytes += len(stored)
        return len(stored)

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        if key not in self.chunks:
            self.chunks[key] = payload[:payload_bytes].tobytes()
            self.counters.writes += 1
            self.counters.written_bytes += payload_bytes
        return True

    async def remove(self, key: ChunkKey) -> bool:
        return self.chunks.pop(key, None) is not None

    def statistics(self) -> TierStatistics:
        counters = TierStatistics(**vars(self.counters))
        counters.resident = len(self.chunks)
        counters.occupied_bytes = sum(map(len, self.chunks.values()))
        return counters


class FaultyTier(WrappedTier):
    """A tier with faults in front of it.

    `fail_reads` / `fail_writes` are exceptions to raise, one per operation, before the tier is called. `gate`, while it
    is not set, blocks probes, reads and writes, like a hung device; `entered` counts those that have begun.
    """

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self.fail_reads: list[BaseException] = []
        self.fail_writes: list[BaseException] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = 0
        self._arrived = asyncio.Condition()

    async def until_entered(self, operations: int) -> None:
        """Wait until `operations` operations have begun."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self.entered >= operations)

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        await self._enter([])
        return await super().probe(keys)

    async def probe_each(self, keys: Sequence[ChunkKey]) -> list[bool]:
        await self._enter([])
        return await super().probe_each(keys)

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        await self._enter(self.fail_reads)
        return await super().read(key, into)

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        await self._enter(self.fail_writes)
        return await super().write(key, payload, payload_bytes)

    async def read_device(self, key: ChunkKey, into: Tensor) -> int | None:
        await self._enter(self.fail_reads)
        return await super().read_device(key, into)

    async def write_device(self, key: ChunkKey, payload: Tensor, payload_bytes: int) -> bool:
        await self._enter(self.fail_writes)
        return await super().write_device(key, payload, payload_bytes)

    async def _enter(self, failures: list[BaseException]) -> None:
        self.entered += 1
        async with self._arrived:
            self._arrived.notify_all()
        await self.gate.wait()
        if failures:
            raise failures.pop(0)
