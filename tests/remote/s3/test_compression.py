"""Compressed chunks in a bucket."""

from pathlib import Path

import obstore
import pytest

from tests.compression.contract import CompressionContract
from tests.remote.s3.conftest import settings_for
from tests.servers.s3 import S3Server
from tiercache.tiers.base import Tier
from tiercache.tiers.remote.s3 import S3Tier


class TestS3(CompressionContract):
    @pytest.fixture(autouse=True)
    def _server(self, s3_server: S3Server) -> None:
        self.server = s3_server

    async def make_tier(self, place: Path, compression: str) -> Tier:
        settings = settings_for(
            self.server.endpoint, prefix=str(place).strip("/"), compression=compression, item_bytes=2
        )
        return S3Tier(settings)

    async def damage(self, tier: Tier, key: bytes) -> None:
        assert isinstance(tier, S3Tier)
        store, path = tier.put_store, tier.path(key)
        value = bytearray((await (await obstore.get_async(store, path)).bytes_async()).to_bytes())
        value[20_000] ^= 1
        await obstore.put_async(store, path, bytes(value))
