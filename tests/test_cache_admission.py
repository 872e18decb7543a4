"""What reaches the disk when not everything does."""

from pathlib import Path

import numpy as np

from tests.test_cache import CHUNK_BYTES, key, only_below, opened, payload
from tiercache import TierCache


async def got(cache: TierCache, number: int) -> bool:
    into = np.zeros(CHUNK_BYTES, np.uint8)
    return await cache.get_into([key(number)], [into]) == 1


async def test_second_touch_writes_a_hot_chunk_when_it_is_read_again(tmp_path: Path) -> None:
    async with opened(tmp_path, flash_admission="second_touch") as cache:
        (disk,) = cache.tiers
        await cache.put(key(1), payload(1))
        await cache.put(key(2), payload(2))
        await cache.flush()
        assert disk.statistics().writes == 0
        assert cache.statistics().writers["disk"].declined == 2
        assert await got(cache, 1)
        await cache.flush()
        assert disk.contains(key(1)) and not disk.contains(key(2))
        cache.clear_hot()
        assert await got(cache, 1)
        assert not await got(cache, 2)


async def test_second_touch_writes_a_chunk_that_is_put_again_after_it_was_lost(tmp_path: Path) -> None:
    async with opened(tmp_path, flash_admission="second_touch") as cache:
        await cache.put(key(1), payload(1))
        await only_below(cache)
        await cache.put(key(1), payload(1))
        await cache.flush()
        assert cache.tiers[0].contains(key(1))


async def test_live_sessions_are_those_that_came_back(tmp_path: Path) -> None:
    """The first turn is written when the second needs it, and the second one's chunks as they come."""
    async with opened(tmp_path, flash_admission="live_session") as cache:
        (disk,) = cache.tiers
        for session, number in (("back", 1), ("gone", 3)):
            cache.ahead.began(session, [key(number)])
            await cache.put(key(number), payload(number))
            cache.ahead.ended(session, [key(number)])
        await cache.flush()
        assert disk.statistics().writes == 0
        cache.ahead.began("back", [key(1), key(2)])
        assert await got(cache, 1)
        await cache.put(key(2), payload(2))
        cache.ahead.ended("back", [key(1), key(2), key(4)])
        await cache.put(key(4), payload(4))
        await cache.flush()
        assert [disk.contains(key(number)) for number in range(1, 5)] == [True, True, False, True]


async def test_the_governor_bounds_what_is_written(tmp_path: Path) -> None:
    """An hour's worth may go at once: two chunks with their headers."""
    async with opened(tmp_path, flash_bytes_per_day=24 * 2.5 * (CHUNK_BYTES + 4096)) as cache:
        for number in range(5):
            await cache.put(key(number), payload(number))
        await cache.flush()
        assert cache.tiers[0].statistics().writes == 2
        assert cache.statistics().writers["disk"].declined == 3
