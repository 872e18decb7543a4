"""Requests that wait in an engine's queue: what they need is fetched ahead, the first one's first, and never too much."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from tests.test_cache import CHUNK_BYTES, LAYOUT, configured, key, only_below, payload, until_hot
from tiercache import TierCache
from tiercache.core.keys import ChunkKey

REQUESTS = [[key(10 * request + number) for number in range(6)] for request in range(20)]
"""120 chunks; 32 fit into the hot cache."""
SHARE = 0.5


@pytest.fixture
async def cache(tmp_path: Path) -> AsyncIterator[TierCache]:
    """All of the requests' chunks are on disk and none is hot."""
    async with TierCache.open(configured(tmp_path, queue_wait_s=30.0, prefetch_share=SHARE), LAYOUT) as cache:
        for keys in REQUESTS:
            assert await cache.put_many(keys, [payload(number) for number in range(6)]) == 6
        await only_below(cache)
        yield cache
    assert not any(cache.cpu.budget.held)


async def until_quiet(cache: TierCache) -> None:
    """No read is under way any more, and none begins."""
    async with asyncio.timeout(10.0):
        while True:
            before = cache.statistics().reader.hits["disk"]
            await asyncio.sleep(0.2)
            if cache.statistics().reader.hits["disk"] == before:
                return


async def read(cache: TierCache, keys: list[ChunkKey]) -> None:
    buffers = [np.zeros(CHUNK_BYTES, np.uint8) for _ in keys]
    assert await cache.get_into(keys, buffers) == len(keys)
    assert all(np.array_equal(buffer, payload(number)) for number, buffer in enumerate(buffers))


async def test_long_queue_fetches_within_the_share_and_each_request_finds_its_chunks_hot(cache: TierCache) -> None:
    for keys in REQUESTS:
        cache.warm_soon(keys)
    await until_quiet(cache)
    assert cache.statistics().reader.hits["disk"] <= SHARE * cache.cpu.pool.count
    for keys in REQUESTS[:8]:
        await until_hot(cache, keys)
        await read(cache, keys)
    assert cache.statistics().prefetch["queue"].wasted_bytes == 0


async def test_hot_chunks_of_the_first_in_the_queue_are_not_evicted_for_those_behind_it(cache: TierCache) -> None:
    await cache.warm(REQUESTS[0])
    for keys in REQUESTS:
        cache.warm_soon(keys)
    await until_quiet(cache)
    assert cache.lookup_hot(REQUESTS[0]) == 6


async def test_what_is_remembered_of_a_queue_has_a_bound_and_room_comes_back(cache: TierCache) -> None:
    for _ in range(50):
        for keys in REQUESTS:
            cache.warm_soon(keys)
    assert cache.ahead.plan.keys_of["queue"] < 5 * SHARE * cache.cpu.pool.count
    for keys in REQUESTS:
        await read(cache, keys)
    await until_quiet(cache)
    cache.clear_hot()
    cache.warm_soon(REQUESTS[-1])
    await until_hot(cache, REQUESTS[-1])


async def test_who_was_served_before_anything_was_fetched_ahead_is_waited_for_no_longer(tmp_path: Path) -> None:
    async with TierCache.open(configured(tmp_path, prefetch_bytes_per_s=CHUNK_BYTES / 100), LAYOUT) as cache:
        for keys in REQUESTS[:2]:
            assert await cache.put_many(keys, [payload(number) for number in range(6)]) == 6
        await only_below(cache)
        for keys in REQUESTS[:2]:
            cache.warm_soon(keys)  # one chunk of the first, then nothing for 100 s
        await read(cache, REQUESTS[0])
        assert not cache.ahead.plan.has("queue", REQUESTS[0][-1])
        assert cache.ahead.plan.has("queue", REQUESTS[1][-1])
