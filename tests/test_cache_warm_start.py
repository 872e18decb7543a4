"""`preload: recent`: what was hot at the last close is hot again after a restart, and costs nobody anything."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chunks import chunks_of
from tests.test_cache import until, until_hot
from tiercache import Config, ConfigError, Layout, TierCache
from tiercache.tiers.files.tier import FileTier

LAYOUT = Layout("warm", chunk_tokens=16, bytes_per_token=16384)
TOKENS = list(range(16 * 12))


@asynccontextmanager
async def opened(place: Path, slots: int = 32, layout: Layout = LAYOUT, **more: object) -> AsyncIterator[TierCache]:
    values = {"max_local_cpu_size": slots * LAYOUT.chunk_bytes / 2**30, "preload": "recent"}
    disk = {"local_disk": str(place), "max_local_disk_size": 0.1}
    async with TierCache.open(Config.load(environ={}, overrides=values | disk | more), layout) as cache:
        yield cache


def payload_of(number: int) -> np.ndarray:
    return np.full(LAYOUT.chunk_bytes, number, dtype=np.uint8)


def lists(place: Path) -> list[Path]:
    return sorted((chunks_of(place) / ".tiercache").glob("recent-*"))


async def until_preloaded(cache: TierCache, chunks: int) -> None:
    """Each of the listed chunks was read, or was not for a reason."""
    async with asyncio.timeout(30):
        while True:
            account = cache.statistics().prefetch.get("preload")
            done_bytes = account.promoted_bytes + account.cancelled_bytes if account else 0
            if done_bytes == chunks * LAYOUT.chunk_bytes and not cache.parts.reader.in_flight:
                return
            await asyncio.sleep(0)


async def stored(place: Path) -> list[bytes]:
    """Twelve chunks of a prefix, hot at the close."""
    async with opened(place) as cache:
        await cache.store(TOKENS, [payload_of(number) for number in range(12)])
        return cache.keys(TOKENS)


async def test_after_a_restart_hits_are_hot_and_no_demand_read_is_made(tmp_path: Path) -> None:
    keys = await stored(tmp_path)
    async with opened(tmp_path) as cache:
        await until_hot(cache, keys)
        before = cache.statistics().reader.hits["disk"]
        buffers = [np.empty(LAYOUT.chunk_bytes, dtype=np.uint8) for _ in keys]
        assert await cache.get_into(keys, buffers) == 12
        assert all(np.array_equal(buffer, payload_of(number)) for number, buffer in enumerate(buffers))
        statistics = cache.statistics()
        assert statistics.reader.hits == {"cpu": 12, "disk": before}
        account = statistics.prefetch["preload"]
        assert account.used_bytes + account.late_bytes == account.promoted_bytes == 12 * LAYOUT.chunk_bytes


async def test_without_it_nothing_is_promoted_or_listed(tmp_path: Path) -> None:
    async with opened(tmp_path, preload="none") as cache:
        await cache.store(TOKENS, [payload_of(number) for number in range(12)])
    assert lists(tmp_path) == []


async def test_the_hottest_come_first_and_fill_free_memory_only(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        await cache.store(TOKENS, [payload_of(number) for number in range(12)])
        other = list(range(1000, 1000 + 16 * 4))
        await cache.store(other, [payload_of(number) for number in range(20, 24)])
        keys, others = cache.keys(TOKENS), cache.keys(other)
        assert await cache.get_into(keys[:3], [bytearray(LAYOUT.chunk_bytes) for _ in range(3)]) == 3
    assert lists(tmp_path)[0].read_text().split() == [key.hex() for key in [*keys[:3], *others, *keys[3:]]]
    async with opened(tmp_path, slots=8) as cache:
        await until_preloaded(cache, 16)
        assert cache.lookup_hot(keys) == 4 and cache.lookup_hot(others) == 4
        assert cache.statistics().prefetch["preload"].cancelled_bytes == 8 * LAYOUT.chunk_bytes, "they were not read"


async def test_nothing_of_a_tenant_makes_room_above_its_quota(tmp_path: Path) -> None:
    keys = await stored(tmp_path)
    quota_gb = 8 * LAYOUT.chunk_bytes / 2**30
    async with opened(tmp_path, tenant_max_local_cpu_size=quota_gb) as cache:
        await until_preloaded(cache, 12)
        assert sum(cache.lookup_hot([key]) for key in keys) == 8
        assert cache.statistics().tiers["cpu"].evicted == 0


async def test_what_was_read_at_the_close_stays_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = await stored(tmp_path)
    begun, ended = asyncio.Event(), asyncio.Event()

    async def hung(tier: FileTier, key: bytes, into: np.ndarray) -> int | None:
        begun.set()
        await ended.wait()
        return None

    (path,) = lists(tmp_path)
    before = path.stat().st_ino
    monkeypatch.setattr(FileTier, "read", hung)
    async with opened(tmp_path) as cache:
        await begun.wait()
        closing = asyncio.create_task(cache.close())
        await until(lambda: path.stat().st_ino != before)
        ended.set()
        await closing
    assert sorted(lists(tmp_path)[0].read_text().split()) == sorted(key.hex() for key in keys)


async def test_a_disk_that_was_detached_and_attached_keeps_the_list(tmp_path: Path) -> None:
    keys = await stored(tmp_path)
    async with opened(tmp_path) as cache:
        await until_hot(cache, keys)
        await cache.detach("disk")
        await cache.attach("disk")
        await cache.put(bytes(24), payload_of(1))
    assert lists(tmp_path)[0].read_text().split()[0] == bytes(24).hex()


async def test_while_the_disk_is_detached_the_last_list_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await stored(tmp_path)
    before = lists(tmp_path)[0].read_bytes()
    async with opened(tmp_path) as cache:
        await until_preloaded(cache, 12)
        await cache.detach("disk")
    assert lists(tmp_path)[0].read_bytes() == before
    assert "the list of hot chunks cannot be written: disk is not open" in caplog.text


async def test_chunks_of_another_size_or_model_have_another_list(tmp_path: Path) -> None:
    keys = await stored(tmp_path)
    for layout in (replace(LAYOUT, chunk_tokens=8), replace(LAYOUT, model="other")):
        async with opened(tmp_path, layout=layout) as cache:
            await cache.put(bytes(24), np.zeros(layout.chunk_bytes, dtype=np.uint8))
            assert "preload" not in cache.statistics().prefetch
    async with opened(tmp_path) as cache:
        await until_hot(cache, keys)


async def test_what_is_preloaded_is_evicted_before_what_was_asked_for_since_and_the_coldest_first(tmp_path: Path) -> None:
    keys = await stored(tmp_path)
    async with opened(tmp_path, slots=16) as cache:
        await until_hot(cache, keys)
        for number in range(1, 8):
            await cache.put(number.to_bytes(24, "big"), payload_of(number))
        await cache.flush()
        assert cache.lookup_hot(keys) == 9
        assert all(cache.lookup_hot([number.to_bytes(24, "big")]) for number in range(1, 8))


KEY = b"ab" * 24
DAMAGED = [b"nonsense\n", b"\0" * 500, KEY, KEY + b"\n\n", KEY + b"\n" + KEY[2:] + b"\n", b"\xff\n", (KEY + b"\n") * 30000]


@pytest.mark.parametrize("content", [*DAMAGED, os.mkfifo])
async def test_a_damaged_list_is_ignored_and_said(tmp_path: Path, content: Any, caplog: pytest.LogCaptureFixture) -> None:
    keys = await stored(tmp_path)
    (path,) = lists(tmp_path)
    if content is os.mkfifo:
        path.unlink()
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "tiercache.prefetch"):
        async with opened(tmp_path) as cache:
            await until(lambda: any(record.name == "tiercache.prefetch" for record in caplog.records))
            async with cache.get(keys[0]) as lease:
                assert lease is not None
    assert "the list of hot chunks is ignored: .tiercache/" in caplog.text
    assert path.is_file() and path.read_text() == f"{keys[0].hex()}\n"


async def test_what_was_not_promoted_before_the_next_close_stays_listed(tmp_path: Path) -> None:
    keys = await stored(tmp_path)
    async with opened(tmp_path, prefetch_bytes_per_s=1.0) as cache:
        await until(lambda: cache.ahead.plan.keys_of["preload"])
    assert lists(tmp_path)[0].read_text().split() == [key.hex() for key in keys]


async def test_ranks_and_salts_have_lists_of_their_own(tmp_path: Path) -> None:
    for layout in (replace(LAYOUT, world_size=2), replace(LAYOUT, world_size=2, rank=1)):
        for salt in ("", "secret"):
            async with opened(tmp_path, layout=layout, tenant_salt=salt) as cache:
                await cache.store(TOKENS, [payload_of(number) for number in range(12)])
    assert len(lists(tmp_path)) == 4
    assert {path.stat().st_mode & 0o777 for path in lists(tmp_path)} == {0o600}


@pytest.mark.parametrize("more", [{"local_disk": None, "max_local_disk_size": 0.0}, {"local_cpu": False}])
async def test_where_it_could_do_nothing_it_is_refused(tmp_path: Path, more: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="preload"):
        async with opened(tmp_path, **more):
            pass
