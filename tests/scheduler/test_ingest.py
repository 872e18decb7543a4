"""Puts from host memory that compete for slots."""

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.scheduler.conftest import SLOTS, Bench, items, now
from tests.scheduler.held import until
from tiercache.core.keys import ChunkKey
from tiercache.memory.slots import WRITE, Purpose
from tiercache.payloads import PlainCopy, source_of
from tiercache.scheduler.ingest import Ingest
from tiercache.scheduler.writer import FanOut
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES


@pytest.fixture
def path(bench: Bench) -> Ingest:
    return bench.ingest(FanOut([]))


async def test_puts_that_overlap_do_not_wait_for_one_another(bench: Bench, path: Ingest) -> None:
    """Slots come free one at a time, and there are fewer than the puts need, so a put that waits must hold none."""
    leases = [bench.make_hot(1000 + number) for number in range(SLOTS - bench.cpu.budget.floor)]
    puts = [asyncio.create_task(path.put(items(range(start, start + 8)), 10.0)) for start in range(0, 32, 8)]
    await until(lambda: len(bench.cpu.wait_queue.waiting[Purpose.WRITE]) >= len(puts))
    began_s = now()
    for lease in leases:
        lease.release()
        for _ in range(5):
            await asyncio.sleep(0)
    assert await asyncio.gather(*puts) == [8] * 4
    assert path.skipped == 0
    assert now() - began_s < 5.0, "the clock jumps when everybody waits"


@pytest.mark.parametrize("ends", ["fails", "is cancelled"])
async def test_what_is_stored_of_a_put_that_ends_early_is_a_prefix(bench: Bench, path: Ingest, ends: str) -> None:
    copying, go_on = threading.Event(), threading.Event()

    def last(slot: np.ndarray) -> None:
        copying.set()
        go_on.wait(10.0)
        if ends == "fails":
            raise OSError("the engine's memory is gone")

    some = items(range(20))
    some[19] = (some[19][0], CHUNK_BYTES, last)
    put = asyncio.create_task(path.put(some, 10.0))
    await until(copying.is_set)
    if ends == "is cancelled":
        put.cancel()
    go_on.set()
    (outcome,) = await asyncio.gather(put, return_exceptions=True)
    assert isinstance(outcome, OSError if ends == "fails" else asyncio.CancelledError)
    before = bench.cpu.prefix([key for key, _, _ in some])
    assert before == 16 or (before == 12 and ends == "is cancelled"), "two parts of four are under way at a time"
    assert [bench.cpu.contains(key) for key, _, _ in some] == [True] * before + [False] * (20 - before)


def ends_at_once(put: Coroutine[Any, Any, int]) -> bool:
    """Whether it never waits. One that does is called off."""
    try:
        put.send(None)
    except StopIteration:
        return True
    put.close()
    return False


def is_hot(bench: Bench, key: ChunkKey, payload: np.ndarray) -> None:
    lease = bench.cpu.lease(key)
    assert lease is not None
    with lease:
        assert np.array_equal(lease.view, payload)


@pytest.mark.parametrize(
    "numbers",
    [[100, 101, 0, 1], [100, 100, 101, 100], [100, 0, 0, 101, 1, 1, 102], [100, 31, 101, 30]],
    ids=["the coldest are hot", "named twice", "both", "the warmest are hot"],
)
async def test_put_into_a_full_cache_evicts_for_new_chunks_alone(bench: Bench, path: Ingest, numbers: list[int]) -> None:
    bench.keep_hot(range(SLOTS))
    await path.put(items(numbers), 1.0)
    for number in numbers:
        is_hot(bench, *chunk(number))
    assert path.skipped == 0
    assert bench.cpu.statistics().evicted == len({number for number in numbers if number >= SLOTS})


async def test_chunks_that_are_named_again_count_once(bench: Bench, path: Ingest) -> None:
    """In one part, in parts that are copied at the same time, and in one that comes after them."""
    numbers = [0, 0, 1, 2, 3, 0, 4, 4, 5, 6, 7, 0, 8]
    assert await path.put(items(numbers), 10.0) == 9
    assert await path.put(items(numbers), 10.0) == 9, "all of them are hot by now"
    assert bench.cpu.statistics().writes == 9


