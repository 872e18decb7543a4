"""Prefetches in the cascade: demand goes first, takes over what still waits, and joins what is on its way."""

from __future__ import annotations

import asyncio

import pytest

from tests.scheduler.conftest import Bench
from tiercache.scheduler.reads import Reader, ReaderSettings


def reader_of(bench: Bench) -> Reader:
    return Reader(bench.cpu, [bench.tier], ReaderSettings(deadline_s=5.0))


def soon(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_demand_overtakes_prefetches_that_wait_for_a_place(bench: Bench) -> None:
    keys = bench.keep_on_tier(range(1, 12))
    reader = reader_of(bench)
    bench.tier.gate.clear()
    promoting = [asyncio.create_task(reader.promote(key, soon())) for key in keys[:10]]
    await bench.tier.until_entered(2)
    asking = asyncio.create_task(reader.fetch(keys[10], soon()))
    await settle()
    order: list[int] = []
    for number, task in [*enumerate(promoting), (10, asking)]:
        task.add_done_callback(lambda _, number=number: order.append(number))
    bench.tier.gate.set()
    leases = await asyncio.gather(*promoting, asking)
    assert order.index(10) <= 4, "behind the two that were being read, and their like"
    for lease in leases:
        assert lease is not None
        lease.release()
    assert bench.is_whole()


async def test_demand_hurries_the_prefetch_that_it_joins(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    (key,) = bench.keep_on_tier(range(1, 2))
    hurried: list[bytes] = []
    monkeypatch.setattr(bench.tier, "hurry", hurried.append)
    reader = reader_of(bench)
    bench.tier.gate.clear()
    promoting = asyncio.create_task(reader.promote(key, soon()))
    await bench.tier.until_entered(1)
    assert not hurried
    asking = asyncio.create_task(reader.fetch(key, soon()))
    await settle()
    assert hurried == [key]
    bench.tier.gate.set()
    for lease in await asyncio.gather(promoting, asking):
        assert lease is not None
        lease.release()


async def test_demand_takes_over_the_prefetch_of_its_own_chunk(bench: Bench) -> None:
    keys = bench.keep_on_tier(range(1, 12))
    reader = reader_of(bench)
    bench.tier.gate.clear()
    promoting = [asyncio.create_task(reader.promote(key, soon())) for key in keys]
    await bench.tier.until_entered(2)
    asking = asyncio.create_task(reader.fetch(keys[-1], soon()))
    await settle()
    assert reader.counters.overtaken == 1
    bench.tier.gate.set()
    lease, *holds = await asyncio.gather(asking, *promoting)
    assert bench.memory.counters.reads == len(keys), "each once"
    for each in (lease, *holds):
        assert each is not None
        each.release()
    assert bench.is_whole()


async def test_prefetches_that_wait_for_room_hold_up_no_demand_read(bench: Bench) -> None:
    keys = bench.keep_on_tier(range(1, 60))
    reader = reader_of(bench)
    room = bench.cpu.pool.count - 2 * bench.cpu.budget.floor
    holds = await asyncio.gather(*(reader.promote(key, soon()) for key in keys[:room]))
    waiting = [asyncio.create_task(reader.promote(key, soon())) for key in keys[room:-1]]
    while not bench.cpu.wait_queue.waiters:
        await asyncio.sleep(0)
    began_s = asyncio.get_running_loop().time()
    lease = await reader.fetch(keys[-1], soon())
    assert lease is not None
    assert asyncio.get_running_loop().time() - began_s < 1.0
    lease.release()
    for hold in [*holds, *await asyncio.gather(*waiting)]:
        if hold is not None:
            hold.release()
    assert reader.breakers() == {"disk": "closed"}, "no room in memory says nothing about the tier"
    while reader.in_flight or reader.abandoned:  # their timers are a moment later than those of the last who waited
        await asyncio.sleep(0)
    assert bench.is_whole()
