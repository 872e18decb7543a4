"""Prefetching, sessions and pins through the cache, over a real disk tier."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.test_cache import until
from tiercache import Config, Layout, TierCache
from tiercache.errors import ConfigError
from tiercache.memory.slots import Lease, Purpose

LAYOUT = Layout("m", chunk_tokens=16, bytes_per_token=4096)
TOKENS = list(range(16 * 12))


def config_of(place: Path, **more: object) -> Config:
    return Config(max_local_cpu_size=0.002, local_disk=(str(place),), max_local_disk_size=0.1, **more)  # type: ignore[arg-type]


def payload_of(number: int) -> np.ndarray:
    return np.full(LAYOUT.chunk_bytes, number, dtype=np.uint8)


@pytest.fixture
async def cache(tmp_path: Path) -> AsyncIterator[TierCache]:
    """Twelve chunks on disk and none hot."""
    async with TierCache.open(config_of(tmp_path), LAYOUT) as cache:
        await cache.store(TOKENS, [payload_of(number) for number in range(12)])
        await cache.flush()
        cache.clear_hot()
        yield cache


async def test_what_is_warmed_is_served_by_the_tier_that_it_was_read_from_and_what_is_hot_by_none(cache: TierCache) -> None:
    """Nobody has got the bytes yet."""
    keys = cache.keys(TOKENS)
    for _ in range(2):
        assert await cache.warm(keys) == 12
        assert cache.statistics().reader.hits == {"cpu": 0, "disk": 12}


async def test_without_a_hot_cache_prefetching_is_an_error(tmp_path: Path) -> None:
    async with TierCache.open(config_of(tmp_path, local_cpu=False), LAYOUT) as cache:
        with pytest.raises(ConfigError, match="prefetch: local_cpu is false"):
            cache.prefetch(TOKENS)


async def test_pinned_chunks_stay_until_they_are_unpinned(cache: TierCache) -> None:
    keys = cache.keys(TOKENS)
    await cache.warm(keys)
    for _ in range(2):  # the second time for longer
        assert cache.ahead.pin(keys) == cache.ahead.pinned == 12
    other = list(range(10_000, 10_000 + 16 * 100))
    for start in range(0, len(other), 160):
        part = other[start : start + 160]
        await cache.store(part, [payload_of(7)] * 10)
        await cache.flush()
    assert cache.lookup_hot(keys) == 12
    cache.ahead.unpin(keys)
    for start in range(0, len(other), 160):
        part = [token + 50_000 for token in other[start : start + 160]]
        await cache.store(part, [payload_of(7)] * 10)
        await cache.flush()
    assert cache.lookup_hot(keys) == 0


async def test_what_is_removed_is_kept_for_nobody(cache: TierCache) -> None:
    """Neither by a prefetch nor by a pin, whose memory would be lost to everybody until their time is over."""
    keys = cache.keys(TOKENS)
    free = cache.statistics().slots_free
    await cache.prefetch(keys[:8], ttl=600.0)
    await cache.warm(keys[8:])
    assert cache.ahead.pin(keys[4:]) == 8
    cache.clear_hot()
    assert (cache.statistics().slots_free, cache.ahead.pinned, cache.ahead.held) == (free, 0, 0)
    assert cache.ahead.pin(keys) == 0, "none is hot"
    await cache.prefetch(keys, ttl=600.0)
    await cache.forget(keys)
    assert cache.statistics().slots_free == free
    account = cache.statistics().prefetch["hints"]
    assert account.promoted_bytes == account.used_bytes + account.wasted_bytes == 20 * LAYOUT.chunk_bytes


async def test_memory_of_a_closed_cache_is_not_kept_for_a_hint_that_still_holds(tmp_path: Path) -> None:
    async def hint_and_close() -> weakref.ref[Any]:
        async with TierCache.open(config_of(tmp_path), LAYOUT) as cache:
            await cache.store(TOKENS, [payload_of(number) for number in range(12)])
            await cache.prefetch(cache.keys(TOKENS)[:1], deadline=0.0, ttl=3600.0)
        return weakref.ref(cache.cpu.pool)

    kept = await hint_and_close()
    gc.collect()
    assert kept() is None, "a timer of the loop kept its memory"


async def test_a_closed_cache_pins_nothing(tmp_path: Path) -> None:
    """Nobody would let go of it. A program that pins part by part may come after the end."""
    async with TierCache.open(config_of(tmp_path), LAYOUT) as cache:
        tokens = list(range(16 * cache.cpu.pool.count))
        await cache.store(tokens, [payload_of(1)] * cache.cpu.pool.count)
    assert cache.ahead.pin(cache.keys(tokens)) == 0
    assert (cache.ahead.pinned, any(cache.cpu.budget.held)) == (0, False)


async def test_prefetches_and_pins_share_what_they_may_take(cache: TierCache) -> None:
    """What was hot already, what was fetched and what is pinned: together no more than the share."""
    share = cache.cpu.pool.count // 2
    tokens = list(range(1000, 1000 + 16 * (share - 6)))
    await cache.store(tokens, [payload_of(1)] * (share - 6))
    await cache.flush()
    await cache.prefetch(tokens, ttl=600.0)
    handle = cache.prefetch(TOKENS, ttl=600.0)
    assert (await cache.warm(cache.keys(TOKENS)[6:])) == 6
    await until(lambda: cache.ahead.held >= share)
    assert cache.ahead.pin(cache.keys(TOKENS)) == 6, "the chunks that were held for a prefetch"
    assert cache.ahead.pinned + cache.ahead.held == share
    assert cache.cpu.budget.held[Purpose.PREFETCH] == share
    handle.cancel()


@pytest.mark.parametrize(
    "wrong",
    [{"deadline": float("nan")}, {"deadline": float("inf")}, {"ttl": float("nan")}, {"ttl": -1.0}, {"priority": "a"}],
)
async def test_what_is_no_time_or_priority_is_refused(cache: TierCache, wrong: dict[str, float]) -> None:
    with pytest.raises((ValueError, TypeError)):
        cache.prefetch(TOKENS, **wrong)  # type: ignore[arg-type]
    assert (await cache.prefetch(TOKENS, deadline=-1.0)).promoted == 12, "and hurts no other prefetch"


async def test_pin_for_a_time_that_is_no_number_is_refused(cache: TierCache) -> None:
    await cache.warm(cache.keys(TOKENS))
    for ttl_s in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="ttl_s: expected a number of seconds"):
            cache.ahead.pin(cache.keys(TOKENS), ttl_s)
    assert cache.ahead.pinned == 0


async def test_chunk_that_is_removed_as_soon_as_it_has_come_is_not_kept(cache: TierCache) -> None:
    free = cache.statistics().slots_free
    keys = cache.keys(TOKENS)[:1]
    arrived = cache.cpu.publish

    def publish(*arguments: Any) -> Lease:
        lease = arrived(*arguments)
        asyncio.get_running_loop().call_soon(cache.clear_hot)  # before the prefetcher hears of it
        return lease

    cache.cpu.publish = publish  # type: ignore[method-assign]
    await cache.prefetch(keys, ttl=600.0)
    await until(lambda: not cache.ahead._reads)
    assert (cache.statistics().slots_free, cache.ahead.held) == (free, 0)
    assert cache.statistics().prefetch["hints"].wasted_bytes == LAYOUT.chunk_bytes


async def test_handle_that_has_ended_keeps_no_keys() -> None:
    """A program may keep thousands of handles, and reads only their progress."""
    async with TierCache.open(Config(max_local_cpu_size=0.002), LAYOUT) as cache:
        tracemalloc.start()
        try:
            handles = []
            for number in range(200):
                handle = cache.prefetch(list(range(number, number + 16 * 512)), ttl=1.0)
                assert (await handle).missing == 512
                handles.append(handle)
            assert tracemalloc.get_traced_memory()[0] < 3 << 20
        finally:
            tracemalloc.stop()
        assert [handle.progress.asked for handle in handles] == [512] * 200


async def test_prefetches_that_are_too_many_to_look_for_are_cancelled() -> None:
    async with TierCache.open(Config(max_local_cpu_size=0.002), LAYOUT) as cache:
        handles = [cache.prefetch(list(range(number, number + 16 * 8192))) for number in range(40)]
        found = [await handle for handle in handles]
        assert found[0].missing == 8192 and found[-1].cancelled == 8192
