"""Faults of puts from and gets into device memory: slots come back after cancellation, failures and hung copies."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.device.twin import TwinDriver
from tests.gds.conftest import FINGERPRINT
from tests.scheduler.conftest import flushed
from tiercache.core.keys import ChunkKey
from tiercache.device.device import Device
from tiercache.device.driver import Stream
from tiercache.errors import DeviceError, LayoutError
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.memory.slots import SlotPool
from tiercache.memory.workers import Workers
from tiercache.scheduler.device_path import DevicePath
from tiercache.scheduler.reads import Reader, ReaderSettings
from tiercache.scheduler.writer import FanOut, TierWriter, WriterSettings
from tiercache.testing import FaultyTier, chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.cpu import CpuTier, StagingTier
from tiercache.tiers.gds import GdsSettings, GdsTier

SLOTS = 32


@dataclass
class Flat:
    """A chunk in one piece of the twin's memory. `paged` hides that, so that it needs a slot."""

    driver: TwinDriver
    memory: Any
    paged: bool = False

    @property
    def payload_bytes(self) -> int:
        return int(self.memory.numel())

    @property
    def flat(self) -> Any:
        return None if self.paged else self.memory

    def gather(self, chunk: Any, stream: Stream) -> None:
        self.driver.copy(chunk, self.memory, stream)

    def scatter(self, chunk: Any, stream: Stream) -> None:
        self.driver.copy(self.memory, chunk, stream)

    @property
    def content(self) -> np.ndarray:
        return self.memory.numpy()


class Bench:
    """The parts of a cache around a device path, with a tier that misbehaves on command."""

    def __init__(self, device: Device, place: Path, keep: bool) -> None:
        assert isinstance(device.driver, TwinDriver)
        self.driver = device.driver
        self.device = device
        self.copiers = Workers("copy", 1)
        self.cpu = CpuTier(SlotPool(Arena(ArenaSettings(SLOTS * CHUNK_BYTES)), CHUNK_BYTES), self.copiers, keep=keep)
        settings = GdsSettings((place,), 64 << 20, threads=2, way="posix", chunk_bytes=CHUNK_BYTES)
        self.tier = FaultyTier(GdsTier(settings, FINGERPRINT, device))
        self.staging = StagingTier(device, self.copiers)

    async def open(self) -> None:
        await self.cpu.open()
        await self.staging.open()
        await self.tier.open()
        self.writer = TierWriter(self.tier, WriterSettings(queue_bytes=SLOTS * CHUNK_BYTES, deadline_s=10.0))
        self.fan_out = FanOut([self.writer])
        self.host_reader = Reader(self.cpu, [self.staging, self.tier], ReaderSettings())
        self.device_reader = Reader(self.staging, [self.tier], ReaderSettings())
        self.path = DevicePath(self.staging, self.host_reader, self.device_reader, self.fan_out)

    async def close(self) -> None:
        self.tier.gate.set()
        await self.host_reader.close()
        await self.device_reader.close()
        await self.fan_out.close(self.soon(1.0))
        await self.tier.close()
        self.copiers.close()

    def source(self, number: int, *, paged: bool = False, kind: type[Flat] = Flat) -> tuple[ChunkKey, Flat]:
        key, payload = chunk(number)
        flat = kind(self.driver, self.driver.empty(CHUNK_BYTES), paged)
        flat.content[:] = payload
        return key, flat

    def sink(self, *, paged: bool = False) -> Flat:
        return Flat(self.driver, self.driver.empty(CHUNK_BYTES), paged)

    def soon(self, wait_s: float = 10.0) -> float:
        return asyncio.get_running_loop().time() + wait_s

    async def forget(self, key: ChunkKey) -> None:
        """As `TierCache.forget`."""

        def from_memory(keys: Sequence[ChunkKey]) -> None:
            for each in keys:
                self.cpu.forget(each)
                self.staging.forget(each)

        await self.fan_out.forget([key], 10.0, from_memory)

    async def put(self, *numbers: int, paged: bool = False, wait_s: float = 10.0) -> int:
        return await self.path.put([self.source(n, paged=paged) for n in numbers], None, self.soon(wait_s))

    async def store(self, *numbers: int) -> None:
        """Put chunks and wait until the writer is done with them."""
        await self.put(*numbers)
        await flushed(self.writer, 10.0)

    async def get(self, numbers: Sequence[int], sinks: list[Flat], after: Any = None, wait_s: float = 10.0) -> int:
        return await self.path.get([chunk(number)[0] for number in numbers], sinks, after, self.soon(wait_s))

    async def until_pending(self, count: int = 1) -> None:
        while self.device.in_flight < count:
            await asyncio.sleep(0)

    @property
    def whole(self) -> bool:
        """Nobody holds anything."""
        return (
            self.device.pool.free == self.device.pool.count
            and self.cpu.obtainable == self.cpu.pool.count
            and not any(self.cpu.budget.held)
            and not any(self.staging.budget.held)
        )

    async def until_whole(self) -> None:
        self.cpu.clear()
        async with asyncio.timeout(10):
            while not self.whole:
                await asyncio.sleep(0)


