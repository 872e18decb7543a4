"""Turns at a tier."""

from __future__ import annotations

import asyncio

import pytest

from tests.scheduler.conftest import Bench
from tiercache.memory.slots import Purpose
from tiercache.scheduler.reads import ReaderSettings, ReaderStatistics, TierReader
from tiercache.testing import MemoryTier
from tiercache.tiers.base import Traits


class OnePlace(TierReader):
    def __init__(self, bench: Bench, *, apart: bool = False) -> None:
        traits = Traits(read_concurrency=1, prefetches_apart=apart)
        super().__init__(MemoryTier("t", traits), bench.cpu, ReaderSettings(), ReaderStatistics(), {})
        assert self.places == 1

    async def acquire(self, purpose: Purpose) -> None:
        until_s = asyncio.get_running_loop().time() + 60.0
        assert await self.wait_queue.wait(purpose, lambda: until_s)

    def release(self, purpose: Purpose) -> None:
        self._leave(purpose)

    @property
    def free(self) -> int:
        return self.places - sum(self.taken.values())


async def test_turn_that_is_passed_over_while_it_is_cancelled_is_no_failure(bench: Bench) -> None:
    places = OnePlace(bench)
    await places.acquire(Purpose.READ)
    waiting = asyncio.create_task(places.acquire(Purpose.PREFETCH))
    await asyncio.sleep(0)
    waiting.cancel()
    places.release(Purpose.READ)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert places.free == 1


async def test_places_go_to_demand_and_in_turn(bench: Bench) -> None:
    places = OnePlace(bench)
    await places.acquire(Purpose.PREFETCH)
    order: list[str] = []

    async def wait(name: str, purpose: Purpose) -> None:
        await places.acquire(purpose)
        order.append(name)
        places.release(purpose)

    tasks = [
        asyncio.create_task(wait(name, purpose))
        for name, purpose in (
            ("p1", Purpose.PREFETCH),
            ("p2", Purpose.PREFETCH),
            ("r1", Purpose.READ),
            ("r2", Purpose.READ),
        )
    ]
    await asyncio.sleep(0)
    places.release(Purpose.PREFETCH)
    await asyncio.gather(*tasks)
    assert order == ["r1", "r2", "p1", "p2"]
    assert places.free == 1


async def test_place_that_comes_at_the_moment_of_cancellation_goes_on(bench: Bench) -> None:
    places = OnePlace(bench)
    await places.acquire(Purpose.READ)
    waiting = asyncio.create_task(places.acquire(Purpose.READ))
    await asyncio.sleep(0)
    places.release(Purpose.READ)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert places.free == 1


async def test_read_does_not_wait_for_prefetches_that_are_apart(bench: Bench) -> None:
    places = OnePlace(bench, apart=True)
    await places.acquire(Purpose.PREFETCH)
    await places.acquire(Purpose.READ)
    more = [asyncio.create_task(places.acquire(purpose)) for purpose in (Purpose.READ, Purpose.PREFETCH)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in more), "each kind has its places, and no more"
    places.release(Purpose.READ)
    await more[0]
    places.release(Purpose.READ)
    places.release(Purpose.PREFETCH)
    await more[1]


async def test_reads_and_prefetches_together_have_half_of_the_arena_at_most(bench: Bench) -> None:
    bench.cpu.budget.tiers = bench.cpu.pool.count
    assert bench.cpu.budget.reads_at_once == 1
    places = OnePlace(bench, apart=True)
    await places.acquire(Purpose.PREFETCH)
    reading = asyncio.create_task(places.acquire(Purpose.READ))
    await asyncio.sleep(0)
    assert not reading.done()
    places.release(Purpose.PREFETCH)
    await reading
