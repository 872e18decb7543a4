"""The cascade: one flight a key, deadlines that hold, demand before prefetches, and nothing lost by faults or cancelling."""

import asyncio
import threading

import numpy as np
import pytest

from tests.scheduler.conftest import Bench, expect, now, release, soon
from tests.scheduler.held import begun, until
from tiercache.scheduler.reads import WARN_EVERY_S, Reader, ReaderSettings
from tiercache.testing import chunk


def reader_of(bench: Bench) -> Reader:
    return Reader(bench.cpu, [bench.tier], ReaderSettings(deadline_s=5.0, probe_deadline_s=1.0))


async def test_many_askers_share_one_flight_which_goes_on_when_one_is_cancelled(bench: Bench) -> None:
    (key,) = bench.keep_on_tier(range(1, 2))
    reader = reader_of(bench)
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


async def test_an_asker_that_is_thrown_away_gets_no_lease(bench: Bench) -> None:
    """As a task is that nobody keeps: its coroutine is closed, and hears of no cancellation."""
    (key,) = bench.keep_on_tier(range(1, 2))
    reader = reader_of(bench)
    bench.tier.gate.clear()
    asker = reader.fetch(key, soon())
    asker.send(None)
    await bench.tier.until_entered(1)
    asker.close()
    bench.tier.gate.set()
    await until(lambda: not reader.in_flight)
    assert bench.cpu.contains(key)


async def test_hung_read_is_a_miss_at_the_deadline_and_keeps_its_slot_until_it_ends(bench: Bench) -> None:
    (key,) = bench.keep_on_tier(range(1, 2))
    reader = reader_of(bench)
    bench.tier.gate.clear()
    began = now()
    assert await reader.fetch(key, soon(2.0)) is None
    assert now() - began == pytest.approx(2.0, abs=0.2)
    await until(lambda: not reader.in_flight)
    assert len(reader.abandoned) == 1
    assert not bench.is_whole(), "the slot belongs to the read that still runs"
    await bench.let_go()
    assert not reader.abandoned


async def test_hung_tier_opens_its_breaker_and_holds_no_more_than_its_concurrency(bench: Bench) -> None:
    keys = bench.keep_on_tier(range(1, 21))
    reader = reader_of(bench)
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


async def test_batch_ends_at_the_first_gap_and_reads_little_beyond(bench: Bench) -> None:
    keys = bench.keep_on_tier(range(1, 31))
    del bench.memory.chunks[keys[4]]
    assert await reader_of(bench).deliver(keys, [expect(number) for number in range(1, 31)], soon()) == 4
    assert bench.memory.counters.reads <= 4 + 6


async def test_failing_sink_ends_the_prefix_and_leaks_nothing(bench: Bench) -> None:
    keys = bench.keep_on_tier(range(1, 9))
    sinks = [expect(number) for number in range(1, 9)]
    sinks[3] = expect(77)
    reader = reader_of(bench)
    assert await reader.deliver(keys, sinks, soon()) == 3
    assert reader.counters.sink_failures == 1


async def test_batch_gives_at_the_deadline_what_has_arrived(bench: Bench) -> None:
    keys = bench.keep_on_tier(range(1, 9))
    bench.keep_hot(range(1, 4))
    bench.tier.gate.clear()
    assert await reader_of(bench).deliver(keys, [expect(number) for number in range(1, 9)], soon(1.0)) == 3
    await bench.let_go()


async def test_cancelled_batch_runs_no_sink_afterwards(bench: Bench) -> None:
    keys = bench.keep_on_tier(range(1, 31))
    bench.keep_hot(range(1, 9))
    reader = reader_of(bench)
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


async def test_closing_answers_whoever_waits(bench: Bench) -> None:
    (key,) = bench.keep_on_tier(range(1, 2))
    reader = reader_of(bench)
    bench.tier.gate.clear()
    asker = asyncio.create_task(reader.fetch(key, soon(100.0)))
    await bench.tier.until_entered(1)
    await reader.close()
    assert await asker is None
    await bench.let_go()


async def test_batch_that_is_copying_when_all_is_closed_begins_no_further_read(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tier was closed by then, and a warning told of a read that had failed."""
    keys = bench.keep_on_tier(range(1, 10))
    reader = reader_of(bench)
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


async def test_impatient_callers_do_not_switch_a_healthy_tier_off(bench: Bench) -> None:
    keys = bench.keep_on_tier(range(1, 20))
    reader = reader_of(bench)
    bench.tier.gate.clear()
    for key in keys[:12]:
        assert await reader.fetch(key, soon(0.001)) is None
    bench.tier.gate.set()
    release(await reader.fetch(keys[15], soon()))
    assert reader.breakers() == {"disk": "closed"}


async def test_large_batch_of_hot_chunks_leaves_the_loop_to_others_and_ends_by_its_deadline(bench: Bench) -> None:
    bench.keep_hot(range(1, 5))
    reader, numbers = reader_of(bench), [1, 2, 3, 4] * 1500
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


async def test_buffers_of_a_wrong_length_are_said_once_a_minute(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    keys = bench.keep_on_tier(range(1, 9))
    wrong = [expect(77)] * 8
    reader = reader_of(bench)

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if "could not be delivered" in record.getMessage()]

    for _ in range(3):
        assert await reader.deliver(keys, wrong, soon()) == 0
    assert len(lines()) == 1 and "(1 so far)" in lines()[0]
    before = reader.counters.sink_failures
    assert before > 2
    await asyncio.sleep(WARN_EVERY_S)
    assert await reader.deliver(keys[:1], wrong[:1], soon()) == 0
    assert len(lines()) == 2
    assert f"({before + 1} so far)" in lines()[1]


# Prefetches


async def test_demand_overtakes_prefetches_that_wait_for_a_place(bench: Bench) -> None:
    keys = bench.keep_on_tier(range(1, 12))
    reader = reader_of(bench)
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


async def test_demand_takes_over_the_prefetch_of_its_own_chunk(bench: Bench) -> None:
    keys = bench.keep_on_tier(range(1, 12))
    reader = reader_of(bench)
    bench.tier.gate.clear()
    promoting = [asyncio.create_task(reader.promote(key, soon())) for key in keys]
    await bench.tier.until_entered(2)
    asking = await begun(reader.fetch(keys[-1], soon()))
    assert reader.counters.overtaken == 1
    bench.tier.gate.set()
    lease, *holds = await asyncio.gather(asking, *promoting)
    assert bench.memory.counters.reads == len(keys), "each once"
    release(lease, *holds)


async def test_prefetches_that_wait_for_room_hold_up_no_demand_read(bench: Bench) -> None:
    keys = bench.keep_on_tier(range(1, 60))
    reader = reader_of(bench)
    room = bench.cpu.pool.count - 2 * bench.cpu.budget.floor
    holds = await asyncio.gather(*(reader.promote(key, soon()) for key in keys[:room]))
    waiting = [asyncio.create_task(reader.promote(key, soon())) for key in keys[room:-1]]
    await until(lambda: bench.cpu.wait_queue.waiters)
    began_s = now()
    release(await reader.fetch(keys[-1], soon()))
    assert now() - began_s < 1.0
    for hold in [*holds, *await asyncio.gather(*waiting)]:
        if hold is not None:
            hold.release()
    assert reader.breakers() == {"disk": "closed"}, "no room in memory says nothing about the tier"
    # Their timers are a moment later than those of the last who waited.
    await until(lambda: not reader.in_flight and not reader.abandoned)
