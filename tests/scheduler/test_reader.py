"""The cascade: one flight a key, deadlines that hold, demand before prefetches, and nothing lost by faults or cancelling."""

import asyncio
import threading

import numpy as np
import pytest

from tests.scheduler.conftest import Bench, expect, now, release, soon
from tests.scheduler.held import CHUNK_BYTES, begun, found, key, opened, payload, settle, tier, until
from tiercache.memory.slots import Purpose
from tiercache.scheduler.reads import Reader, ReaderSettings
from tiercache.testing import chunk


@pytest.fixture
def reader(bench: Bench) -> Reader:
    return Reader(bench.cpu, [bench.tier], ReaderSettings(deadline_s=5.0, probe_deadline_s=1.0))


async def test_many_askers_share_one_flight_which_goes_on_when_one_is_cancelled(bench: Bench, reader: Reader) -> None:
    (key,) = bench.keep_on_tier(range(1, 2))
    bench.tier.gate.clear()
    first, *others = (asyncio.create_task(reader.fetch(key, soon())) for _ in range(50))
    await bench.tier.until_entered(1)
    first.cancel()
    bench.tier.gate.set()
    leases = await asyncio.gather(*others)
    assert bench.memory.counters.reads == 1
    assert reader.counters.joined == 49
    release(*leases)
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_an_asker_that_is_thrown_away_gets_no_lease(bench: Bench, reader: Reader) -> None:
    """As a task is that nobody keeps: its coroutine is closed, and hears of no cancellation."""
    (key,) = bench.keep_on_tier(range(1, 2))
    bench.tier.gate.clear()
    asker = reader.fetch(key, soon())
    asker.send(None)
    await bench.tier.until_entered(1)
    asker.close()
    bench.tier.gate.set()
    await until(lambda: not reader.in_flight)
    assert bench.cpu.contains(key)


async def test_late_read_is_a_miss_and_keeps_its_slot_and_then_its_chunk(bench: Bench, reader: Reader) -> None:
    (key,) = bench.keep_on_tier(range(1, 2))
    bench.tier.gate.clear()
    began = now()
    assert await reader.fetch(key, soon(2.0)) is None
    assert now() - began == pytest.approx(2.0, abs=0.2)
    await until(lambda: not reader.in_flight)
    assert len(reader.abandoned) == 1
    assert not bench.is_whole(), "the slot belongs to the read that still runs"
    await bench.let_go()
    assert not reader.abandoned
    lease = bench.cpu.lease(key)
    assert lease is not None
    with lease:
        assert np.array_equal(lease.view, chunk(1)[1])
    assert (bench.memory.counters.reads, reader.counters.kept) == (1, 1)


async def test_hung_tier_opens_its_breaker_and_holds_no_more_than_its_concurrency(bench: Bench, reader: Reader) -> None:
    keys = bench.keep_on_tier(range(1, 21))
    bench.tier.gate.clear()
    for start in range(0, 20, 4):
        leases = await asyncio.gather(*(reader.fetch(key, soon(1.0)) for key in keys[start : start + 4]))
        assert leases == [None] * 4
    assert reader.breakers() == {"disk": "open"}
    assert bench.tier.entered <= 2
    assert bench.cpu.pool.count - bench.cpu.obtainable <= 2
    bench.keep_hot(range(99, 100))
    lease = await reader.fetch(chunk(99)[0], soon(0.1))
    assert lease is not None, "the hot cache does not suffer"
    lease.release()
    await bench.let_go()


async def test_batch_ends_at_the_first_gap_and_reads_little_beyond(bench: Bench, reader: Reader) -> None:
    keys = bench.keep_on_tier(range(1, 31))
    del bench.memory.chunks[keys[4]]
    assert await reader.deliver(keys, [expect(number) for number in range(1, 31)], soon()) == 4
    assert bench.memory.counters.reads <= 4 + 6


