"""Several shared tiers: asked all at once, each with a health of its own, and none that takes another with it."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from tests.scheduler.conftest import Bench, now, release, soon
from tests.scheduler.held import OLD, found, opened, settle, tier
from tiercache.core.keys import ChunkKey
from tiercache.scheduler.reads import Reader, ReaderSettings
from tiercache.testing import FaultyTier, MemoryTier, chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.base import Traits

SETTINGS = ReaderSettings(deadline_s=5.0, probe_deadline_s=1.0)


class Server(MemoryTier):
    """Shared, and known only as far as it was asked. `asks_all`: also behind a gap, as remote tiers do."""

    def __init__(self, name: str, numbers: Sequence[int] = (), *, asks_all: bool = True, read_s: float = 0.0) -> None:
        super().__init__(name, Traits(durable=True, shared=True, read_concurrency=2, write_concurrency=2))
        for number in numbers:
            key, payload = chunk(number)
            self.chunks[key] = payload[:CHUNK_BYTES].tobytes()
        self.known: set[ChunkKey] = set()
        self.asked = 0
        self.asks_all = asks_all
        self.read_s = read_s

    def contains(self, key: ChunkKey) -> bool:
        return key in self.known

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        self.asked += 1
        for key in keys:
            if key in self.chunks:
                self.known.add(key)
            elif not self.asks_all:
                break
        return self.prefix(keys)

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        await asyncio.sleep(self.read_s)  # of the clock that jumps
        return await super().read(key, into)


class EachServer(Server):
    """One that can be asked about many chunks at once."""

    async def probe_each(self, keys: Sequence[ChunkKey]) -> list[bool]:
        await self.probe(keys)
        return [self.contains(key) for key in keys]


def keys_of(*numbers: int) -> list[ChunkKey]:
    return [chunk(number)[0] for number in numbers]


async def test_hung_one_of_three_costs_the_others_nothing(bench: Bench) -> None:
    first, hung, last = FaultyTier(Server("a", [1, 2])), FaultyTier(Server("b", [3])), FaultyTier(Server("c", [3, 4]))
    hung.gate.clear()
    reader = Reader(bench.cpu, [first, hung, last], SETTINGS)
    began = now()
    chunks, by_tier = await reader.lookup(keys_of(1, 2, 3, 4, 5))
    assert (chunks, by_tier) == (4, {"cpu": 0, "a": 2, "b": 0, "c": 2})
    assert now() - began == pytest.approx(1.0, abs=0.4), "the deadline, because only the hung one might have had 5"
    assert await reader.lookup(keys_of(1, 2, 3, 4)) == (4, {"cpu": 0, "a": 2, "b": 0, "c": 2})
    assert now() - began == pytest.approx(1.0, abs=0.4), "known to be somewhere: nobody is waited for"
    hung.gate.set()


async def test_tier_that_stopped_at_a_gap_is_asked_again_when_another_has_filled_it(bench: Bench) -> None:
    disk, server = Server("disk", [1, 2, 5, 6], asks_all=False), Server("server", [3, 4])
    chunks, by_tier = await Reader(bench.cpu, [disk, server], SETTINGS).lookup(keys_of(1, 2, 3, 4, 5, 6, 7))
    assert (chunks, by_tier) == (6, {"cpu": 0, "disk": 4, "server": 2})


async def test_a_chunk_that_leaves_the_hot_cache_during_a_lookup_was_found(bench: Bench) -> None:
    """A chunk that was read need not be in its tier's index: a probe or a scan adds it."""
    server = Server("disk", [1, 2, 3])
    disk = FaultyTier(server)
    reader = Reader(bench.cpu, [disk], SETTINGS)
    release(await reader.fetch(keys_of(2)[0], soon()))
    server.known.update(keys_of(1))
    disk.gate.clear()
    entered = disk.entered
    looking = asyncio.create_task(reader.lookup(keys_of(1, 2, 3, 4)))
    await disk.until_entered(entered + 1)
    assert bench.cpu.clear(keys_of(2)) == 1
    disk.gate.set()
    assert await looking == (3, {"cpu": 1, "disk": 2})


