"""The Mooncake tier in a cache, from a configuration as LMCache's users have it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.servers.mooncake import Master
from tiercache import Config, Layout, TierCache
from tiercache.tiers.remote.mooncake import MooncakeTier

pytestmark = pytest.mark.needs("libibverbs1")

LAYOUT = Layout("m", chunk_tokens=16, bytes_per_token=4096)


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


async def test_chunks_come_back_in_another_cache_without_a_detour(tmp_path: Path, master: Master) -> None:
    tokens = list(range(16 * 8))
    payloads = [np.random.default_rng(n).integers(0, 256, LAYOUT.chunk_bytes, dtype=np.uint8) for n in range(8)]
    config = configured(tmp_path, f"{master.url}/?device=mlx5_0")
    async with TierCache.open(config, LAYOUT) as cache:
        assert await cache.store(tokens, payloads) == 8
        assert (await cache.flush()).complete
        (tier,) = cache.tiers
        assert isinstance(tier, MooncakeTier) and tier.statistics().writes == 8
        assert not tier._memory._detour.any()
    async with TierCache.open(config, LAYOUT) as cache:
        buffers = [np.zeros(LAYOUT.chunk_bytes, dtype=np.uint8) for _ in payloads]
        assert await cache.load(tokens, buffers) == len(tokens)
        for buffer, payload in zip(buffers, payloads, strict=True):
            assert np.array_equal(buffer, payload)
        (tier,) = cache.tiers
        assert isinstance(tier, MooncakeTier) and tier.statistics().reads == 8
        assert not tier._memory._detour.any()


async def test_a_cache_starts_and_works_without_its_store(tmp_path: Path) -> None:
    tokens = list(range(16))
    payload = np.ones(LAYOUT.chunk_bytes, dtype=np.uint8)
    async with TierCache.open(configured(tmp_path, Master(tmp_path).url), LAYOUT) as cache:
        assert await cache.store(tokens, [payload]) == 1
        buffer = np.zeros_like(payload)
        assert await cache.load(tokens, [buffer]) == 16 and buffer.all()
