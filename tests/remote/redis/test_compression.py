"""Compressed chunks on a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compression.contract import CompressionContract
from tests.remote.redis.servers import Server
from tests.remote.redis.tiers import make_tier
from tiercache.tiers.base import Tier

pytestmark = pytest.mark.needs("redis-server")


class TestRedis(CompressionContract):
    @pytest.fixture(autouse=True)
    def use(self, server: Server) -> None:
        self.server = server

    async def make_tier(self, place: Path, compression: str) -> Tier:
        url = f"redis://127.0.0.1:{self.server.port}"
        return make_tier(url, compression=compression, item_bytes=2)

    async def damage(self, tier: Tier, key: bytes) -> None:
        with self.server.client() as client:
            client.setrange(f"tiercache:{key.hex()}", 20_000, b"damaged!")
