"""The S3 tier in a cache, from a configuration as LMCache's users have it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.servers.s3 import BUCKET, KEY, SECRET, S3Server
from tiercache import Config, Layout, TierCache


def configured(path: Path, server: S3Server, **more: object) -> Config:
    settings = {
        "chunk_size": 16,
        "local_cpu": True,
        "max_local_cpu_size": 0.004,
        "remote_url": f"s3://{BUCKET}.127.0.0.1:{server.port}/{path.name}",
        "extra_config": {
            "s3_region": "us-east-1",
            "s3_num_io_threads": 64,
            "disable_tls": True,
            "aws_access_key_id": KEY,
            "aws_secret_access_key": SECRET,
        },
    } | more
    (path / "lmcache.yaml").write_text(yaml.safe_dump(settings))
    return Config.load(path / "lmcache.yaml", environ={})


async def test_chunks_come_back_in_another_process_cache(
    tmp_path: Path, s3_server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    layout = Layout("m", chunk_tokens=16, bytes_per_token=4096)
    tokens = list(range(16 * 8))
    payloads = [
        np.random.default_rng(number).integers(0, 256, layout.chunk_bytes, dtype=np.uint8) for number in range(8)
    ]
    config = configured(tmp_path, s3_server)
    async with TierCache.open(config, layout) as cache:
        assert await cache.store(tokens, payloads) == 8
        assert (await cache.flush()).complete
        assert [tier.name for tier in cache.tiers] == ["s3"]
        assert cache.tiers[0].statistics().writes == 8
    async with TierCache.open(config, layout) as cache:
        buffers = [np.zeros(layout.chunk_bytes, dtype=np.uint8) for _ in payloads]
        assert await cache.load(tokens, buffers) == len(tokens)
        for buffer, payload in zip(buffers, payloads, strict=True):
            assert np.array_equal(buffer, payload)
        assert cache.tiers[0].statistics().reads == 8
    assert SECRET not in caplog.text
