"""Reads that outlive their first caller's deadline: later callers still get the chunk, and it is kept."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.scheduler.conftest import Bench, release, soon
from tests.scheduler.held import CHUNK_BYTES, begun, found, key, opened, payload, settle, tier
from tiercache.memory.slots import Purpose
from tiercache.scheduler.reads import Reader, ReaderSettings
from tiercache.testing import chunk


def reader_of(bench: Bench) -> Reader:
    return Reader(bench.cpu, [bench.tier], ReaderSettings(deadline_s=30.0))


async def test_read_that_is_late_is_kept_for_the_next(bench: Bench) -> None:
    (wanted,) = bench.keep_on_tier(range(1, 2))
    reader = reader_of(bench)
    bench.tier.gate.clear()
    assert await reader.fetch(wanted, soon(0.1)) is None
    await asyncio.sleep(0.01)  # who waits gives up at the same instant as the flight itself, before it or after it
    bench.tier.gate.set()
    await settle()
    assert bench.cpu.contains(wanted)
    lease = await reader.fetch(wanted, soon(0.1))
    assert lease is not None and np.array_equal(lease.view, chunk(1)[1])
    lease.release()
    assert bench.memory.counters.reads == 1
    assert reader.counters.kept == 1


@pytest.mark.parametrize("scarce", ["places", "slots"])
async def test_who_joins_while_the_first_waits_for_its_turn_gets_all_of_his_time(bench: Bench, scarce: str) -> None:
    keys = bench.keep_on_tier(range(1, 4))
    reader = reader_of(bench)
    slots = []
    others: list[asyncio.Task[object]] = []
    bench.tier.gate.clear()
    if scarce == "places":
        others = [asyncio.create_task(reader.fetch(wanted, soon(20.0))) for wanted in keys[1:]]
        await bench.tier.until_entered(2)
    else:
        while (slot := bench.cpu.try_reserve(Purpose.READ)) is not None:
            slots.append(slot)
    hasty = await begun(reader.fetch(keys[0], soon(1.0)))
    patient = asyncio.create_task(reader.fetch(keys[0], soon(10.0)))
    assert await hasty is None
    await asyncio.sleep(1.0)
    bench.tier.gate.set()
    for slot in slots:
        bench.cpu.abandon(slot, Purpose.READ)
    release(await patient)
    for other in await asyncio.gather(*others):
        other.release()  # type: ignore[attr-defined]


async def test_want_of_memory_is_no_sign_against_a_tier() -> None:
    """Reads that wait for slots have the places, and others wait for those."""
    async with opened("a", slots=8, concurrency=2) as cache:
        for number in range(16):
            tier("a").chunks[key(100 + number)] = payload(number)
        leases = []
        for number in range(8):
            if await cache.put(key(number), bytes(CHUNK_BYTES), deadline_s=0.1):
                leases.append(cache.cpu.lease(key(number)))
        while (slot := cache.cpu.try_reserve(Purpose.READ)) is not None:
            leases.append(cache.cpu.publish(key(50 + len(leases)), slot, 1, Purpose.READ))
        got = await asyncio.gather(*(found(cache, key(100 + number), 8.0) for number in range(16)))
        assert not any(got)
        assert cache.statistics().breakers == {"a": "closed"}
        release(*leases)
        assert await found(cache, key(100)) == payload(0)


async def test_hung_tier_leaves_another_its_share_of_a_small_arena() -> None:
    """Its reads hang in as many slots as they can get, and writes take what is left."""
    async with opened("well", "hung", slots=16, concurrency=16) as cache:
        for number in range(16):
            tier("hung").chunks[key(100 + number)] = payload(number)
            tier("well").chunks[key(200 + number)] = payload(number)
        tier("hung").hold("read")
        await asyncio.gather(*(found(cache, key(100 + number), 0.5) for number in range(16)))
        assert cache.statistics().stuck == 4, "a quarter of the arena: all tiers together half of it"
        tier("well").hold("write")
        for number in range(16):
            await cache.put(key(300 + number), bytes(CHUNK_BYTES), deadline_s=0.1)
        got = [await found(cache, key(200 + number), 1.0) for number in range(16)]
        assert got == [payload(number) for number in range(16)]


async def test_prefetches_leave_places_to_reads() -> None:
    async with opened("hung", slots=16, concurrency=6, prefetches=2) as cache:
        for number in range(16):
            tier("hung").chunks[key(number)] = payload(number)
        tier("hung").hold("read")
        handle = cache.prefetch([key(number) for number in range(8)])
        await tier("hung").until_entered("read", 2)
        gets = [asyncio.create_task(found(cache, key(number))) for number in range(8, 16)]
        await tier("hung").until_entered("read", 6)
        await settle()
        assert tier("hung").entered["read"] == 6
        tier("hung").let_go()
        assert await asyncio.gather(*gets) == [payload(number) for number in range(8, 16)]
        assert (await handle).promoted == 8
        cache.clear_hot()
