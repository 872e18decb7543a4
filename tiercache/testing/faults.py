"""Tiers that misbehave on command. They are real tiers: what they store, they store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from tiercache.core.keys import ChunkKey
from tiercache.device.driver import Span
from tiercache.tiers.base import DeviceTier, Tier, TierStatistics, Traits


class MemoryTier(Tier):
    """The smallest tier that keeps the contract: a dictionary. For tests of what lies above a tier."""

    def __init__(self, name: str = "memory", traits: Traits | None = None) -> None:
        self.name = name
        self.traits = traits or Traits()
        self.chunks: dict[ChunkKey, bytes] = {}
        self.counters = TierStatistics()

    async def open(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close."""

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


class FaultyTier(DeviceTier):
    """Any tier, with faults in front of it.

    `fail_reads` / `fail_writes` are exceptions to raise, one an operation, before the tier is asked. `gate`, while it is
    not set, holds every operation back (a hung device); `entered` counts operations that have begun.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.name = tier.name
        self.traits = tier.traits
        self.fail_reads: list[BaseException] = []
        self.fail_writes: list[BaseException] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = 0
        self._arrived = asyncio.Condition()

    async def until_entered(self, operations: int) -> None:
        """Wait until so many operations have begun."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self.entered >= operations)

    async def open(self) -> None:
        await self.tier.open()

    async def close(self) -> None:
        await self.tier.close()

    def contains(self, key: ChunkKey) -> bool:
        return self.tier.contains(key)

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        await self._enter()
        return await self.tier.probe(keys)

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        await self._enter()
        if self.fail_reads:
            raise self.fail_reads.pop(0)
        return await self.tier.read(key, into)

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        await self._enter()
        if self.fail_writes:
            raise self.fail_writes.pop(0)
        return await self.tier.write(key, payload, payload_bytes)

    @property
    def serves_device(self) -> bool:
        return isinstance(self.tier, DeviceTier) and self.tier.serves_device

    async def read_device(self, key: ChunkKey, into: Span) -> int | None:
        assert isinstance(self.tier, DeviceTier)
        await self._enter()
        if self.fail_reads:
            raise self.fail_reads.pop(0)
        return await self.tier.read_device(key, into)

    async def write_device(self, key: ChunkKey, payload: Span, payload_bytes: int) -> bool:
        assert isinstance(self.tier, DeviceTier)
        await self._enter()
        if self.fail_writes:
            raise self.fail_writes.pop(0)
        return await self.tier.write_device(key, payload, payload_bytes)

    async def remove(self, key: ChunkKey) -> bool:
        return await self.tier.remove(key)

    def statistics(self) -> TierStatistics:
        return self.tier.statistics()

    async def _enter(self) -> None:
        self.entered += 1
        async with self._arrived:
            self._arrived.notify_all()
        await self.gate.wait()
