"""Arenas in shared memory, of several ranks that have one configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.others import running
from tiercache import Config, Layout, TierCache
from tiercache.errors import ConfigError

LAYOUTS = [Layout("m", chunk_tokens=16, bytes_per_token=4096, rank=rank, world_size=2) for rank in (0, 1)]

RANK = """
import asyncio, sys
from tiercache import Config, Layout, TierCache
async def main():
    layout = Layout("m", chunk_tokens=16, bytes_per_token=4096, rank=int(sys.argv[2]), world_size=2)
    async with TierCache.open(Config(max_local_cpu_size=0.002, shm_name=sys.argv[1]), layout) as cache:
        key, = cache.keys(list(range(16)))
        assert await cache.put(key, bytes([layout.rank]) * layout.chunk_bytes)
        print("ready", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-ranks-{os.getpid()}"
    yield name
    assert not entries(name), "left in /dev/shm"


def entries(name: str) -> list[str]:
    return sorted(path.name for path in Path("/dev/shm").glob(f"tiercache.{name}*"))


async def test_each_rank_has_an_arena_of_its_own(name: str) -> None:
    config = Config(max_local_cpu_size=0.002, shm_name=name)
    async with TierCache.open(config, LAYOUTS[0]) as first, TierCache.open(config, LAYOUTS[1]) as second:
        assert entries(name) == [f"tiercache.{name}.0", f"tiercache.{name}.1"]
        for rank, cache in enumerate((first, second)):
            assert await cache.put(b"k" * 24, bytes([rank]) * LAYOUTS[0].chunk_bytes)
        for rank, cache in enumerate((first, second)):
            async with cache.get(b"k" * 24) as lease:
                assert lease is not None and bytes(lease.view[:4]) == bytes([rank]) * 4
        with pytest.raises(ConfigError, match="in use by a living process"):
            async with TierCache.open(config, LAYOUTS[0]):
                pass
    async with TierCache.open(config, Layout("m", chunk_tokens=16, bytes_per_token=4096)):
        assert entries(name) == [f"tiercache.{name}"], "a single one"


async def test_what_killed_ranks_left_goes_with_the_next_start(name: str) -> None:
    async with running("-c", RANK, name, 0) as first, running("-c", RANK, name, 1) as second:
        assert entries(name) == [f"tiercache.{name}.0", f"tiercache.{name}.1"]
        for rank in (first, second):
            await rank.kill()  # any later start may remove the arena of a killed process
    async with TierCache.open(Config(max_local_cpu_size=0.002, shm_name=name), LAYOUTS[1]) as cache:
        assert entries(name) == [f"tiercache.{name}.1"]
        key, = cache.keys(list(range(16)))  # fmt: skip
        async with cache.get(key) as lease:
            assert lease is None, "bytes of a dead process mean nothing"
