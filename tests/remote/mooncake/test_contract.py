"""The contract of tiers, on a real store."""

from pathlib import Path
from typing import Any

import pytest

from tests.remote.mooncake.conftest import make_tier
from tests.servers.mooncake import Master
from tiercache.core.keys import ChunkKey
from tiercache.testing import TierContract
from tiercache.tiers.base import Tier

pytestmark = pytest.mark.needs("libibverbs1")


class TestMooncake(TierContract):
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