@pytest.fixture(params=[True, False], ids=["hot cache", "no hot cache"])
async def bench(request: pytest.FixtureRequest, device: Device, tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(device, tmp_path, request.param)
    await bench.open()
    yield bench
    await bench.close()


def held(stream: Stream) -> threading.Event:
    """Keep a stream of the twin where it is until the event is set."""
    released = threading.Event()
    stream.enqueue(released.wait)
    return released


async def test_batches_behind_copies_that_hang_end_by_their_deadline(bench: Bench) -> None:
    """A put has as many batches at a time as the device takes; later batches do not wait for the end of hung ones."""
    hold = held(bench.device.storing.stream)
    first = [asyncio.ensure_future(bench.put(number, paged=True)) for number in (1, 2, 3)]
    await bench.until_pending(3)
    began_s = bench.soon(0.0)
    assert await bench.put(4, paged=True, wait_s=0.3) == 0
    assert bench.soon(0.0) - began_s < 1.0
    assert bench.path.skipped == 1
    hold.set()
    assert await asyncio.gather(*first) == [1, 1, 1]
    assert await flushed(bench.writer, 10.0)
    await bench.until_whole()
    hold = held(bench.device.loading.stream)
    gets = [asyncio.ensure_future(bench.get([1], [bench.sink(paged=True)])) for _ in "abc"]
    await bench.until_pending(3)
    began_s = bench.soon(0.0)
    assert await bench.get([1], [bench.sink(paged=True)], wait_s=0.3) == 0
    assert bench.soon(0.0) - began_s < 1.0
    hold.set()
    assert await asyncio.gather(*gets) == [1, 1, 1]
    await bench.until_whole()


async def put_anew(bench: Bench) -> None:
    """Put the payload of the second chunk under the key of the first."""
    (key, _), (_, new) = bench.source(1), bench.source(2, paged=True)
    assert await bench.path.put([(key, new)], None, bench.soon()) == 1


async def is_new(bench: Bench) -> bool:
    """Return True if the first chunk has the payload of `put_anew`."""
    bench.cpu.clear()
    sink = bench.sink()
    return await bench.get([1], [sink]) == 1 and np.array_equal(sink.content, chunk(2)[1])


async def test_put_that_is_being_gathered_brings_nothing_back(bench: Bench) -> None:
    hold = held(bench.device.storing.stream)
    before = asyncio.ensure_future(bench.put(1, paged=True))
    await bench.until_pending()
    await bench.forget(chunk(1)[0])
    hold.set()
    assert await before == 0
    await put_anew(bench)
    assert await flushed(bench.writer, 10.0)
    assert await is_new(bench)
    await bench.until_whole()


@pytest.mark.parametrize("writing", [True, False], ids=["being written", "queued"])
async def test_staged_chunk_that_was_forgotten_is_not_found_nor_written(bench: Bench, writing: bool) -> None:
    key = chunk(1)[0]
    bench.tier.gate.clear()
    if not writing:
        places = bench.tier.traits.write_concurrency
        assert await bench.put(*range(10, 10 + places), paged=True) == places
        await bench.tier.until_entered(places)
    assert await bench.put(1, paged=True) == 1
    if writing:
        await bench.tier.until_entered(1)
    forgetting = asyncio.create_task(bench.forget(key))
    await asyncio.sleep(0)
    assert not bench.staging.contains(key) and not bench.cpu.contains(key)
    await put_anew(bench)
    bench.tier.gate.set()
    await forgetting
    assert await flushed(bench.writer, 10.0)
    assert bench.tier.contains(key), "flush says that it is written"
    assert await is_new(bench)
    await bench.until_whole()


@pytest.mark.parametrize("paged", [False, True])
async def test_cancelled_put_ends_only_when_nothing_reads_its_memory(bench: Bench, paged: bool) -> None:
    hold = held(bench.device.storing.stream)
    put = asyncio.ensure_future(bench.put(1, 2, 3, paged=paged))
    await bench.until_pending()
    put.cancel()
    await asyncio.sleep(0)
    put.cancel()  # impatience does not help
    for _ in range(20):
        await asyncio.sleep(0)
    assert not put.done()
    hold.set()
    with pytest.raises(asyncio.CancelledError):
        await put
    assert not bench.cpu.contains(chunk(1)[0])
    assert bench.whole


async def test_cancelled_get_ends_only_when_nothing_writes_its_memory(bench: Bench) -> None:
    await bench.store(1, 2, 3)
    sinks = [bench.sink(paged=number == 2) for number in (1, 2, 3)]
    hold = held(bench.device.loading.stream)
    get = asyncio.ensure_future(bench.get([1, 2, 3], sinks))
    await bench.until_pending()
    get.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not get.done()
    hold.set()
    with pytest.raises(asyncio.CancelledError):
        await get
    for sink in sinks:
        sink.content[:] = 7
    end = bench.driver.record(bench.device.loading.stream)
    await asyncio.to_thread(bench.driver.synchronize, end)
    assert all((sink.content == 7).all() for sink in sinks), "nothing came late"
    await bench.until_whole()


async def test_device_lost_in_the_middle_of_a_put_is_one_error(bench: Bench) -> None:
    hold = held(bench.device.storing.stream)
    put = asyncio.ensure_future(bench.put(1, 2, 3))
    await bench.until_pending()
    bench.driver.lose()
    hold.set()
    with pytest.raises(DeviceError, match="lost"):
        await put
    assert not bench.cpu.contains(chunk(1)[0]) and not bench.staging.contains(chunk(1)[0])
    assert bench.whole


async def test_device_lost_in_the_middle_of_a_get_is_one_error(bench: Bench) -> None:
    await bench.store(1, 2)
    hold = held(bench.device.loading.stream)
    get = asyncio.ensure_future(bench.get([1, 2], [bench.sink(), bench.sink(paged=True)]))
    while not bench.device.in_flight and not bench.host_reader.abandoned:
        await asyncio.sleep(0)
    bench.driver.lose()
    hold.set()
    (outcome,) = await asyncio.gather(get, return_exceptions=True)
    assert outcome == 0 or (isinstance(outcome, DeviceError) and outcome.lost)
    await bench.until_whole()


async def test_hung_tier_costs_its_own_chunks_and_no_others(bench: Bench) -> None:
    """Its slots stay with the work that hangs, also once the writer gave it up; when that ends they are back."""
    bench.writer.settings = WriterSettings(queue_bytes=SLOTS * CHUNK_BYTES, deadline_s=0.2)
    bench.tier.gate.clear()
    stored = await bench.put(*range(1, 41), wait_s=10.0 if bench.cpu.keep else 1.0)
    assert stored >= (40 if bench.cpu.keep else 8)
    sinks = [bench.sink() for _ in range(4)]
    keys = [chunk(number)[0] for number in (1, 2, 3, 4)]
    held = [bench.cpu.contains(key) or bench.staging.contains(key) for key in keys]
    delivered = await bench.get([1, 2, 3, 4], sinks, wait_s=1.0)
    assert delivered == (held + [False]).index(False)
    for number, sink in list(enumerate(sinks, start=1))[:delivered]:
        assert np.array_equal(sink.content, chunk(number)[1])
    bench.tier.gate.set()
    await flushed(bench.writer, 10.0)
    await bench.until_whole()


async def test_paged_chunk_that_finds_no_slot_is_skipped_and_counted(bench: Bench) -> None:
    slots = [bench.device.pool.take() for _ in range(bench.device.pool.count)]
    assert await bench.put(1, paged=True, wait_s=0.1) == 0
    assert bench.path.skipped == 1
    # one in one piece needs none, where there is a hot cache
    assert await bench.put(2, wait_s=0.1) == (1 if bench.cpu.keep else 0)
    for slot in slots:
        assert slot is not None
        bench.device.pool.give_back(slot)
    await flushed(bench.writer, 10.0)
    bench.cpu.clear()
    assert bench.whole


async def test_source_that_refuses_fails_its_batch_and_leaves_nothing(bench: Bench) -> None:
    class Refusing(Flat):
        def gather(self, chunk: Any, stream: Stream) -> None:
            raise LayoutError("no such block")

    first, second = bench.source(1, paged=True), bench.source(2, paged=True, kind=Refusing)
    with pytest.raises(LayoutError, match="no such block"):
        await bench.path.put([first, second], None, bench.soon())
    assert not bench.cpu.contains(first[0])
    assert bench.whole


async def test_sink_of_another_length_ends_the_prefix_and_is_not_written(bench: Bench) -> None:
    await bench.store(1, 2, 3)
    short = Flat(bench.driver, bench.driver.empty(4096).zero_())
    sinks = [bench.sink(), short, bench.sink()]
    assert await bench.get([1, 2, 3], sinks) <= 1
    assert not short.content.any()
    await bench.until_whole()


async def test_get_behind_a_busy_stream_gives_up_at_its_deadline_and_holds_up_nobody(bench: Bench) -> None:
    await bench.store(1, 2)
    busy = bench.driver.make_stream()
    hold = held(busy)
    after = bench.driver.record(busy)
    late, other = bench.sink(), bench.sink()
    late.content[:] = 7
    assert await bench.get([1], [late], after, 0.1) == 0
    waiting = asyncio.ensure_future(bench.get([1], [late], after))
    assert await bench.get([2], [other]) == 1
    assert np.array_equal(other.content, chunk(2)[1])
    assert (late.content == 7).all()
    hold.set()
    assert await waiting == 1
    assert np.array_equal(late.content, chunk(1)[1])


async def test_copies_are_enqueued_off_the_loop(bench: Bench) -> None:
    threads = set()

    class Watched(Flat):
        def gather(self, chunk: Any, stream: Stream) -> None:
            threads.add(threading.current_thread())
            super().gather(chunk, stream)

    assert await bench.path.put([bench.source(1, paged=True, kind=Watched)], None, bench.soon()) == 1
    assert threads and threading.main_thread() not in threads


async def test_host_slot_of_a_copy_that_hangs_is_not_used_again_before_it_ends(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.tier.gate.clear()
    assert await bench.put(1, paged=True) == 1
    bench.cpu.clear()
    monkeypatch.setattr("tiercache.device.device.LONGEST_COPY_S", 0.1)
    hold, reader = held(bench.device.storing.stream), Reader(bench.cpu, [bench.staging], ReaderSettings())
    assert await reader.fetch(chunk(1)[0], bench.soon(0.5)) is None
    while reader.in_flight:
        await asyncio.sleep(0)
    assert len(reader.abandoned) == 1
    assert bench.cpu.obtainable == bench.cpu.pool.count - 1
    hold.set()
    bench.tier.gate.set()
    await bench.until_whole()
