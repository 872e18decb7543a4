"""A hot cache of eight slots over tiers that misbehave on command, on a clock that jumps."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from tests.scheduler.held import is_whole, opened
from tiercache import TierCache
from tiercache.core.keys import ChunkKey
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.memory.slots import Lease, Purpose, SlotPool
from tiercache.memory.workers import Workers
from tiercache.payloads import Source
from tiercache.scheduler.ingest import Ingest
from tiercache.scheduler.writer import FanOut, TierWriter
from tiercache.testing import FaultyTier, JumpingClockLoop, MemoryTier, chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.base import Traits
from tiercache.tiers.cpu import CpuTier

SLOTS = 32


class JumpingPolicy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return JumpingClockLoop()


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return JumpingPolicy()


@dataclass
class Bench:
    """The parts under test, and short ways to use them."""

    cpu: CpuTier
    tier: FaultyTier
    memory: MemoryTier
    fillers: Workers

    def ingest(self, fan_out: FanOut) -> Ingest:
        return Ingest(self.cpu, fan_out, self.fillers)

    def keep_on_tier(self, numbers: range) -> list[ChunkKey]:
        for number in numbers:
            key, payload = chunk(number)
            self.memory.chunks[key] = payload[:CHUNK_BYTES].tobytes()
        return [chunk(number)[0] for number in numbers]

    def keep_hot(self, numbers: range) -> None:
        for number in numbers:
            self.make_hot(number).release()

    def make_hot(self, number: int) -> Lease:
        key, payload = chunk(number)
        slot = self.cpu.try_reserve(Purpose.WRITE)
        assert slot is not None
        self.cpu.pool.view(slot, CHUNK_BYTES)[:] = payload
        return self.cpu.publish(key, slot, CHUNK_BYTES, Purpose.WRITE)

    def is_whole(self) -> bool:
        return is_whole(self.cpu)

    async def let_go(self) -> None:
        """The tier goes on. Ends when nobody holds anything."""
        self.tier.gate.set()
        async with asyncio.timeout(10.0):
            while not self.is_whole():
                await asyncio.sleep(0.01)


@pytest.fixture
def bench() -> Iterator[Bench]:
    """At the end of a test nobody holds anything."""
    pool = SlotPool(Arena(ArenaSettings(size_bytes=SLOTS * CHUNK_BYTES)), CHUNK_BYTES)
    copiers, fillers = Workers("copy", 2), Workers("fill", 2)
    memory = MemoryTier("disk", Traits(durable=True, read_concurrency=2, write_concurrency=2))
    bench = Bench(CpuTier(pool, copiers), FaultyTier(memory), memory, fillers)
    yield bench
    copiers.close()
    fillers.close()
    assert bench.is_whole(), "somebody holds a slot, or a budget counts one"


@pytest.fixture
async def cache() -> AsyncIterator[TierCache]:
    """Above one tier, "a"."""
    async with opened("a") as cache:
        yield cache


def now() -> float:
    return asyncio.get_running_loop().time()


def soon(seconds: float = 5.0) -> float:
    return now() + seconds


def items(numbers: Sequence[int]) -> list[tuple[ChunkKey, int, Source]]:
    """What a put takes."""

    def source_of(number: int) -> Source:
        return lambda slot: np.copyto(slot, chunk(number)[1])

    return [(chunk(number)[0], CHUNK_BYTES, source_of(number)) for number in numbers]


def expect(number: int) -> Callable[[np.ndarray], None]:
    """A sink that insists on the right bytes."""

    def sink(view: np.ndarray) -> None:
        assert np.array_equal(view, chunk(number)[1])

    return sink


async def flushed(writer: TierWriter, timeout_s: float) -> bool:
    """Wait until all is written or given up; False when the time ran out first."""
    return (await FanOut([writer]).flush(timeout_s)).complete


def release(*leases: Lease | None) -> None:
    """Release leases. None of them may be None."""
    for lease in leases:
        assert lease is not None
        lease.release()