async def test_many_single_chunks_are_one_question_to_each_tier(bench: Bench) -> None:
    one, other = Server("a", [1, 5]), EachServer("b", [3])
    found = await Reader(bench.cpu, [one, other], SETTINGS).lookup_each(keys_of(*range(1, 7)))
    assert found == [True, False, True, False, True, False]
    assert other.asked == 1


async def test_single_chunks_are_looked_for_until_the_deadline_and_no_longer(bench: Bench) -> None:
    quick, hung = EachServer("a", [2]), FaultyTier(Server("b", [1]))
    hung.gate.clear()
    began = now()
    there = await Reader(bench.cpu, [hung, quick], SETTINGS).lookup_each(keys_of(*range(1, 100)))
    assert there == [number == 2 for number in range(1, 100)]
    assert now() - began == pytest.approx(1.0, abs=0.4)
    hung.gate.set()


async def test_hung_tier_is_left_alone_probed_by_one_and_taken_back(bench: Bench) -> None:
    server = Server("a", [1])
    hung = FaultyTier(server)
    hung.gate.clear()
    reader = Reader(bench.cpu, [hung], SETTINGS)
    for _ in range(3):
        assert (await reader.lookup(keys_of(1)))[0] == 0
    assert reader.breakers() == {"a": "open"}
    began = now()
    assert (await reader.lookup(keys_of(1)))[0] == 0
    assert now() == pytest.approx(began, abs=0.4), "an open breaker is not waited for"
    await asyncio.sleep(1.5)
    entered = hung.entered
    await asyncio.gather(*(reader.lookup(keys_of(1)) for _ in range(10)))
    assert hung.entered == entered + 1, "one lookup finds out whether it is well again, and the others do not wait"
    assert reader.breakers() == {"a": "open"}
    hung.gate.set()
    await asyncio.sleep(60.0)
    assert (await reader.lookup(keys_of(1)))[0] == 1
    assert reader.breakers() == {"a": "half-open"}
    release(await reader.fetch(keys_of(1)[0], soon()))
    assert reader.breakers() == {"a": "closed"}, "a read has succeeded"


async def test_get_goes_on_with_the_next_tier_when_patience_ends(bench: Bench) -> None:
    hung, server = FaultyTier(Server("a", [1])), Server("b", [1])
    hung.patience_s = 0.5
    hung.gate.clear()
    reader = Reader(bench.cpu, [hung, server], SETTINGS)
    began = now()
    lease = await reader.fetch(chunk(1)[0], began + 5.0)
    assert lease is not None and np.array_equal(lease.view, chunk(1)[1])
    assert now() - began == pytest.approx(0.5, abs=0.4)
    lease.release()
    hung.gate.set()
    await bench.let_go()
    assert not reader.abandoned


async def test_tier_slower_than_computing_is_not_asked_until_it_may_have_become_quick(bench: Bench) -> None:
    server = Server("a", range(1, 9), read_s=3.0)
    reader = Reader(bench.cpu, [server], ReaderSettings(deadline_s=10.0, recompute_s=1.0))
    assert (await reader.lookup(keys_of(1, 2)))[0] == 2, "nothing is known of its speed"
    release(await reader.fetch(chunk(1)[0], soon(10.0)))
    asked = server.asked
    assert await reader.lookup(keys_of(2, 3, 4)) == (0, {"cpu": 0, "a": 0})
    assert server.asked == asked
    assert await reader.fetch(chunk(2)[0], soon(10.0)) is None, "a get leaves it to the engine, too"
    assert (await reader.lookup(keys_of(1, 2)))[0] == 1, "what is hot is a hit whatever it came from"
    await asyncio.sleep(31.0)
    server.read_s = 0.1
    release(await reader.fetch(chunk(2)[0], soon(10.0)))
    assert (await reader.lookup(keys_of(3, 4)))[0] == 2


@pytest.mark.parametrize("error", [OSError, asyncio.CancelledError])
async def test_failing_tier_is_named_and_the_others_answer(
    bench: Bench, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Server):
        async def probe(self, keys: Sequence[ChunkKey]) -> int:
            raise error("by itself")

    reader = Reader(bench.cpu, [Broken("a"), Server("b", [1])], SETTINGS)
    for _ in range(3):
        assert (await reader.lookup(keys_of(1, 2)))[0] == 1
    assert "a: a lookup failed: by itself" in caplog.text
    assert reader.breakers() == {"a": "open", "b": "closed"}


