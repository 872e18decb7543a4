"""The 3FS tier against the contract of all tiers."""

from pathlib import Path

import pytest

from tests.hf3fs.tier.conftest import make_tier
from tests.hf3fs_emulator import Hf3fsEmulator
from tests.tiers.test_contract import limits
from tests.tiers.test_disk import flip
from tiercache.core.keys import ChunkKey
from tiercache.testing import TierContract
from tiercache.tiers.base import Tier
from tiercache.tiers.hf3fs import Hf3fsTier


class TestHf3fsTier(TierContract):
    spread = 1

    @pytest.fixture(autouse=True)
    def _mounted(self, emulator: Hf3fsEmulator, place: Path) -> None:
        self.place = place

    async def make_tier(self, place: Path) -> Tier:
        return make_tier(*(self.place / str(number) for number in range(self.spread)))

    async def make_capped(self, place: Path, chunks: int, tenant_chunks: int = 0) -> Tier | None:
        return make_tier(self.place / "capped", **limits(chunks, tenant_chunks))

    async def damage(self, tier: Tier, key: ChunkKey) -> bool:
        assert isinstance(tier, Hf3fsTier)
        flip(Path(tier.path(key)), 4096 + 17)
        return True


class TestHf3fsTierOverThreePaths(TestHf3fsTier):
    spread = 3
