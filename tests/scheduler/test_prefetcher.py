"""Prefetches carried out: what a handle says, what is kept for whom, and what becomes of it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict

import numpy as np
import pytest

from tests.scheduler.conftest import SLOTS, Bench, soon
from tests.scheduler.held import opened, raising, tier, until
from tiercache.core.keys import ChunkKey
from tiercache.core.prefetch import PrefetchPlan
from tiercache.scheduler.prefetcher import Prefetcher, PrefetchHandle
from tiercache.scheduler.reads import Reader, ReaderSettings
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES


class Prefetching:
    """A prefetcher over the bench's reader."""

    def __init__(self, bench: Bench, share: int = 16, bytes_per_s: float = 0.0) -> None:
        self.bench = bench
        self.reader = Reader(bench.cpu, [bench.tier], ReaderSettings(deadline_s=5.0))
        self.plan = PrefetchPlan(CHUNK_BYTES, share * CHUNK_BYTES, bytes_per_s)
        self.prefetcher = Prefetcher(self.reader, self.plan)

    def hint(self, keys: list[ChunkKey], due_in_s: float = 0.0, ttl_s: float = 60.0) -> PrefetchHandle:
        return self.prefetcher.prefetch(keys, due_in_s, ttl_s, 0)

    async def use(self, key: ChunkKey) -> np.ndarray:
        lease = await self.reader.fetch(key, soon())
        assert lease is not None
        with lease:
            return lease.view.copy()

    async def learn(self) -> None:
        """Sessions come back after 10 s."""
        for number in range(10):
            self.prefetcher.began(f"s{number}", [])
            self.prefetcher.ended(f"s{number}", [])
        await asyncio.sleep(10.0)
        for number in range(10):
            self.prefetcher.began(f"s{number}", [])

    async def predict(self, keys: list[ChunkKey]) -> None:
        """When it returns, the session with these chunks is about to come back."""
        await self.learn()
        self.prefetcher.ended("mine", keys)
        await asyncio.sleep(9.0)

    def account(self, source: str = "hints") -> dict[str, int]:
        """In chunks, without what is zero."""
        account = asdict(self.plan.accounts[source])
        return {name.removesuffix("_bytes"): value // CHUNK_BYTES for name, value in account.items() if value}


@pytest.fixture
async def work(bench: Bench) -> AsyncIterator[Prefetching]:
    work = Prefetching(bench)
    yield work
    await work.prefetcher.close()
    await until(lambda: not work.reader.in_flight)


async def test_awaiting_a_prefetch_gives_what_became_of_it(work: Prefetching) -> None:
    keys = work.bench.keep_on_tier(range(1, 6))
    progress = await work.hint([*keys, chunk(99)[0], chunk(98)[0]])
    assert (progress.asked, progress.found, progress.promoted, progress.missing) == (7, 5, 5, 2)
    assert progress.done and progress.promoted_bytes == progress.found_bytes == 5 * CHUNK_BYTES
    assert work.prefetcher.held == 5
    for number, key in enumerate(keys, start=1):
        assert np.array_equal(await work.use(key), chunk(number)[1])
    assert work.bench.memory.counters.reads == 5, "all hot"
    assert work.account() == {"promoted": 5, "used": 5}
    assert work.prefetcher.held == 0, "kept no longer than until it was used"


async def test_cancelled_prefetch_begins_nothing_more(work: Prefetching) -> None:
    keys = work.bench.keep_on_tier(range(1, 13))
    work.bench.tier.gate.clear()
    handle = work.hint(keys)
    await work.bench.tier.until_entered(2)
    handle.cancel()
    work.bench.tier.gate.set()
    progress = await handle
    assert progress.cancelled == 12
    await until(lambda: not work.prefetcher._reads)
    assert work.bench.memory.counters.reads <= 4
    handle.cancel()


async def test_prefetch_that_is_cancelled_after_its_end_keeps_nothing(work: Prefetching) -> None:
    handle = work.hint(work.bench.keep_on_tier(range(1, 13)))
    assert (await handle).promoted == work.prefetcher.held == 12
    handle.cancel()
    await until(lambda: work.prefetcher.held == 0)
    assert (await handle).promoted == 12


async def test_a_tier_that_hangs_is_asked_for_two_chunks_more_than_it_reads_at_once(work: Prefetching) -> None:
    limit = work.bench.tier.traits.read_concurrency + 2
    keys = work.bench.keep_on_tier(range(1, limit + 5))
    work.bench.tier.gate.clear()
    handle = work.hint(keys)
    await work.bench.tier.until_entered(work.bench.tier.traits.read_concurrency)
    await asyncio.sleep(1.0)
    assert len(work.reader.in_flight) == limit
    handle.cancel()
    work.bench.tier.gate.set()


async def test_no_more_is_kept_than_the_share(bench: Bench) -> None:
    work = Prefetching(bench, share=4)
    keys = bench.keep_on_tier(range(1, 11))
    handle = work.hint(keys, ttl_s=600.0)
    await until(lambda: work.prefetcher.held >= 4 and not work.prefetcher._reads)
    await asyncio.sleep(5.0)
    assert (work.prefetcher.held, bench.memory.counters.reads) == (4, 4)
    for key in keys[:4]:
        await work.use(key)
    await asyncio.sleep(5.0)
    assert bench.memory.counters.reads == 8, "room that was used up is filled again"
    await work.prefetcher.close()
    assert (await handle).cancelled == 2


async def test_what_nobody_comes_for_is_let_go_and_counted(work: Prefetching) -> None:
    await work.hint(work.bench.keep_on_tier(range(1, 5)), ttl_s=3.0)
    assert work.prefetcher.held == 4
    await asyncio.sleep(10.0)
    assert work.prefetcher.held == 0
    assert work.account() == {"promoted": 4, "wasted": 4}
    assert work.bench.cpu.contains(chunk(1)[0]), "like any other hot chunk now"


async def test_who_comes_before_it_has_arrived_makes_it_late(work: Prefetching) -> None:
    keys = work.bench.keep_on_tier(range(1, 3))
    work.bench.tier.gate.clear()
    handle = work.hint(keys)
    await work.bench.tier.until_entered(2)
    using = [asyncio.create_task(work.use(key)) for key in keys]
    await asyncio.sleep(0)
    work.bench.tier.gate.set()
    await asyncio.gather(*using)
    assert (await handle).promoted == 2
    await until(lambda: not work.prefetcher._reads)
    assert work.account() == {"promoted": 2, "late": 2}
    assert work.prefetcher.held == 0


async def test_failed_reads_are_missing_and_cost_nothing(work: Prefetching) -> None:
    keys = work.bench.keep_on_tier(range(1, 4))
    work.bench.tier.fail_reads = [OSError("gone")]
    progress = await work.hint(keys)
    assert (progress.promoted, progress.missing) == (2, 1)
    assert work.account() == {"promoted": 2, "cancelled": 1}


async def test_closing_tells_who_waits(work: Prefetching) -> None:
    work.bench.tier.gate.clear()
    handle = work.hint(work.bench.keep_on_tier(range(1, 5)))
    await work.bench.tier.until_entered(1)
    await work.prefetcher.close()
    assert (await handle).cancelled == 4
    work.bench.tier.gate.set()
    await until(lambda: not work.reader.abandoned)


@pytest.mark.parametrize(("share", "ttl_s"), [(4, 5.0), (0, 5.0), (4, 0.0)])
async def test_who_waits_learns_that_the_time_is_over(bench: Bench, share: int, ttl_s: float) -> None:
    work = Prefetching(bench, share=share)
    handle = work.hint(bench.keep_on_tier(range(1, 11)), ttl_s=ttl_s)
    async with asyncio.timeout(60.0):
        progress = await handle
    assert progress.done and progress.promoted + progress.cancelled == 10 and progress.cancelled >= 6
    await work.prefetcher.close()


async def test_what_is_announced_and_hot_is_not_displaced_by_other_prefetches(work: Prefetching) -> None:
    bench = work.bench
    bench.keep_hot(range(1, 9))
    bench.keep_hot(range(40, 64))
    announced = bench.keep_on_tier(range(1, 9))
    later = work.hint(announced, due_in_s=20.0)
    await work.hint(bench.keep_on_tier(range(20, 32)))
    assert all(bench.cpu.contains(key) for key in announced), "the 24 that nobody expects went first"
    assert (await later).promoted == 8
    assert work.account()["promoted"] == 12


async def test_what_was_used_and_evicted_is_not_fetched_again(work: Prefetching) -> None:
    keys = work.bench.keep_on_tier(range(1, 5))
    await work.hint(keys, ttl_s=60.0)
    for key in keys:
        await work.use(key)
    work.bench.keep_hot(range(100, 100 + 3 * SLOTS))
    assert not any(work.bench.cpu.contains(key) for key in keys)
    await asyncio.sleep(10.0)
    assert work.account() == {"promoted": 4, "used": 4}


async def test_session_that_comes_back_finds_its_chunks_hot(work: Prefetching) -> None:
    keys = work.bench.keep_on_tier(range(1, 5))
    await work.learn()
    work.prefetcher.began("mine", keys)
    work.prefetcher.ended("mine", keys)
    await asyncio.sleep(9.0)
    assert all(work.bench.cpu.contains(key) for key in keys)
    assert work.prefetcher.held == 0, "a wrong prediction costs no room"
    work.prefetcher.began("mine", keys)
    for key in keys:
        await work.use(key)
    assert work.bench.memory.counters.reads == 4
    assert work.account("sessions") == {"promoted": 4, "used": 4}


@pytest.mark.parametrize("says_so", [True, False])
async def test_chunks_of_a_session_that_does_not_come_back_are_wasted(work: Prefetching, says_so: bool) -> None:
    keys = work.bench.keep_on_tier(range(1, 5))
    await work.predict(keys)
    assert work.account("sessions") == {"promoted": 4}
    if says_so:
        work.prefetcher.over("mine")
    await asyncio.sleep(2.0 if says_so else 700.0)
    assert work.account("sessions") == {"promoted": 4, "wasted": 4}


async def test_hint_keeps_what_a_prediction_has_promoted(work: Prefetching) -> None:
    keys = work.bench.keep_on_tier(range(1, 5))
    await work.predict(keys)
    assert (await work.hint(keys)).promoted == 4
    assert work.prefetcher.held == 4 and work.bench.memory.counters.reads == 4


async def test_prefetch_ends_although_a_tier_cancels_its_lookup() -> None:
    async with opened("a") as cache, asyncio.timeout(60.0):
        tier("a").fate = raising(asyncio.CancelledError)
        assert (await cache.prefetch([chunk(1)[0]])).missing == 1
