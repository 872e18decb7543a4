"""Putting into the hot cache above tiers that are slow, full or hung: no put waits longer than it said it would."""

import asyncio

import numpy as np
import pytest

from tests.scheduler.conftest import Bench, flushed, items, now
from tiercache.core.keys import ChunkKey
from tiercache.scheduler.writer import FanOut, FlushReport, TierWriter, WriterSettings
from tiercache.testing import FaultyTier, MemoryTier, chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.base import Traits


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """With the real clock: the one that jumps does so while a busy machine copies."""
    return asyncio.DefaultEventLoopPolicy()


class SlowTier(MemoryTier):
    """One chunk in a tenth of a second."""

    def __init__(self) -> None:
        super().__init__("slow", Traits(durable=True, write_concurrency=1))

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        await asyncio.sleep(0.1)
        return await super().write(key, payload, payload_bytes)


def writer_of(tier: MemoryTier | FaultyTier, queue_chunks: int = 4, wait_s: float = 1.0) -> TierWriter:
    return TierWriter(tier, WriterSettings(queue_bytes=queue_chunks * CHUNK_BYTES, wait_s=wait_s))


async def test_put_of_many_chunks_above_a_hung_tier_ends_by_its_deadline_with_all_hot(bench: Bench) -> None:
    bench.tier.gate.clear()
    writer = writer_of(bench.tier)
    path = bench.ingest(FanOut([writer]))
    began_s = now()
    assert await path.put(items(range(1, 21)), 0.5) == 20, "what is hot is hot"
    assert now() - began_s < 3.0
    assert writer.statistics().skipped >= 15
    bench.tier.gate.set()
    assert await flushed(writer, 60.0)


async def test_put_waits_for_full_queues_once_and_not_for_each_chunk_and_tier(bench: Bench) -> None:
    slow, other = writer_of(SlowTier(), wait_s=0.2), writer_of(SlowTier(), wait_s=0.2)
    path = bench.ingest(FanOut([slow, other]))
    began_s = now()
    assert await path.put(items(range(1, 25)), 60.0) == 24
    assert now() - began_s < 1.0
    for writer in (slow, other):
        assert await flushed(writer, 60.0)
        counted = writer.statistics()
        assert counted.written + counted.skipped == 24
        assert counted.skipped, "that is what it did not wait for"


async def test_full_queue_of_one_tier_does_not_delay_what_others_are_offered(bench: Bench) -> None:
    bench.tier.gate.clear()
    hung, good = writer_of(bench.tier, wait_s=10.0), writer_of(MemoryTier("good"), 100)
    path = bench.ingest(FanOut([hung, good]))
    putting = asyncio.create_task(path.put(items(range(1, 9)), 60.0))
    began_s = now()
    async with asyncio.timeout(5.0):
        while good.statistics().written < 8:
            await asyncio.sleep(0.01)
    assert now() - began_s < 3.0
    assert not putting.done()
    bench.tier.gate.set()
    assert await putting == 8
    assert await flushed(hung, 60.0) and await flushed(good, 60.0)
    assert hung.statistics().written == 8


async def test_a_flush_says_what_was_declined(bench: Bench) -> None:
    asked = asyncio.Event()

    class Choosy(MemoryTier):
        async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
            await asked.wait()
            return key == chunk(1)[0] and await super().write(key, payload, payload_bytes)

    fan_out = FanOut([writer_of(Choosy("choosy", Traits(durable=True)))])
    assert await bench.ingest(fan_out).put(items([1, 2]), 1.0) == 2
    flush = asyncio.create_task(fan_out.flush(60.0))
    await asyncio.sleep(0)
    asked.set()
    assert await flush == FlushReport({"choosy": 1}, {"choosy": 0}, {"choosy": 0}, {"choosy": 1})
