"""The tier below a reader and a writer: what hangs opens their breakers, and they close again when it is over."""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest

from tests.hf3fs.tier.conftest import FINGERPRINT, HASTY, until
from tests.hf3fs_emulator import Hf3fsEmulator
from tests.scheduler.conftest import flushed
from tiercache.core.breaker import Breaker, BreakerSettings
from tiercache.core.keys import ChunkKey
from tiercache.core.queue import WaitBudget
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.memory.slots import Purpose, SlotPool
from tiercache.memory.workers import Workers
from tiercache.scheduler.reads import Reader, ReaderSettings
from tiercache.scheduler.writer import TierWriter, WriterSettings
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.cpu import CpuTier
from tiercache.tiers.hf3fs import Hf3fsSettings, Hf3fsTier

SLOTS = 24


class Bench:
    """A hot cache, a reader and a writer around a 3FS tier."""

    def __init__(self, emulator: Hf3fsEmulator, shm_name: str | None) -> None:
        arena = Arena(ArenaSettings(size_bytes=SLOTS * CHUNK_BYTES, shm_name=shm_name))
        self.arena = arena
        self.copiers = Workers("copy", 1)
        self.cpu = CpuTier(SlotPool(arena, CHUNK_BYTES), self.copiers)
        settings = Hf3fsSettings(
            (emulator.mount / "chunks",), 64 << 20, threads=2, chunk_bytes=CHUNK_BYTES, iov_bytes=4 << 20, rings=HASTY
        )
        self.tier = Hf3fsTier(settings, FINGERPRINT)
        self.tier.use_arena(arena)

    async def open(self) -> None:
        await self.cpu.open()
        await self.tier.open()
        self.writer = TierWriter(self.tier, WriterSettings(queue_bytes=SLOTS * CHUNK_BYTES, attempts=1, deadline_s=0.5))
        self.reader = Reader(self.cpu, [self.tier], ReaderSettings(deadline_s=0.5))
        for part in (self.writer, self.reader.tiers[0]):
            part.breaker = Breaker(BreakerSettings(slow_s=0.5, first_pause_s=0.1))

    async def close(self) -> None:
        await self.reader.close()
        await self.writer.close(asyncio.get_running_loop().time() + 1.0)
        await self.tier.close()
        self.copiers.close()
        self.arena.close()
        vars(self).clear()  # pytest keeps this object, and it has views of the arena

    async def put(self, number: int) -> ChunkKey:
        key, payload = chunk(number)
        slot = await self.cpu.reserve(Purpose.WRITE, 10.0)
        assert slot is not None
        self.cpu.pool.view(slot)[:] = payload
        lease = self.cpu.publish(key, slot, CHUNK_BYTES, Purpose.WRITE)
        await self.writer.enqueue(deque([lease]), WaitBudget(asyncio.get_running_loop().time() + 60.0))
        return key

    async def get(self, number: int) -> bool:
        """From the tier, and right."""
        key, payload = chunk(number)
        self.cpu.forget(key)
        lease = await self.reader.fetch(key, asyncio.get_running_loop().time() + 0.8)
        if lease is None:
            return False
        with lease:
            assert np.array_equal(lease.view, payload)
        return True

    async def keep_trying(self, attempt: Callable[[], Awaitable[bool]]) -> None:
        """Until the breaker lets an attempt through, which it does by the clock, and it succeeds."""
        async with asyncio.timeout(20):
            while not await attempt():
                await asyncio.sleep(0.02)

    async def until_none_is_stuck(self) -> None:
        async with asyncio.timeout(20):
            while stuck := {*self.reader.abandoned, *self.writer.abandoned}:
                await asyncio.wait(stuck)


@pytest.fixture(params=[None, f"test-breaker-{os.getpid()}"], ids=["buffers", "arena"])
async def bench(request: pytest.FixtureRequest, mortal: Hf3fsEmulator) -> AsyncIterator[Bench]:
    bench = Bench(mortal, request.param)
    await bench.open()
    yield bench
    await bench.close()


async def store(bench: Bench, *numbers: int) -> None:
    """By the tier itself, which a slow machine may take longer for than the writer's half second."""
    for number in numbers:
        key, payload = chunk(number)
        assert await bench.tier.write(key, payload, CHUNK_BYTES)


async def test_hanging_daemon_opens_the_readers_breaker(bench: Bench, mortal: Hf3fsEmulator) -> None:
    await store(bench, 1, 2, 3, 4)
    assert await bench.get(1)
    mortal.control.hang()
    assert not any(await asyncio.gather(*(bench.get(number) for number in (1, 2, 3, 4))))
    assert bench.reader.breakers() == {"hf3fs": "open"}
    mortal.control.resume()
    await bench.keep_trying(lambda: bench.get(1))
    await bench.until_none_is_stuck()
    engine = bench.tier.io.engine
    assert engine is not None
    await until(engine, lambda: engine.in_flight == 0)
    for number in (1, 2, 3, 4):
        assert await bench.get(number)
    assert bench.reader.breakers() == {"hf3fs": "closed"}
    bench.cpu.clear()
    assert bench.cpu.obtainable == bench.cpu.pool.count, "every slot is back"


async def test_hanging_daemon_opens_the_writers_breaker(bench: Bench, mortal: Hf3fsEmulator) -> None:
    mortal.control.hang()
    for number in range(1, 7):
        await bench.put(number)
    assert await flushed(bench.writer, 20.0)
    assert bench.writer.breaker.state.value != "closed", "open, or a probe hangs"
    assert bench.writer.counters.written == 0
    mortal.control.resume()

    async def written() -> bool:
        await bench.put(50)
        await flushed(bench.writer, 1.0)
        return bench.tier.contains(chunk(50)[0])

    await bench.keep_trying(written)
    await bench.until_none_is_stuck()
    assert bench.writer.breaker.state.value == "closed"
    assert await bench.get(50)
    bench.cpu.clear()
    assert bench.cpu.obtainable == bench.cpu.pool.count


async def test_restarted_daemon_is_taken_back(bench: Bench, mortal: Hf3fsEmulator) -> None:
    await store(bench, 1, 2, 3, 4)
    mortal.kill()
    await asyncio.gather(*(bench.get(number) for number in (1, 2, 3, 4)))
    await asyncio.to_thread(mortal.restart)
    await bench.keep_trying(lambda: bench.get(1))
    for number in (2, 3, 4):
        assert await bench.get(number)
    await bench.until_none_is_stuck()
    bench.cpu.clear()
    assert bench.cpu.obtainable == bench.cpu.pool.count
