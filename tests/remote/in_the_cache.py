"""A remote tier in a cache: what one cache stores another one finds, and a cache works without its server."""

import numpy as np

from tiercache import Config, Layout, TierCache
from tiercache.tiers.base import Tier

LAYOUT = Layout("m", chunk_tokens=16, bytes_per_token=4096)
TOKENS = list(range(16 * 8))
PAYLOADS = [np.random.default_rng(number).integers(0, 256, LAYOUT.chunk_bytes, dtype=np.uint8) for number in range(8)]


async def loads_all(cache: TierCache) -> bool:
    buffers = [np.zeros(LAYOUT.chunk_bytes, dtype=np.uint8) for _ in PAYLOADS]
    return await cache.load(TOKENS, buffers) == len(TOKENS) and all(map(np.array_equal, buffers, PAYLOADS))


async def chunks_come_back(config: Config) -> tuple[Tier, Tier]:
    """Store with one cache and load with another. Return the tier of each."""
    async with TierCache.open(config, LAYOUT) as cache:
        assert await cache.store(TOKENS, PAYLOADS) == len(PAYLOADS)
        assert (await cache.flush()).complete
        (writer,) = cache.tiers
        assert writer.statistics().writes == len(PAYLOADS)
    async with TierCache.open(config, LAYOUT) as cache:
        assert await loads_all(cache)
        (reader,) = cache.tiers
        assert reader.statistics().reads == len(PAYLOADS)
    return writer, reader


async def works_without_its_server(config: Config) -> None:
    async with TierCache.open(config, LAYOUT) as cache:
        assert await cache.store(TOKENS, PAYLOADS) == len(PAYLOADS)
        assert await loads_all(cache)
