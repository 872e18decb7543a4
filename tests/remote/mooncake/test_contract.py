"""The contract of tiers, on a real store: memory in the arena and elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.remote.mooncake.conftest import make_tier
from tests.servers.mooncake import Master
from tiercache.core.keys import ChunkKey
from tiercache.memory.arena import Arena
from tiercache.testing import TierContract
from tiercache.tiers.base import Tier

pytestmark = pytest.mark.needs("libibverbs1")


class TestMooncake(TierContract):
    """Payloads of the contract lie outside of the arena: everything takes the detour."""

    @pytest.fixture(autouse=True)
    def use(self, master: Master, client: Any) -> None:
        self.master, self.client = master, client

    async def make_tier(self, place: Path) -> Tier:
        return make_tier(self.master.url)

    async def damage(self, tier: Tier, key: ChunkKey) -> bool:
        name = f"tiercache:{key.hex()}"
        value = bytearray(self.client.get(name))
        value[17] ^= 1
        assert self.client.remove(name, True) == 0
        assert self.client.put(name, bytes(value)) == 0
        return True


class TestMooncakeInTheArena(TestMooncake):
    """The same with payloads in the arena, as the cache has them."""

    @pytest.fixture(autouse=True)
    def in_the_arena(self, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        self.arena = arena
        taken = 0

        def from_arena(length_bytes: int) -> np.ndarray:
            nonlocal taken
            padded = -(-length_bytes // 4096) * 4096
            taken += padded
            memory = arena.memory[taken - padded : taken]
            memory[:] = 0
            return memory

        monkeypatch.setattr("tiercache.testing.contract.page_aligned", from_arena)
        return

    async def make_tier(self, place: Path) -> Tier:
        tier = make_tier(self.master.url)
        tier.use_arena(self.arena)
        return tier
