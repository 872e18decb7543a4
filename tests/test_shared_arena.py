"""Arenas in shared memory, of several ranks that have one configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercache import Config, Layout, TierCache
from tiercache.errors import ConfigError

LAYOUTS = [Layout("m", chunk_tokens=16, bytes_per_token=4096, rank=rank, world_size=2) for rank in (0, 1)]

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
