"""A program of an embedder; type-checked and run against the installed wheel."""

import asyncio
from typing import assert_type

import numpy as np

import tiercache
from tiercache.config import explain


async def main() -> None:
    config = tiercache.Config.load(overrides={"max_local_cpu_size": 0.1})
    assert_type(config, tiercache.Config)
    layout = tiercache.Layout("my-model", chunk_tokens=256, bytes_per_token=64)
    async with tiercache.TierCache.open(config, layout) as cache:
        assert_type(cache, tiercache.TierCache)
        tokens = list(range(512))
        assert_type(await cache.store(tokens, [np.ones(layout.chunk_bytes, np.uint8)] * 2), int)
        assert_type(await cache.lookup(tokens), tiercache.Hit)
        keys = cache.keys(tokens)
        assert_type(keys, list[tiercache.ChunkKey])
        async with cache.get(keys[0]) as lease:
            assert_type(lease, tiercache.Lease | None)
            assert lease is not None and lease.view.nbytes == layout.chunk_bytes
        assert_type((await cache.prefetch(tokens, deadline=2.0, priority=0, ttl=60)).promoted, int)
        assert_type(await cache.flush(), tiercache.FlushReport)
        assert_type(cache.statistics(), tiercache.Statistics)
    print([tier.name for tier in explain(config).tiers])


asyncio.run(main())
