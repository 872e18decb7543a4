"""The contract of tiers, on a real store, and the tier in a cache, from a configuration as LMCache's users have it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.remote.in_the_cache import chunks_come_back, works_without_its_server
from tests.remote.mooncake.conftest import make_tier
from tests.servers.mooncake import Master
from tiercache import Config
from tiercache.core.keys import ChunkKey
from tiercache.testing import TierContract
from tiercache.tiers.base import Tier
from tiercache.tiers.remote.mooncake import MooncakeTier

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


def configured(path: Path, url: str) -> Config:
    settings = {
        "chunk_size": 16,
        "local_cpu": True,
        "max_local_cpu_size": 0.004,
        "remote_url": url,
        "extra_config": {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "mooncake_protocol": "tcp",
            "mooncake_global_segment_size": 0,
            "mooncake_local_buffer_size": 16 << 20,
            "mooncake_prefer_local_alloc": True,
            "transfer_timeout": 1,
        },
    }
    (path / "lmcache.yaml").write_text(yaml.safe_dump(settings))
    return Config.load(path / "lmcache.yaml", environ={})


async def test_chunks_come_back_in_another_cache(tmp_path: Path, master: Master) -> None:
    for tier in await chunks_come_back(configured(tmp_path, f"{master.url}/?device=mlx5_0")):
        assert isinstance(tier, MooncakeTier)


async def test_a_cache_starts_and_works_without_its_store(tmp_path: Path) -> None:
    await works_without_its_server(configured(tmp_path, Master(tmp_path).url))
