"""Compressed chunks on a shared mount."""

from pathlib import Path

from tests.compression.contract import CompressionContract
from tests.remote.fs.test_fs import tier_on
from tests.tiers.test_disk import flip
from tiercache.tiers.base import Tier
from tiercache.tiers.remote.fs import FsTier


class TestFs(CompressionContract):
    async def make_tier(self, place: Path, compression: str) -> Tier:
        return tier_on(place / "a", compression=compression, item_bytes=2)

    async def damage(self, tier: Tier, key: bytes) -> None:
        assert isinstance(tier, FsTier)
        flip(Path(tier.path(key)), 4096 + 20_000)