async def test_failing_sink_ends_the_prefix_leaks_nothing_and_is_said_once_in_a_while(
    bench: Bench, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    keys = bench.keep_on_tier(range(1, 9))
    sinks = [expect(number) for number in range(1, 9)]
    sinks[3] = expect(77)
    for number in (1, 2):
        assert await reader.deliver(keys, sinks, soon()) == 3
        assert reader.counters.sink_failures == number
    assert caplog.text.count("could not be delivered") == 1


async def test_batch_gives_at_the_deadline_what_has_arrived(bench: Bench, reader: Reader) -> None:
    keys = bench.keep_on_tier(range(1, 9))
    bench.keep_hot(range(1, 4))
    bench.tier.gate.clear()
    assert await reader.deliver(keys, [expect(number) for number in range(1, 9)], soon(1.0)) == 3
    await bench.let_go()


async def test_cancelled_batch_runs_no_sink_afterwards(bench: Bench, reader: Reader) -> None:
    keys = bench.keep_on_tier(range(1, 31))
    bench.keep_hot(range(1, 9))
    for steps in range(0, 30, 3):
        over = False
        late = 0

        def sink(view: np.ndarray) -> None:
            nonlocal late
            late += over

        batch = asyncio.create_task(reader.deliver(keys, [sink] * 30, soon()))
        for _ in range(steps):
            await asyncio.sleep(0)
        batch.cancel()
        await asyncio.gather(batch, return_exceptions=True)
        over = True
        await until(lambda: not reader.in_flight and not bench.cpu.copiers.unfinished)
        assert late == 0
        assert bench.is_whole()


async def test_closing_answers_whoever_waits(bench: Bench, reader: Reader) -> None:
    (key,) = bench.keep_on_tier(range(1, 2))
    bench.tier.gate.clear()
    asker = asyncio.create_task(reader.fetch(key, soon(100.0)))
    await bench.tier.until_entered(1)
    await reader.close()
    assert await asker is None
    await bench.let_go()


async def test_batch_begins_no_read_after_close(bench: Bench, reader: Reader, caplog: pytest.LogCaptureFixture) -> None:
    """Its tier was closed by then, and a warning told of a read that had failed."""
    keys = bench.keep_on_tier(range(1, 10))
    go_on = threading.Event()

    def copy(view: np.ndarray) -> None:
        assert go_on.wait(10.0)

    batch = asyncio.create_task(reader.deliver(keys, [copy] * len(keys), soon(100.0)))
    await bench.tier.until_entered(4)
    await until(lambda: reader.counters.hits["disk"] >= 4 and not reader.in_flight)
    await reader.close()
    entered = bench.tier.entered
    go_on.set()
    assert await batch == entered
    assert bench.tier.entered == entered
    assert not caplog.records


async def test_impatient_callers_do_not_switch_a_healthy_tier_off(bench: Bench, reader: Reader) -> None:
    keys = bench.keep_on_tier(range(1, 20))
    bench.tier.gate.clear()
    for wanted in keys[:12]:
        assert await reader.fetch(wanted, soon(0.001)) is None
    bench.tier.gate.set()
    release(await reader.fetch(keys[15], soon()))
    assert reader.breakers() == {"disk": "closed"}


async def test_large_hot_batch_leaves_the_loop_to_others_and_ends_by_its_deadline(bench: Bench, reader: Reader) -> None:
    bench.keep_hot(range(1, 5))
    numbers = [1, 2, 3, 4] * 1500
    keys, sinks = [chunk(number)[0] for number in numbers], [expect(number) for number in numbers]
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    assert await reader.deliver(keys, sinks, soon(60.0)) == len(keys)
    beside.cancel()
    assert turns > len(keys) / 600
    came = await reader.deliver(keys, sinks, now())
    assert 0 < came < len(keys) / 2, "what there was time for"


# Prefetches


async def test_demand_overtakes_prefetches_that_wait_for_a_place(bench: Bench, reader: Reader) -> None:
    keys = bench.keep_on_tier(range(1, 12))
    bench.tier.gate.clear()
    promoting = [asyncio.create_task(reader.promote(key, soon())) for key in keys[:10]]
    await bench.tier.until_entered(2)
    asking = await begun(reader.fetch(keys[10], soon()))
    order: list[int] = []
    for number, task in [*enumerate(promoting), (10, asking)]:
        task.add_done_callback(lambda _, number=number: order.append(number))
    bench.tier.gate.set()
    leases = await asyncio.gather(*promoting, asking)
    assert order.index(10) <= 4, "behind the two that were being read, and their like"
    release(*leases)


async def test_demand_takes_over_the_prefetch_of_its_own_chunk(bench: Bench, reader: Reader) -> None:
    keys = bench.keep_on_tier(range(1, 12))
    bench.tier.gate.clear()
    promoting = [asyncio.create_task(reader.promote(key, soon())) for key in keys]
    await bench.tier.until_entered(2)
    asking = await begun(reader.fetch(keys[-1], soon()))
    assert reader.counters.overtaken == 1
    bench.tier.gate.set()
    lease, *holds = await asyncio.gather(asking, *promoting)
    assert bench.memory.counters.reads == len(keys), "each once"
    release(lease, *holds)


async def test_prefetches_that_wait_for_room_hold_up_no_demand_read(bench: Bench, reader: Reader) -> None:
    keys = bench.keep_on_tier(range(1, 60))
    room = bench.cpu.pool.count - 2 * bench.cpu.budget.floor
    holds = await asyncio.gather(*(reader.promote(key, soon()) for key in keys[:room]))
    waiting = [asyncio.create_task(reader.promote(key, soon())) for key in keys[room:-1]]
    await until(lambda: any(bench.cpu.wait_queue.waiting))
    began_s = now()
    release(await reader.fetch(keys[-1], soon()))
    assert now() - began_s < 1.0
    for hold in [*holds, *await asyncio.gather(*waiting)]:
        if hold is not None:
            hold.release()
    assert reader.breakers() == {"disk": "closed"}, "no room in memory says nothing about the tier"
    # Their timers are a moment later than those of the last who waited.
    await until(lambda: not reader.in_flight and not reader.abandoned)


# Too few places and slots


@pytest.mark.parametrize("scarce", ["places", "slots"])
async def test_who_joins_while_the_first_waits_for_its_turn_gets_all_of_his_time(bench: Bench, scarce: str) -> None:
    keys = bench.keep_on_tier(range(1, 4))
    reader = Reader(bench.cpu, [bench.tier], ReaderSettings(deadline_s=30.0))
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
