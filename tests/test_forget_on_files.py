"""Forget on real files, with real processes in the way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.test_cache import CHUNK_BYTES, key, opened, payload
from tests.tiers.others import running
from tests.tiers.test_disk_healing import HOLDER


async def test_forget_waits_for_no_peer_that_is_frozen_while_it_holds_the_count(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with opened(tmp_path) as cache:
        (disk,) = cache.tiers
        assert await cache.put(key(1), payload(1))
        assert (await cache.flush()).complete
        file = Path(disk.path(key(1)))  # type: ignore[attr-defined]
        assert file.exists()
        async with running("-c", HOLDER, tmp_path / ".tiercache" / "ledger"):
            began_s = loop.time()
            await cache.forget([key(1)])
            assert loop.time() - began_s < 5.0
            assert not file.exists()
            async with cache.get(key(1), deadline_s=1.0) as lease:
                assert lease is None
        assert await cache.put(key(1), payload(2))
        assert (await cache.flush()).complete
        cache.clear_hot()
        into = bytearray(CHUNK_BYTES)
        assert await cache.get_into([key(1)], [into]) == 1
        assert bytes(into) == payload(2).tobytes()


async def test_a_close_removes_what_a_cancelled_forget_has_left(tmp_path: Path) -> None:
    keys = [key(number) for number in range(1, 301)]
    async with opened(tmp_path) as cache:
        assert await cache.put_many(keys, [payload(number) for number in range(1, 301)], deadline_s=60.0) == 300
        assert (await cache.flush()).complete
        forgetting = asyncio.ensure_future(cache.forget(keys))
        await asyncio.sleep(0)
        forgetting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forgetting
    async with opened(tmp_path) as cache:
        assert not any(await cache.lookup_each(keys))
