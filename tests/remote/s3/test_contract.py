"""The S3 tier against the contract, and the one of compressed chunks, on a real store."""

from pathlib import Path

import obstore
import pytest

from tests.compression.contract import CompressionContract
from tests.remote.s3.conftest import settings_for
from tests.servers.s3 import S3Server
from tiercache.core.keys import ChunkKey
from tiercache.testing import TierContract
from tiercache.tiers.base import Tier
from tiercache.tiers.remote.s3 import S3Tier


async def flip(tier: Tier, key: ChunkKey, at: int) -> None:
    """Flip a bit of the chunk's object."""
    assert isinstance(tier, S3Tier)
    store, path = tier.put_store, tier.path(key)
    value = bytearray((await (await obstore.get_async(store, path)).bytes_async()).to_bytes())
    value[at] ^= 1
    await obstore.put_async(store, path, bytes(value))


class TestS3Tier(TierContract):
    options: dict[str, object] = {}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _server(self, s3_server: S3Server) -> None:
        self.server = s3_server

    async def make_tier(self, place: Path) -> Tier:
        return S3Tier(settings_for(self.server.endpoint, prefix=str(place).strip("/"), **self.options))

    async def damage(self, tier: Tier, key: ChunkKey) -> bool:
        await flip(tier, key, 88 + 17)
        return True


class TestS3TierInParts(TestS3Tier):
    options = {"part_bytes": 10_000}  # noqa: RUF012


class TestCompressed(CompressionContract):
    @pytest.fixture(autouse=True)
    def _server(self, s3_server: S3Server) -> None:
        self.server = s3_server

    async def make_tier(self, place: Path, compression: str) -> Tier:
        options = {"prefix": str(place).strip("/"), "compression": compression, "item_bytes": 2}
        return S3Tier(settings_for(self.server.endpoint, **options))

    async def damage(self, tier: Tier, key: bytes) -> None:
        await flip(tier, key, 20_000)
