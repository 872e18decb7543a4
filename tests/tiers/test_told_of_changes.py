"""`Tier.tell` reports every change of a tier's chunks, also changes by other processes."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.test_disk import fill, opened, scanned
from tiercache.core.keys import ChunkKey
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.memory.slots import WRITE, SlotPool
from tiercache.memory.workers import Workers
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.base import Tier
from tiercache.tiers.cpu import CpuTier

SOON_S = 30.0


class Followed:
    """What a tier has by its own word alone."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.has: set[ChunkKey] = set()
        self._news = asyncio.Event()
        tier.tell(self._look)

    def _look(self, key: ChunkKey) -> None:
        if self.tier.contains(key):
            self.has.add(key)
        else:
            self.has.discard(key)
        self._news.set()

    async def comes_to(self, numbers: set[int]) -> None:
        wanted = keys(*numbers)
        async with asyncio.timeout(SOON_S):
            while self.has != wanted:
                await self._news.wait()
                self._news.clear()


def keys(*numbers: int) -> set[ChunkKey]:
    return {chunk(number)[0] for number in numbers}


async def test_hot_cache_tells_of_what_comes_is_evicted_and_removed() -> None:
    arena = Arena(ArenaSettings(size_bytes=4 * CHUNK_BYTES))
    copiers = Workers("copy", 1)
    tier = CpuTier(SlotPool(arena, CHUNK_BYTES), copiers)
    await tier.open()
    followed = Followed(tier)
    numbers = range(tier.pool.count + 2)
    for number in numbers:
        key, payload = chunk(number)
        slot = tier.try_reserve(WRITE)
        assert slot is not None
        np.copyto(tier.pool.view(slot, CHUNK_BYTES), payload)
        tier.publish(key, slot, CHUNK_BYTES, WRITE).release()
        assert followed.has == {key for key in keys(*numbers) if tier.contains(key)}
    assert len(followed.has) == tier.pool.count
    kept = set(followed.has)
    tier.forget(max(kept))
    assert followed.has == kept - {max(kept)}
    assert tier.clear() == len(kept) - 1
    assert followed.has == set()
    await tier.close()
    copiers.close()
    arena.close()


async def test_disk_tells_of_its_own_evictions(tmp_path: Path) -> None:
    async with scanned(tmp_path, cap_chunks=4) as tier:
        followed = Followed(tier)
        await fill(tier, range(12))
        assert 0 < len(followed.has) < 12
        assert followed.has == {key for key in keys(*range(12)) if tier.contains(key)}
        await tier.remove(chunk(11)[0])
        assert chunk(11)[0] not in followed.has


@pytest.mark.parametrize("how", ["deleted", "moved", "moved with its parent"])
async def test_disk_hears_of_changes_in_the_directory_that_took_the_place_of_a_lost_one(tmp_path: Path, how: str) -> None:
    place = tmp_path / "host" / "kv"
    place.mkdir(parents=True)
    async with opened(place) as tier, opened(tmp_path / "other") as unconcerned:
        followed = Followed(tier)
        await fill(tier, range(4))
        await fill(unconcerned, range(4))
        Path(tier.path(chunk(3)[0])).unlink()
        await followed.comes_to({0, 1, 2})
        if how == "deleted":
            shutil.rmtree(place)
            await followed.comes_to(set())
        else:
            (place if how == "moved" else place.parent).rename(tmp_path / "away")
            place.mkdir(parents=True)
        await fill(tier, range(4, 8))
        await followed.comes_to({4, 5, 6, 7})
        Path(tier.path(chunk(5)[0])).unlink()
        await followed.comes_to({4, 6, 7})
