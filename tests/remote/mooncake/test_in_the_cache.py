"""The Mooncake tier in a cache, from a configuration as LMCache's users have it."""

from pathlib import Path

import pytest
import yaml

from tests.remote.in_the_cache import chunks_come_back, works_without_its_server
from tests.servers.mooncake import Master
from tiercache import Config
from tiercache.tiers.remote.mooncake import MooncakeTier

pytestmark = pytest.mark.needs("libibverbs1")


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
