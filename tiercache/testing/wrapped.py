"""A tier in front of another tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tiercache.core.keys import ChunkKey
from tiercache.device.driver import Tensor
from tiercache.memory.arena import Arena
from tiercache.tiers.base import DeviceTier, Tier, TierStatistics


class WrappedTier(DeviceTier):
    """Forwards calls to `tier`. A subclass overrides `probe_each` together with `probe`."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.name = tier.name
        self.traits = tier.traits
        self.reads, self.writes, self.patience_s = tier.reads, tier.writes, tier.patience_s
        self.open_s = tier.open_s
        self.admission = tier.admission

    @property
    def serves_device(self) -> bool:
        return self.tier.serves_device

    @property
    def capacity_bytes(self) -> int:
        return self.tier.capacity_bytes

    def use_arena(self, arena: Arena) -> None:
        self.tier.use_arena(arena)

    def load_library(self) -> None:
        self.tier.load_library()

    def take_over(self, before: Tier) -> None:
        super().take_over(before)
        self.tier.take_over(before.tier if isinstance(before, WrappedTier) else before)

    async def open(self) -> None:
        self.tier.reads, self.tier.writes, self.tier.patience_s = self.reads, self.writes, self.patience_s
        await self.tier.open()
        self.traits = self.tier.traits

    async def close(self) -> None:
        await self.tier.close()

    def describe(self) -> str:
        return self.tier.describe()

    def contains(self, key: ChunkKey) -> bool:
        return self.tier.contains(key)

    def tell(self, on_change: Callable[[ChunkKey], None]) -> None:
        self.tier.tell(on_change)

    def prefix(self, keys: Sequence[ChunkKey]) -> int:
        return self.tier.prefix(keys)

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        return await self.tier.probe(keys)

    async def probe_each(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return await self.tier.probe_each(keys)

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        return await self.tier.read(key, into)

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        return await self.tier.write(key, payload, payload_bytes)

    async def read_device(self, key: ChunkKey, into: Tensor) -> int | None:
        assert isinstance(self.tier, DeviceTier)
        return await self.tier.read_device(key, into)

    async def write_device(self, key: ChunkKey, payload: Tensor, payload_bytes: int) -> bool:
        assert isinstance(self.tier, DeviceTier)
        return await self.tier.write_device(key, payload, payload_bytes)

    def used(self, keys: Sequence[ChunkKey]) -> Sequence[ChunkKey]:
        return self.tier.used(keys)

    def continued(self, keys: Sequence[ChunkKey]) -> None:
        self.tier.continued(keys)

    async def remove(self, key: ChunkKey) -> bool:
        return await self.tier.remove(key)

    def statistics(self) -> TierStatistics:
        return self.tier.statistics()