async def test_short_lookups_find_out_about_a_hung_tier_as_well(bench: Bench) -> None:
    hung = FaultyTier(Server("a"))
    hung.gate.clear()
    reader = Reader(bench.cpu, [hung], ReaderSettings(deadline_s=10.0, probe_deadline_s=0.05))
    for _ in range(3):
        assert (await reader.lookup(keys_of(1)))[0] == 0
        questions = [task for task in asyncio.all_tasks() if task.get_name() == "tiercache-ask"]
        await asyncio.gather(*questions, return_exceptions=True)  # a question counts when it has been let go of
    assert reader.breakers() == {"a": "open"}, "or every lookup would wait to its end, for ever"
    hung.gate.set()


async def test_lookup_does_not_wait_for_a_tier_that_does_not_let_go_of_a_question(bench: Bench) -> None:
    class Deaf(Server):
        async def probe(self, keys: Sequence[ChunkKey]) -> int:
            try:
                await asyncio.sleep(100.0)
            except asyncio.CancelledError:
                await asyncio.sleep(100.0)
            return 0

    reader = Reader(bench.cpu, [Deaf("a"), Server("b", [1])], SETTINGS)
    began = now()
    assert (await reader.lookup(keys_of(1, 2)))[0] == 1
    assert now() - began == pytest.approx(1.0, abs=0.4)
    for task in asyncio.all_tasks():
        if task.get_name() == "tiercache-ask":
            await asyncio.wait([task])


async def deliver(reader: Reader, *numbers: int) -> tuple[int, float]:
    """How many of these chunks came, and after how long."""
    began = now()
    arrived = await reader.deliver(keys_of(*numbers), [lambda view: None for _ in numbers], began + 10.0)
    return arrived, now() - began


async def test_load_from_a_tier_that_has_become_slow_is_cut_short_and_nobody_follows_until_it_is_well(bench: Bench) -> None:
    """Two are read at a time, each in 10 ms; the engine computes a chunk in half a second. Then a read takes 80 times as
    long, and later it is well again."""
    server = Server("a", range(1, 30), read_s=0.01)
    reader = Reader(bench.cpu, [server], ReaderSettings(deadline_s=10.0, recompute_s=0.5))
    await reader.lookup(keys_of(*range(1, 30)))
    assert (await deliver(reader, 1, 2, 3, 4))[0] == 4
    server.read_s = 0.8
    arrived, took_s = await deliver(reader, 1, 5, 6, 7)
    assert arrived == 1, "what was there is used"
    assert took_s == pytest.approx(0.15, abs=0.05), "a tenth of what computing three chunks takes"
    arrived, took_s = await deliver(reader, 8, 9)
    assert (arrived, took_s) == (0, pytest.approx(0.0, abs=0.05)), "a read that hangs says enough"
    assert (await reader.lookup(keys_of(8, 9)))[0] == 0
    while reader.abandoned:
        await asyncio.sleep(0.1)
    assert (await reader.lookup(keys_of(5, 6)))[0] == 2, "what came late is kept"
    assert (await deliver(reader, 8, 9))[0] == 2, "less than computing the two takes"
    server.read_s = 0.01
    await asyncio.sleep(31.0)
    arrived, took_s = await deliver(reader, 10, 11, 12, 13)
    assert (arrived, took_s) == (4, pytest.approx(0.02, abs=0.05))


async def test_demand_takes_over_a_prefetch_that_waits_for_its_second_tier() -> None:
    keys, order = keys_of(1, 2, 3, 4), list[int]()

    async def get(number: int) -> None:
        assert await found(cache, keys[number]) == OLD
        order.append(number)

    async with opened("a", "b", concurrency=1) as cache, asyncio.TaskGroup() as gets:
        tier("b").chunks |= dict.fromkeys(keys, OLD)
        tier("b").hold("read")
        gets.create_task(get(0))
        await tier("b").until_entered("read")
        gets.create_task(get(1))
        cache.prefetch([keys[2]])
        await settle(40)
        for number in (2, 3):
            gets.create_task(get(number))
            await settle()
        tier("b").let_go()
    assert order == [0, 1, 2, 3]
