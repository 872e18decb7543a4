"""Chunks that stay in the hot cache."""

from pathlib import Path

import numpy as np
import pytest

from tests.test_cache import CHUNK_BYTES, is_whole, key, opened, payload

KEYS = [key(1), key(2)]


@pytest.mark.parametrize("admission", ["all", "second_touch"])
async def test_no_tier_below_gets_a_hot_only_chunk(tmp_path: Path, admission: str) -> None:
    async with opened(tmp_path, flash_admission=admission) as cache:
        into = [np.zeros(CHUNK_BYTES, np.uint8) for _ in KEYS]
        for _ in range(2):
            assert await cache.put_many(KEYS, [payload(1), payload(2)], prefix=True, hot_only=KEYS[1:]) == 2
            assert await cache.get_into(KEYS, into) == 2
            assert np.array_equal(into[1], payload(2))
        assert (await cache.flush()).complete
        (disk,) = cache.tiers
        assert [disk.contains(each) for each in KEYS] == [True, False]
        cache.clear_hot()
        assert await cache.lookup_each(KEYS) == [True, False]


async def test_chunks_leave_the_hot_cache_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        assert await cache.put_many(KEYS, [payload(1), payload(2)]) == 2
        assert (await cache.flush()).complete
        async with cache.get(KEYS[0]) as lease:
            assert lease is not None
            assert cache.clear_hot([KEYS[0], key(3)]) == 1
            assert cache.lookup_hot(KEYS) == 0 and cache.lookup_hot(KEYS[1:]) == 1
            assert np.array_equal(lease.view, payload(1))
        assert await cache.lookup_each(KEYS) == [True, True]
        assert is_whole(cache)
