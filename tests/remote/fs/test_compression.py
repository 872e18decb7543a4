"""Compressed chunks on a shared mount."""

from pathlib import Path

from tests.compression.contract import CompressionContract
from tests.remote.fs.test_fs import tier_on
from tiercache.tiers.base import Tier
from tiercache.tiers.remote.fs import FsTier


class TestFs(CompressionContract):
    async def make_tier(self, place: Path, compression: str) -> Tier:
        return tier_on(place / "a", compression=compression, item_bytes=2)

    async def damage(self, tier: Tier, key: bytes) -> None:
        assert isinstance(tier, FsTier)
        with open(tier.path(key), "r+b") as file:
            file.seek(4096 + 20_000)
            byte = file.read(1)
            file.seek(4096 + 20_000)
            file.write(bytes([byte[0] ^ 1]))