async def test_few_bytes_of_our_own_memory_need_no_thread(bench: Bench, path: Ingest) -> None:
    def put(number: int) -> Coroutine[Any, Any, int]:
        key, payload = chunk(number, 32 * 1024)
        return path.put([(key, *source_of(payload[: 32 * 1024].copy()))], 10.0)

    assert ends_at_once(put(1)) and ends_at_once(put(2))
    await asyncio.sleep(0)
    assert ends_at_once(put(3))
    for number in range(1, 4):
        is_hot(bench, *chunk(number, 32 * 1024))


async def test_what_is_more_than_a_turn_may_copy_goes_to_a_thread(bench: Bench, path: Ingest) -> None:
    def put(number: int) -> Coroutine[Any, Any, int]:
        key, payload = chunk(number)
        return path.put([(key, *source_of(payload.copy()))], 10.0)

    first, second = asyncio.ensure_future(put(1)), asyncio.ensure_future(put(2))
    await asyncio.sleep(0)
    assert first.done() and not second.done()
    assert bench.fillers.unfinished == 1
    assert await asyncio.gather(first, second) == [1, 1]


def test_what_may_block_is_left_to_threads(tmp_path: Path) -> None:
    (tmp_path / "payload").write_bytes(bytes(4096))
    mapped = np.memmap(tmp_path / "payload", np.uint8)
    for own in (bytes(100), np.zeros((4, 25), np.float16), np.zeros(200, np.uint8)[100:]):
        assert isinstance(source_of(own)[1], PlainCopy)
    for other in (mapped, np.asarray(mapped), memoryview(mapped), np.zeros((4, 50), np.uint8)[:, ::2]):
        assert not isinstance(source_of(other)[1], PlainCopy)


async def test_a_prefix_may_follow_a_chunk_that_was_passed_over_since_it_is_held(bench: Bench, path: Ingest) -> None:
    with bench.make_hot(0):
        assert await path.put(items(range(1000, 1000 + 2 * SLOTS)), 1.0) == 2 * SLOTS
        assert await path.put(items(range(6)), 1.0, prefix=True) == 6
    assert bench.cpu.prefix([key for key, _, _ in items(range(6))]) == 6


async def test_without_a_hot_cache_and_tiers_a_put_leaves_nothing(bench: Bench) -> None:
    bench.cpu.keep = False
    assert await bench.ingest(FanOut([])).put(items(range(6)), 1.0) == 6
    assert bench.cpu.pool.free == SLOTS and not any(bench.cpu.budget.held)


async def test_a_hot_chunk_forgotten_while_others_of_its_put_are_copied_does_not_count(bench: Bench, path: Ingest) -> None:
    bench.make_hot(1).release()
    copying, go_on = threading.Event(), threading.Event()

    def slow(slot: np.ndarray) -> None:
        copying.set()
        assert go_on.wait(10.0)

    put = asyncio.create_task(path.put([*items([1]), (chunk(2)[0], CHUNK_BYTES, slow)], 10.0))
    await asyncio.to_thread(copying.wait, 10.0)
    assert bench.cpu.forget(chunk(1)[0])
    go_on.set()
    assert await put == 1


@pytest.mark.parametrize("known", [{}, {chunk(3)[0]: chunk(2)[0]}], ids=["single", "a prefix"])
async def test_of_a_chunk_that_came_meanwhile_the_first_copy_stays(bench: Bench, known: dict[ChunkKey, ChunkKey]) -> None:
    keys = [chunk(number)[0] for number in (2, 3, 4)]
    slots = bench.cpu.try_reserve_all(keys)
    with bench.make_hot(3) as first:
        for key, slot in slots.items():
            bench.cpu.publish(key, slot, CHUNK_BYTES, WRITE, known.get(key)).release()
        lease = bench.cpu.lease(keys[1])
        assert lease is not None
        with lease:
            assert np.shares_memory(lease.view, first.view)
    assert bench.cpu.prefix(keys) == 3
    assert bench.cpu.statistics().writes == 3
