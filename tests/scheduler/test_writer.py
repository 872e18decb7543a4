"""Write-behind: bounds hold, policies do what they say, and a bad tier keeps no memory."""

import asyncio
from collections import deque

import pytest

from tests.scheduler.conftest import Bench, flushed, now, soon
from tests.scheduler.held import CHUNK_BYTES as HELD_BYTES
from tests.scheduler.held import NEW, OLD, begun, key, opened, raising, settle, tier, until
from tiercache import TierCache
from tiercache.errors import TierFull, TierUnavailable
from tiercache.scheduler.writer import FanOut, TierWriter, WriterSettings
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES


def writer_of(bench: Bench, **settings: object) -> TierWriter:
    defaults = {"queue_bytes": 6 * CHUNK_BYTES, "deadline_s": 5.0}
    return TierWriter(bench.tier, WriterSettings(**{**defaults, **settings}))  # type: ignore[arg-type]


def enqueue(bench: Bench, writer: TierWriter, *numbers: int) -> None:
    for number in numbers:
        assert writer.enqueue_nowait(bench.make_hot(number))


async def occupied(bench: Bench, **settings: object) -> TierWriter:
    """Two writes hang in the tier, and with four more chunks the queue is full."""
    writer = writer_of(bench, **settings)
    bench.tier.gate.clear()
    enqueue(bench, writer, 1, 2)
    await bench.tier.until_entered(2)
    enqueue(bench, writer, *range(3, 7))
    return writer


async def goes_on(bench: Bench, writer: TierWriter) -> None:
    """The tier does, and gets all."""
    bench.tier.gate.set()
    assert await flushed(writer, 5.0)


async def test_dirty_chunk_is_never_evicted(bench: Bench) -> None:
    writer = await occupied(bench)
    bench.keep_hot(range(100, 160))
    assert all(bench.cpu.contains(chunk(number)[0]) for number in range(1, 7))
    await goes_on(bench, writer)


@pytest.mark.parametrize(("on_full", "dropped"), [("skip", 7), ("replace", 3)], ids=["the new one", "the oldest queued"])
async def test_full_queue_drops_what_its_policy_says(bench: Bench, on_full: str, dropped: int) -> None:
    writer = await occupied(bench, on_full=on_full)
    enqueue(bench, writer, 7)
    counted = writer.statistics()
    assert (counted.skipped, counted.replaced) == ((1, 0) if on_full == "skip" else (0, 1))
    await goes_on(bench, writer)
    assert set(bench.memory.chunks) == {chunk(number)[0] for number in range(1, 8) if number != dropped}


