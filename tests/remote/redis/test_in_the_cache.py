"""The Redis tier in a cache, from a configuration: across processes, between tenants, with the server gone."""

from __future__ import annotations

import numpy as np

from tests.remote.redis.servers import Server
from tiercache import Config, Layout, TierCache

LAYOUT = Layout("m", chunk_tokens=16, bytes_per_token=4096)
TOKENS = list(range(16 * 8))
PAYLOADS = [np.random.default_rng(number).integers(0, 256, LAYOUT.chunk_bytes, dtype=np.uint8) for number in range(8)]


def configured(port: int, **more: object) -> Config:
    values = {"chunk_size": 16, "max_local_cpu_size": 0.004, "remote_url": f"redis://127.0.0.1:{port}"}
    return Config.load(environ={}, overrides=values | more)


async def found(config: Config) -> int:
    """Tokens that a fresh cache gets, byte for byte."""
    buffers = [np.zeros(LAYOUT.chunk_bytes, dtype=np.uint8) for _ in PAYLOADS]
    async with TierCache.open(config, LAYOUT) as cache:
        tokens = await cache.load(TOKENS, buffers)
    for buffer, payload in zip(buffers[: tokens // 16], PAYLOADS, strict=False):
        assert np.array_equal(buffer, payload)
    return tokens


async def store(config: Config) -> None:
    async with TierCache.open(config, LAYOUT) as cache:
        assert await cache.store(TOKENS, PAYLOADS) == len(PAYLOADS)
        assert (await cache.flush()).complete


async def test_chunks_come_back_in_another_process_cache(server: Server) -> None:
    await store(configured(server.port))
    assert await found(configured(server.port)) == len(TOKENS)


async def test_tenants_with_different_salts_never_see_each_others_chunks(server: Server) -> None:
    one, two = configured(server.port, tenant_salt="one"), configured(server.port, tenant_salt="two")
    await store(one)
    assert await found(two) == 0
    await store(two)
    with server.client() as client:
        assert client.dbsize() == 2 * len(PAYLOADS)
    assert await found(one) == await found(two) == len(TOKENS)


async def test_a_cache_starts_and_works_without_its_server(server: Server) -> None:
    async with TierCache.open(configured(1), LAYOUT) as cache:
        assert await cache.store(TOKENS, PAYLOADS) == len(PAYLOADS)
        buffers = [np.zeros(LAYOUT.chunk_bytes, dtype=np.uint8) for _ in PAYLOADS]
        assert await cache.load(TOKENS, buffers) == len(TOKENS)
