"""What reaches the disk when not everything does, and what the hot cache knows of prefixes."""

import asyncio
from pathlib import Path

import numpy as np

from tests.test_cache import CHUNK_BYTES, key, opened, payload
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
        await cache.flush()
        cache.clear_hot()
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
        await cache.flush()
        assert disk.contains(key(1)) and disk.contains(key(2)) and not disk.contains(key(3))


async def test_the_governor_bounds_what_is_written(tmp_path: Path) -> None:
    """An hour's worth may go at once: two chunks with their headers."""
    async with opened(tmp_path, flash_bytes_per_day=24 * 2.5 * (CHUNK_BYTES + 4096)) as cache:
        for number in range(5):
            await cache.put(key(number), payload(number))
        await cache.flush()
        assert cache.tiers[0].statistics().writes == 2
        assert cache.statistics().writers["disk"].declined == 3


async def test_everything_is_written_unless_told_otherwise(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        await cache.put(key(1), payload(1))
        await cache.flush()
        assert cache.tiers[0].contains(key(1))


async def test_a_stored_prefix_loses_its_end_first() -> None:
    """A prefix of 16 chunks, then others until half of it is gone: its beginning can still be used."""
    async with opened(cache_policy="LRU") as cache:
        tokens = list(range(16 * 64))
        assert await cache.store(tokens, [payload(number) for number in range(16)]) == 16
        for number in range(100, 124):
            await cache.put(key(number), payload(number))
        keys = cache.keys(tokens)
        assert cache.lookup_hot(keys) == 8
        assert not any(cache.cpu.contains(name) for name in keys[8:])


async def test_what_is_expected_outlasts_what_is_not() -> None:
    async with opened(cache_policy="LRU") as cache:
        for number in range(32):
            await cache.put(key(number), payload(number))
        cache.cpu.renew([key(0), key(99)])
        await cache.put(key(100), payload(100))
        assert cache.cpu.contains(key(0)) and not cache.cpu.contains(key(1))


async def test_a_chunk_that_somebody_held_when_its_turn_had_come_still_follows_its_parent() -> None:
    async with opened(cache_policy="LRU") as cache:
        tokens = list(range(16 * 64))
        assert await cache.store(tokens, [payload(number) for number in range(16)]) == 16
        keys = cache.keys(tokens)
        for number in range(100, 100 + cache.cpu.pool.free):
            await cache.put(key(number), payload(number))
        lease = cache.cpu.pin(keys[-1])
        assert lease is not None
        await cache.put(key(200), payload(200))
        assert cache.cpu.contains(keys[-1]) and not cache.cpu.contains(keys[-2])
        lease.release()
        await cache.put(key(201), payload(201))
        assert cache.cpu.contains(keys[-3]) and not cache.cpu.contains(keys[-1])


async def test_second_touch_counts_a_chunk_that_is_put_again_before_it_was_written(tmp_path: Path) -> None:
    async with opened(tmp_path, flash_admission="second_touch") as cache:
        await cache.put(key(1), payload(1))
        await cache.put(key(1), payload(1))
        await cache.flush()
        assert cache.tiers[0].contains(key(1))


async def test_second_touch_writes_a_chunk_that_is_read_at_any_moment_of_its_first_write(tmp_path: Path) -> None:
    async with opened(tmp_path, flash_admission="second_touch") as cache:
        for turns in range(12):  # of the loop, in which the tier declines and the writer hears of it
            await cache.put(key(turns), payload(turns))
            for _ in range(turns):
                await asyncio.sleep(0)
            cache.parts.fan_out.used([key(turns)], cache.cpu)
            await cache.flush()
        assert [turns for turns in range(12) if not cache.tiers[0].contains(key(turns))] == []
