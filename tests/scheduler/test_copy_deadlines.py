"""Public calls end by their deadlines while sources and sinks of others keep the copying threads."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import numpy as np
import pytest

from tests.scheduler.held import CHUNK_BYTES, OLD, found, key, opened, until
from tiercache import TierCache
from tiercache.errors import TierUnavailable
from tiercache.payloads import Source

LIMIT_S = 1000.0
"""Ends a call that would never return. The clock is virtual."""
CALLS = 8
"""More than there are copying threads for one direction."""


@pytest.fixture
async def cache() -> AsyncIterator[TierCache]:
    async with opened() as cache:
        yield cache


class SlowCopies:
    """Sources and sinks that block their thread until `go_on` is set. `begun` counts those that a thread has entered."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun = 0

    def __call__(self, memory: np.ndarray) -> None:
        self.begun += 1
        self.go_on.wait()
        if memory.flags.writeable:
            memory[:] = 1


async def occupy(calls: list[Coroutine[Any, Any, int]], copies: SlowCopies, threads: int = 2) -> list[asyncio.Task[int]]:
    """Return when the threads that run the calls are all blocked."""
    tasks = [asyncio.create_task(call) for call in calls]
    await until(lambda: copies.begun >= threads)
    return tasks


def put_slowly(cache: TierCache, number: int, copies: SlowCopies, deadline_s: float = LIMIT_S) -> Coroutine[Any, Any, int]:
    return cache.put_from([(key(number), CHUNK_BYTES, copies)], deadline_s=deadline_s)


def get_slowly(cache: TierCache, copies: SlowCopies, deadline_s: float = LIMIT_S) -> Coroutine[Any, Any, int]:
    return cache.get_to([key(1)], [copies], deadline_s=deadline_s)


async def occupy_with_puts(cache: TierCache, copies: SlowCopies) -> list[asyncio.Task[int]]:
    return await occupy([put_slowly(cache, 100 + number, copies) for number in range(CALLS)], copies)


async def took_s(call: Coroutine[Any, Any, Any]) -> tuple[Any, float]:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with asyncio.timeout(LIMIT_S):
        outcome = await call
    return outcome, loop.time() - began_s


async def test_hot_chunk_is_delivered_by_its_deadline_while_puts_have_slow_sources(cache: TierCache) -> None:
    assert await cache.put(key(1), OLD)
    copies = SlowCopies()
    puts = await occupy_with_puts(cache, copies)
    buffer = bytearray(CHUNK_BYTES)
    delivered, seconds = await took_s(cache.get_into([key(1)], [buffer], deadline_s=0.2))
    copies.go_on.set()
    await asyncio.gather(*puts)
    assert (delivered, bytes(buffer)) == (1, OLD)
    assert seconds <= 0.2


async def test_get_is_a_miss_at_its_deadline_while_other_sinks_keep_the_threads(cache: TierCache) -> None:
    assert await cache.put(key(1), OLD)
    copies = SlowCopies()
    gets = await occupy([get_slowly(cache, copies) for _ in range(CALLS)], copies)
    buffer = bytearray(CHUNK_BYTES)
    delivered, seconds = await took_s(cache.get_into([key(1)], [buffer], deadline_s=0.2))
    copies.go_on.set()
    assert await asyncio.gather(*gets) == [1] * CALLS
    assert (delivered, bytes(buffer)) == (0, bytes(CHUNK_BYTES))
    assert seconds == pytest.approx(0.2)


async def test_put_is_skipped_at_its_deadline_while_other_sources_keep_the_threads(cache: TierCache) -> None:
    copies, late = SlowCopies(), SlowCopies()
    puts = await occupy_with_puts(cache, copies)
    stored, seconds = await took_s(put_slowly(cache, 1, late, 0.2))
    copies.go_on.set()
    assert await asyncio.gather(*puts) == [1] * CALLS
    assert (stored, late.begun) == (0, 0)
    assert seconds == pytest.approx(0.2)
    assert cache.statistics().puts_skipped == 1
    assert await found(cache, key(1)) is None


async def test_cancelled_put_that_waits_for_a_thread_ends_at_once(cache: TierCache) -> None:
    copies, late = SlowCopies(), SlowCopies()
    puts = await occupy_with_puts(cache, copies)
    waiting = asyncio.create_task(put_slowly(cache, 1, late))
    await asyncio.sleep(0)
    waiting.cancel()
    _, seconds = await took_s(asyncio.wait([waiting]))
    copies.go_on.set()
    await asyncio.gather(*puts)
    assert waiting.cancelled() and late.begun == 0
    assert seconds == 0.0


async def test_put_without_time_to_wait_is_stored_when_threads_are_free(cache: TierCache) -> None:
    """What it waits for then are its own copies only, also those that come after the first."""

    def source(slot: np.ndarray) -> None:
        slot[:] = 7

    items: list[tuple[bytes, int, Source]] = [(key(number), CHUNK_BYTES, source) for number in range(24)]
    assert await cache.put_from(items, deadline_s=0.0) == 24
    buffers = [bytearray(CHUNK_BYTES) for _ in range(24)]
    assert await cache.get_into([key(number) for number in range(24)], buffers, deadline_s=0.0) == 24


@pytest.mark.parametrize("direction", ["put", "get"])
async def test_copy_that_hangs_is_an_error_and_its_memory_stays_taken(cache: TierCache, direction: str) -> None:
    assert await cache.put(key(1), OLD)
    copies, free = SlowCopies(), cache.cpu.obtainable
    call = put_slowly(cache, 2, copies, 1.0) if direction == "put" else get_slowly(cache, copies, 1.0)
    with pytest.raises(TierUnavailable, match="still in use"):
        await took_s(call)
    assert cache.cpu.obtainable == free - 1
    assert cache.statistics().stuck == 1
    copies.go_on.set()
    await until(lambda: cache.cpu.obtainable >= free)
    assert cache.statistics().stuck == 0


@pytest.mark.parametrize("direction", ["put", "get"])
@pytest.mark.parametrize("deadline_s", [-60.0, float("-inf")])
async def test_copy_has_time_although_its_deadline_is_long_past(cache: TierCache, direction: str, deadline_s: float) -> None:
    assert await cache.put(key(1), OLD)
    copies = SlowCopies()
    call = put_slowly(cache, 2, copies, deadline_s) if direction == "put" else get_slowly(cache, copies, deadline_s)
    (task,) = await occupy([call], copies, threads=1)
    await asyncio.sleep(1.0)
    copies.go_on.set()
    assert await task == 1
