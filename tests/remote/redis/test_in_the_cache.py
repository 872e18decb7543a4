"""The Redis tier in a cache, from a configuration: across processes, between tenants, with the server gone."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from tests.remote.redis.servers import Server
from tiercache import Config, Layout, TierCache

pytestmark = pytest.mark.needs("redis-server")

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


@pytest.mark.parametrize("where", ["in an answer", "in the greeting"])
async def test_closing_on_a_hung_server_gives_the_memory_back(tmp_path: Path, where: str) -> None:
    """A read hangs in its thread; closing the sockets ends it, so nobody uses the arena any more."""
    server = Server(tmp_path).start().ready()
    name = f"test-{os.getpid()}-hung"
    config = configured(server.port, shm_name=name, request_timeout=60.0)
    arena = Path(f"/dev/shm/tiercache.{name}")
    cache = TierCache(config, LAYOUT)
    try:
        await cache.start()
        assert await cache.store(TOKENS, PAYLOADS) == len(PAYLOADS)
        assert (await cache.flush()).complete
        keys = cache.keys(TOKENS)
        await cache.forget(keys[:1])
        if where == "in the greeting":
            with server.client() as client:
                client.client_kill_filter(_type="normal", skipme=True)
        server.freeze()
        assert not await cache.get_into(
            [b"\1" * len(keys[0])], [np.zeros(LAYOUT.chunk_bytes, np.uint8)], deadline_s=0.3
        )
        assert cache.statistics().stuck
        assert arena.exists()
        began_s = asyncio.get_running_loop().time()
        await cache.close(0.2)
        assert asyncio.get_running_loop().time() - began_s < 3.0
        assert not arena.exists(), "mapped for good"
    finally:
        server.thaw()
        server.kill()