async def test_chunk_larger_than_the_queue_waits_in_it_alone(bench: Bench) -> None:
    writer = writer_of(bench, queue_bytes=CHUNK_BYTES // 2, on_full="skip")
    bench.tier.gate.clear()
    enqueue(bench, writer, 1, 2)
    await bench.tier.until_entered(2)
    enqueue(bench, writer, 3, 4)
    assert (writer.statistics().queued, writer.statistics().skipped) == (1, 1)
    await goes_on(bench, writer)
    assert set(bench.memory.chunks) == {chunk(number)[0] for number in range(1, 4)}
    assert writer.statistics().queued_bytes == 0


async def test_chunks_being_written_count_in_the_limit(bench: Bench) -> None:
    """Else a tier that hangs could hold the limit, and as many chunks again as it writes at the same time."""
    writer = writer_of(bench, queue_bytes=4 * CHUNK_BYTES, on_full="skip")
    bench.tier.gate.clear()
    enqueue(bench, writer, 1, 2)
    await bench.tier.until_entered(2)
    enqueue(bench, writer, *range(3, 9))
    counted = writer.statistics()
    assert (counted.writing, counted.queued, counted.skipped) == (2, 2, 4)
    await goes_on(bench, writer)


async def test_full_queue_with_wait_waits_for_room(bench: Bench) -> None:
    writer = await occupied(bench, on_full="wait")
    waiting = asyncio.create_task(writer.enqueue(deque([bench.make_hot(8)]), soon(1.0)))
    await asyncio.sleep(0)
    bench.tier.gate.set()
    await waiting
    assert await flushed(writer, 5.0)
    assert chunk(8)[0] in bench.memory.chunks


async def test_puts_wait_once_up_to_their_limit_for_a_tier_that_stalls(bench: Bench) -> None:
    writer = await occupied(bench, deadline_s=60.0)
    began_s = now()
    for number in (7, 8):
        await writer.enqueue(deque([bench.make_hot(number)]), soon(1.0))
        assert now() - began_s == pytest.approx(1.0, abs=0.2), "the second would wait in vain, and other tiers with it"
    assert writer.statistics().skipped == 2
    await goes_on(bench, writer)
    bench.tier.gate.clear()
    enqueue(bench, writer, *range(11, 17))
    began_s = now()
    await writer.enqueue(deque([bench.make_hot(17)]), soon(1.0))
    assert now() - began_s == pytest.approx(1.0, abs=0.2), "the tier has begun writes since"
    await goes_on(bench, writer)


async def test_passing_failure_is_retried(bench: Bench) -> None:
    writer = writer_of(bench)
    bench.tier.fail_writes = [OSError("hiccup"), OSError("hiccup")]
    enqueue(bench, writer, 1)
    assert await flushed(writer, 5.0)
    assert chunk(1)[0] in bench.memory.chunks
    assert writer.statistics().retried == 2


async def test_lasting_failure_opens_the_breaker_drops_the_queue_and_heals(bench: Bench) -> None:
    writer = writer_of(bench, queue_bytes=100 * CHUNK_BYTES)
    bench.tier.fail_writes = [OSError("device lost")] * 6
    enqueue(bench, writer, *range(1, 11))
    assert await flushed(writer, 20.0)
    assert writer.statistics().breaker == "open"
    assert bench.is_whole(), "a tier that is down holds no memory"
    enqueue(bench, writer, 50)
    assert writer.statistics().dropped >= 9
    await asyncio.sleep(130.0)
    bench.tier.fail_writes = []
    enqueue(bench, writer, 51)
    assert await flushed(writer, 5.0)
    assert chunk(51)[0] in bench.memory.chunks


async def test_hung_write_is_given_up_and_its_memory_kept_until_it_ends(bench: Bench) -> None:
    writer = await occupied(bench)
    assert await flushed(writer, 60.0), "a hung tier does not hang a flush"
    await keeps_memory_until_they_end(bench, writer)


async def keeps_memory_until_they_end(bench: Bench, writer: TierWriter) -> None:
    """Two writes that were given up."""
    assert len(writer.abandoned) == 2
    assert bench.cpu.pool.count - bench.cpu.obtainable == 2
    bench.tier.gate.set()
    await until(lambda: not writer.abandoned)


async def test_flush_reports_what_it_could_not_write(bench: Bench) -> None:
    writer = await occupied(bench, deadline_s=100.0)
    report = await FanOut([writer]).flush(1.0)
    assert not report.complete
    assert report.pending == {"disk": 6}
    bench.tier.gate.set()
    assert (await FanOut([writer]).flush(5.0)).complete


async def test_report_of_a_flush_counts_what_was_dropped_meanwhile(bench: Bench) -> None:
    writer = writer_of(bench)
    fan_out = FanOut([writer])
    bench.tier.fail_writes = [OSError("device lost")] * 3
    enqueue(bench, writer, 1)
    report = await fan_out.flush(20.0)
    assert (report.dropped, report.describe()) == ({"disk": 1}, "chunks that were not written: disk: 1")
    await asyncio.sleep(1.5)
    enqueue(bench, writer, 2)
    report = await fan_out.flush(20.0)
    assert (report.written, report.dropped) == ({"disk": 1}, {"disk": 0})
    assert report.describe() == "every chunk was written"


async def test_close_with_a_hung_tier_returns_and_keeps_the_memory_until_the_writes_end(bench: Bench) -> None:
    writer = await occupied(bench, deadline_s=1000.0)
    began_s = now()
    await writer.close(began_s + 0.5)
    assert writer.statistics().dropped == 6, "those whose writes were called off, too"
    assert now() - began_s == pytest.approx(0.5, abs=0.1)
    await keeps_memory_until_they_end(bench, writer)


async def test_write_that_is_under_way_at_close_may_end(bench: Bench) -> None:
    writer = await occupied(bench)
    closing = asyncio.create_task(writer.close(soon(1.0)))
    await asyncio.sleep(0)
    bench.tier.gate.set()
    await closing
    assert writer.statistics().dropped == 4, "the queue"
    assert set(bench.memory.chunks) == {chunk(1)[0], chunk(2)[0]}


async def opened_breaker(bench: Bench) -> TierWriter:
    """Three failures open it; its pause is over when this returns, and the tier is well again."""
    writer = writer_of(bench, queue_bytes=100 * CHUNK_BYTES)
    bench.tier.fail_writes = [OSError("device lost")] * 3
    enqueue(bench, writer, 90)
    await flushed(writer, 20.0)
    assert writer.breaker.state.value == "open"
    await asyncio.sleep(1.5)
    return writer


async def test_chunk_that_comes_while_a_probe_is_under_way_waits_for_its_end(bench: Bench) -> None:
    writer = await opened_breaker(bench)
    entered = bench.tier.entered
    bench.tier.gate.clear()
    enqueue(bench, writer, 1)
    await bench.tier.until_entered(entered + 1)
    enqueue(bench, writer, *range(2, 7))
    await asyncio.sleep(1.0)
    assert bench.tier.entered == entered + 1, "one finds out, nobody else goes there"
    await goes_on(bench, writer)
    assert {chunk(number)[0] for number in range(1, 7)} <= set(bench.memory.chunks)


async def test_queue_is_dropped_when_the_probe_has_failed(bench: Bench) -> None:
    writer = await opened_breaker(bench)
    bench.tier.fail_writes = [OSError("device lost")]
    entered = bench.tier.entered
    enqueue(bench, writer, *range(1, 13))
    assert await flushed(writer, 20.0)
    assert bench.tier.entered == entered + 1
    assert writer.statistics().dropped == 13


async def test_chunk_that_waits_for_room_in_the_queue_is_written_before_one_that_came_later() -> None:
    """A later chunk may fit where the one that waits does not."""
    half = OLD[: HELD_BYTES // 2]
    async with opened("a", concurrency=1, write_queue_bytes=5 * HELD_BYTES // 2, queue_wait_s=20.0) as cache:
        writes = asyncio.Semaphore(0)
        tier("a").fate = writes.acquire  # type: ignore[assignment]
        for number in (1, 2, 3):
            assert await cache.put(key(number), half)
        await tier("a").until_entered("write")
        assert await cache.put(key(4), OLD), "which fills the queue"
        first = await begun(cache.put(key(5), OLD))
        assert not first.done()
        writes.release()
        await tier("a").until_entered("write", 2)
        later = await begun(cache.put(key(6), half))
        for _ in range(5):
            writes.release()
        assert await asyncio.gather(first, later) == [True, True]
        assert (await cache.flush()).complete
        assert list(tier("a").chunks) == [key(number) for number in range(1, 7)]


async def open_breaker(cache: TierCache) -> None:
    """One write finds the tier full; when this returns the pause is over, and the next write is the probe."""
    tier("a").fate = raising(TierFull, "no room")
    assert await cache.put(key(1), OLD)
    assert (await cache.flush()).dropped == {"a": 1}
    tier("a").fate = None
    await asyncio.sleep(1.5)


async def test_write_that_is_forgotten_while_it_may_be_the_probe_leaves_the_probe_to_the_next(cache: TierCache) -> None:
    await open_breaker(cache)
    tier("a").chunks[key(2)] = OLD
    tier("a").hold("remove")
    forgetting = asyncio.create_task(cache.forget([key(2)]))
    await tier("a").until_entered("remove")
    assert await cache.put(key(2), NEW)
    await settle()
    again = await begun(cache.forget([key(2)]))
    tier("a").let_go()
    await asyncio.gather(forgetting, again)
    assert await cache.put(key(3), NEW)
    assert (await cache.flush(5.0)).written == {"a": 1}


async def test_write_that_the_tier_itself_cancels_has_failed(cache: TierCache) -> None:
    await open_breaker(cache)
    tier("a").fate = raising(asyncio.CancelledError)
    assert await cache.put(key(2), NEW)
    assert (await cache.flush()).dropped == {"a": 1}
    tier("a").fate = None
    await asyncio.sleep(5.0)
    assert await cache.put(key(3), NEW)
    assert (await cache.flush(5.0)).written == {"a": 1}


async def test_removal_that_the_tier_itself_cancels_is_tried_again(cache: TierCache) -> None:
    tier("a").chunks[key(1)] = OLD
    tier("a").fate = raising(asyncio.CancelledError)
    with pytest.raises(TierUnavailable, match="a: a removal was cancelled"):
        await cache.forget([key(1)])
    tier("a").fate = None
    await asyncio.sleep(5.0)
    assert not tier("a").chunks
    assert await cache.put(key(1), NEW)
    assert (await cache.flush(5.0)).written == {"a": 1}


async def test_removal_does_not_wait_for_a_write_that_waits_for_a_probe(cache: TierCache) -> None:
    await open_breaker(cache)
    tier("a").hold("write")
    assert await cache.put(key(2), NEW)
    await tier("a").until_entered("write", 2)
    assert await cache.put(key(3), OLD)
    await settle()
    await cache.forget([key(3)], deadline_s=2.0)
    tier("a").let_go()
    assert (await cache.flush(5.0)).complete
    assert list(tier("a").chunks) == [key(2)]
