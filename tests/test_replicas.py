"""Ranks that hold the same bytes: each chunk is written once to the tiers that they share, and found by all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tiercache import Config, Layout, TierCache
from tiercache.core.keys import keys_from_hashes

CHUNK_BYTES = 16384
HASHES = [bytes([number]) * 32 for number in range(32)]


def layout_of(rank: int, world_size: int, replicas: int) -> Layout:
    return Layout("m", chunk_tokens=64, bytes_per_token=256, rank=rank, world_size=world_size, replicas=replicas)


@asynccontextmanager
async def ranks(directory: Path, world_size: int, replicas: int) -> AsyncIterator[list[TierCache]]:
    overrides = {"max_local_cpu_size": 0.01, "local_disk": str(directory), "max_local_disk_size": 0.1}
    config = Config.load(environ={}, overrides=overrides)
    async with AsyncExitStack() as caches:
        yield [
            await caches.enter_async_context(TierCache.open(config, layout_of(rank, world_size, replicas)))
            for rank in range(world_size)
        ]


def keys_of(cache: TierCache) -> list[bytes]:
    return keys_from_hashes(cache.namespace, HASHES)


async def put_everywhere(caches: Sequence[TierCache]) -> None:
    for cache in caches:
        assert await cache.put_many(keys_of(cache), payloads()) == len(HASHES)
    for cache in caches:
        assert (await cache.flush(30)).complete
        cache.clear_hot()


async def gets_everything(cache: TierCache) -> bool:
    found = [np.zeros(CHUNK_BYTES, np.uint8) for _ in HASHES]
    return await cache.get_into(keys_of(cache), found) == len(HASHES) and all(map(np.array_equal, found, payloads()))


def payloads() -> list[np.ndarray]:
    return [np.full(CHUNK_BYTES, number + 1, np.uint8) for number in range(len(HASHES))]


def written(cache: TierCache) -> int:
    return cache.statistics().tiers["disk"].writes


@pytest.mark.parametrize(("world_size", "replicas"), [(2, 2), (4, 2)])
async def test_each_chunk_is_written_once_and_every_rank_has_a_part(tmp_path: Path, world_size: int, replicas: int) -> None:
    async with ranks(tmp_path, world_size, replicas) as caches:
        await put_everywhere(caches)
        for shard in range(world_size // replicas):
            parts = [written(cache) for cache in caches[shard * replicas : (shard + 1) * replicas]]
            assert sum(parts) == len(HASHES)
            assert all(parts)
        for cache in caches:
            assert (await cache.lookup_keys(keys_of(cache))).by_tier == {"cpu": 0, "disk": len(HASHES)}
            assert await gets_everything(cache)


async def test_a_rank_alone_finds_what_several_wrote_and_the_other_way_round(tmp_path: Path) -> None:
    async with ranks(tmp_path / "two", 2, 2) as caches:
        await put_everywhere(caches)
    async with ranks(tmp_path / "two", 1, 1) as (alone,):
        assert await gets_everything(alone)
    async with ranks(tmp_path / "one", 1, 1) as caches:
        await put_everywhere(caches)
    async with ranks(tmp_path / "one", 2, 2) as caches:
        assert [await gets_everything(cache) for cache in caches] == [True, True]


async def test_what_every_rank_forgets_is_gone_and_can_be_stored_again(tmp_path: Path) -> None:
    async with ranks(tmp_path, 2, 2) as caches:
        await put_everywhere(caches)
        for cache in caches:
            await cache.forget(keys_of(cache))
        assert [(await cache.lookup_keys(keys_of(cache))).chunks for cache in caches] == [0, 0]
        await put_everywhere(caches)
        assert [await gets_everything(cache) for cache in caches] == [True, True]
