"""Tenants as an embedder meets them: what a noisy one can cost a quiet one, in RAM and on disk."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.chunks import chunks_of
from tests.scheduler.conftest import release
from tests.test_cache import CHUNK_BYTES, LAYOUT, configured, only_below, payload, until
from tiercache import Lease, TierCache
from tiercache.control.families import figures_of
from tiercache.control.metrics import exposition
from tiercache.control.top import tables_of
from tiercache.core.header import file_bytes
from tiercache.core.keys import tenant_of, tenant_tag
from tiercache.memory.slots import PREFETCH, WRITE

GB = 1 << 30
SLOTS = 32
QUOTA = 8
"""Chunks of a tenant, in RAM and on disk."""
SALT = "never-shown-7f3a"


def chunks_on_disk(chunks: int) -> float:
    return chunks * file_bytes(CHUNK_BYTES) / GB


@asynccontextmanager
async def opened(directory: Path | None = None, **values: object) -> AsyncIterator[TierCache]:
    values = {"tenant_max_local_cpu_size": QUOTA * CHUNK_BYTES / GB, **values}
    if directory is not None:
        values = {"tenant_max_local_disk_size": chunks_on_disk(QUOTA), **values}
    async with TierCache.open(configured(directory, **values), LAYOUT) as cache:
        yield cache


def keys_of(cache: TierCache, salt: str, chunks: int, session: int = 0) -> list[bytes]:
    first = session << 20
    return cache.keys(range(first, first + chunks * LAYOUT.chunk_tokens), salt=salt)


async def put(cache: TierCache, keys: Sequence[bytes], deadline_s: float | None = None) -> int:
    return await cache.put_many(keys, [payload(key[0]) for key in keys], deadline_s=deadline_s, prefix=True)


async def scan(cache: TierCache, salt: str, chunks: int) -> None:
    for session in range(1, 1 + chunks // 4):
        await put(cache, keys_of(cache, salt, 4, session))


def held(cache: TierCache, tier: str, salt: str) -> tuple[int, int]:
    """Bytes and chunks."""
    found = cache.statistics().tiers[tier].tenants.get(tenant_tag(salt).hex() or "default")
    return (found.held_bytes, found.chunks) if found is not None else (0, 0)


def on_disk(directory: Path, salt: str) -> int:
    """Chunks of a tenant, by their names."""
    return sum(name.name.endswith(tenant_tag(salt).hex()) for name in chunks_of(directory).glob("[0-9a-f][0-9a-f]/*"))


async def hold(cache: TierCache, keys: Sequence[bytes]) -> list[Lease]:
    leases = [cache.cpu.lease(key) for key in keys]
    assert all(leases)
    return leases  # type: ignore[return-value]


# In RAM


@pytest.mark.parametrize("salt", ["noisy", ""])
async def test_a_scan_costs_another_tenant_nothing(salt: str) -> None:
    async with opened() as cache:
        quiet = keys_of(cache, "quiet", QUOTA)
        assert await put(cache, quiet) == QUOTA
        await scan(cache, salt, 200)
        assert cache.lookup_hot(quiet) == QUOTA
        assert held(cache, "cpu", salt) == (QUOTA * CHUNK_BYTES, QUOTA)
        assert held(cache, "cpu", "quiet") == (QUOTA * CHUNK_BYTES, QUOTA)
        noisy = cache.statistics().tiers["cpu"].tenants[tenant_tag(salt).hex() or "default"]
        assert noisy.evicted == 200 - QUOTA == cache.statistics().tiers["cpu"].evicted
        assert cache.cpu.pool.free == SLOTS - 2 * QUOTA


async def test_of_a_prefix_longer_than_a_quota_the_head_stays() -> None:
    async with opened() as cache:
        keys = keys_of(cache, "one", 30)
        await put(cache, keys)
        assert cache.lookup_hot(keys) >= QUOTA - 2, "two batches take the places of one chunk each"


async def test_who_holds_all_of_his_quota_waits_and_nobody_waits_for_him() -> None:
    async with opened() as cache:
        own = keys_of(cache, "noisy", QUOTA)
        await put(cache, own)
        leases = await hold(cache, own)
        waiting = asyncio.create_task(put(cache, keys_of(cache, "noisy", 1, 1), deadline_s=30.0))
        await until(lambda: cache.cpu.wait_queue.waiting[WRITE])
        assert cache.cpu.try_reserve(WRITE, keys_of(cache, "noisy", 1, 2)[0]) is None
        assert await put(cache, keys_of(cache, "quiet", 12), deadline_s=0.0) == 12
        assert await put(cache, keys_of(cache, "", 12), deadline_s=0.0) == 12
        assert not waiting.done()
        leases[0].release()
        assert await waiting == 1 and held(cache, "cpu", "noisy")[1] == QUOTA
        assert await put(cache, keys_of(cache, "noisy", 1, 3), deadline_s=0.0) == 1, "its newest chunk goes for that"
        release(*leases)
        assert cache.cpu.obtainable == SLOTS


async def test_what_was_removed_counts_until_its_leases_end() -> None:
    async with opened() as cache:
        own = keys_of(cache, "noisy", QUOTA)
        await put(cache, own)
        leases = await hold(cache, own)
        await cache.forget(own)
        assert held(cache, "cpu", "noisy")[1] == QUOTA
        assert await put(cache, keys_of(cache, "noisy", 1, 1), deadline_s=0.0) == 0
        release(*leases)
        assert held(cache, "cpu", "noisy") == (0, 0)
        assert await put(cache, keys_of(cache, "noisy", 1, 1), deadline_s=0.0) == 1


async def test_what_is_prefetched_counts_and_takes_a_part_of_the_quota_only(tmp_path: Path) -> None:
    async with opened(tmp_path, tenant_max_local_disk_size=0) as cache:
        quiet, noisy = keys_of(cache, "quiet", QUOTA), keys_of(cache, "noisy", QUOTA + 8)
        await put(cache, noisy)
        await only_below(cache)
        await put(cache, quiet)
        await cache.flush()
        handle = cache.prefetch(noisy, deadline=0.0, ttl=30.0)
        await until(lambda: cache.ahead.held >= QUOTA // 2)
        for _ in range(20):
            await asyncio.sleep(0)
        assert cache.ahead.held == QUOTA // 2, "prefetch_share of the quota"
        assert held(cache, "cpu", "noisy")[1] == QUOTA // 2
        assert cache.cpu.try_reserve(PREFETCH, noisy[-1]) is None
        assert cache.lookup_hot(quiet) == QUOTA
        assert await put(cache, keys_of(cache, "noisy", 6, 9)) == 6, "there is room for the tenant's puts"
        handle.cancel()


async def test_demand_reads_of_others_do_not_wait_for_a_tenants_room(tmp_path: Path) -> None:
    """A read that waits for a slot must not keep its place at the tier meanwhile."""
    async with opened(tmp_path, tenant_max_local_disk_size=0) as cache:
        noisy, quiet = keys_of(cache, "noisy", 2 * QUOTA), keys_of(cache, "quiet", 4)
        for keys in (noisy, quiet):
            await put(cache, keys)
        await only_below(cache)
        await cache.warm(noisy[:QUOTA])
        leases = await hold(cache, noisy[:QUOTA])
        into = [np.zeros(CHUNK_BYTES, np.uint8) for _ in noisy]
        waiting = asyncio.create_task(cache.get_into(noisy[QUOTA:], into[QUOTA:], deadline_s=20.0))
        await until(lambda: any(cache.cpu.wait_queue.waiting))
        assert await cache.get_into(quiet, into[:4], deadline_s=5.0) == 4
        assert not waiting.done()
        release(*leases)
        assert await waiting == QUOTA
        assert held(cache, "cpu", "noisy")[1] == QUOTA


async def test_random_uses_leave_right_accounts() -> None:
    chance = random.Random(7)
    async with opened(cache_policy="LRU") as cache:
        cpu = cache.cpu
        kept: list[Lease] = []
        for _ in range(400):
            keys = keys_of(cache, chance.choice(["", "a", "b", "c"]), chance.randint(1, 5), chance.randint(0, 9))
            match chance.randrange(5):
                case 0 | 1:
                    await put(cache, keys, deadline_s=0.0)
                case 2:
                    await cache.forget(keys[:1])
                case 3:
                    lease = (cpu.pin if chance.random() < 0.5 else cpu.lease)(keys[0])
                    kept += [lease] if lease is not None else []
                case _:
                    while len(kept) > chance.randint(0, 6):
                        kept.pop(chance.randrange(len(kept))).release()
            tenants = cpu.statistics().tenants.values()
            assert all(tenant.held_bytes == tenant.chunks * CHUNK_BYTES for tenant in tenants)
            assert all(tenant.chunks <= QUOTA for tenant in tenants)
            assert sum(tenant.chunks for tenant in tenants) == SLOTS - cpu.pool.free
        release(*kept)
        assert cpu.obtainable == SLOTS


# On disk


async def test_a_scan_costs_another_tenant_nothing_on_disk_and_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        quiet = keys_of(cache, "quiet", QUOTA - 1)
        await put(cache, quiet)
        await scan(cache, "noisy", 100)
        await cache.flush()
        assert on_disk(tmp_path, "noisy") == QUOTA and on_disk(tmp_path, "quiet") == QUOTA - 1
        assert held(cache, "disk", "noisy") == (QUOTA * file_bytes(CHUNK_BYTES), QUOTA)
    async with opened(tmp_path) as cache:
        await cache.tiers[0].scanned()
        assert held(cache, "disk", "noisy")[1] == QUOTA
        await scan(cache, "noisy", 40)
        await cache.flush()
        assert on_disk(tmp_path, "noisy") == QUOTA
        into = [np.zeros(CHUNK_BYTES, np.uint8) for _ in quiet]
        assert await cache.get_into(quiet, into) == QUOTA - 1
        assert all(np.array_equal(found, payload(key[0])) for key, found in zip(quiet, into, strict=True))


async def test_a_quota_that_was_lowered_holds_soon_and_costs_nobody_else(tmp_path: Path) -> None:
    async with opened(tmp_path, tenant_max_local_disk_size=0) as cache:
        quiet = keys_of(cache, "quiet", QUOTA)
        await put(cache, quiet)
        await scan(cache, "noisy", 40)
        await cache.flush()
    async with opened(tmp_path, tenant_max_local_disk_size=chunks_on_disk(QUOTA)) as cache:
        await cache.tiers[0].scanned()
        assert on_disk(tmp_path, "noisy") == QUOTA == on_disk(tmp_path, "quiet")
        assert (await cache.lookup_keys(quiet)).chunks == QUOTA


async def test_a_write_that_would_not_fit_beside_those_under_way_is_declined(tmp_path: Path) -> None:
    async with opened(tmp_path, tenant_max_local_disk_size=chunks_on_disk(1)) as cache:
        for _ in range(3):
            await scan(cache, "noisy", 8)
            await cache.flush()
            assert on_disk(tmp_path, "noisy") == 1
        assert cache.statistics().writers["disk"].dropped == 0


# What can be seen


async def test_figures_have_the_tag_and_nothing_has_the_salt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    tag = tenant_tag(SALT).hex()
    async with opened(tmp_path) as cache:
        await scan(cache, SALT, 40)
        await put(cache, keys_of(cache, "", 2))
        await cache.flush()
        statistics = cache.statistics().to_dict()
        assert statistics["tiers"]["disk"]["tenants"][tag] == {
            "held_bytes": QUOTA * file_bytes(CHUNK_BYTES), "chunks": QUOTA, "evicted": 32,
        }  # fmt: skip
        assert statistics["tiers"]["cpu"]["tenants"]["default"]["chunks"] == 2
        figures = figures_of(cache)
        metrics = exposition({"c.sock": figures}).decode()
        row = f'tiercache_tenant_bytes{{socket="c.sock",tenant="{tag}",tier="cpu"}} {QUOTA * CHUNK_BYTES:.1f}'
        assert row in metrics
        assert f'tiercache_tenant_evicted{{socket="c.sock",tenant="{tag}",tier="disk"}} 32.0' in metrics
        console = Console(width=200, record=True)
        for table in tables_of({"c.sock": figures}, {}, 0.0):
            console.print(table)
        seen = console.export_text()
        assert tag in seen and "default" in seen
        shown = [repr(statistics), metrics, seen, cache.describe(), repr(cache.config)]
    async with opened(tmp_path, tenant_salt=SALT) as cache:
        keys = cache.keys(range(64))
        await put(cache, keys)
        assert {tenant_of(key) for key in keys} == {tenant_tag(SALT)}
        shown += [repr(cache.statistics().to_dict()), repr(cache.config), cache.describe()]
    shown += [caplog.text, *capsys.readouterr(), *(str(path) for path in tmp_path.rglob("*"))]
    assert not any(SALT in text for text in shown)


async def test_a_prefetch_that_waits_for_a_pin_of_its_tenant_goes_on_when_the_chunk_is_read() -> None:
    async with opened(prefetch_share=0.125) as cache:
        pinned, other = keys_of(cache, "quiet", 2)
        await put(cache, [pinned])
        pin, read = cache.cpu.pin(pinned), cache.cpu.lease(pinned)
        until_s = asyncio.get_running_loop().time() + 5
        waiting = asyncio.create_task(cache.cpu.wait_queue.wait(PREFETCH, lambda: until_s, other))
        await asyncio.sleep(0)
        assert not waiting.done(), "one pin is what the tenant may have"
        pin.release()
        slot = await asyncio.wait_for(waiting, 1)
        assert slot is not None
        cache.cpu.abandon(slot, PREFETCH)
        read.release()
