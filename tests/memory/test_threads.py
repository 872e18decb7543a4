"""Workers when the machine has no thread left: the limit of processes, or of memory, is reached."""

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tiercache import Layout, TierCache
from tiercache.config import Config
from tiercache.errors import TierUnavailable
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.memory.workers import Workers


@contextmanager
def no_thread_to_be_had() -> Iterator[None]:
    """The system refuses a thread with so large a stack, as it does when its limit is reached."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)


async def test_thread_that_could_not_start_does_not_count_and_the_next_call_starts_it() -> None:
    workers = Workers("test", 2)
    with no_thread_to_be_had():
        for _ in range(3):
            with pytest.raises(TierUnavailable, match="no thread.*can't start new thread"):
                workers.submit(int, 7)
    assert workers.unfinished == 0
    assert await asyncio.wait_for(workers.submit(int, 7), 60) == 7
    workers.close()


async def test_threads_that_there_are_run_the_calls_of_those_that_could_not_start() -> None:
    workers = Workers("test", 4)
    go_on = threading.Event()
    first = workers.submit(go_on.wait)
    with no_thread_to_be_had():
        others = [workers.submit(int, number) for number in range(5)]
    go_on.set()
    assert await asyncio.wait_for(asyncio.gather(first, *others), 60) == [True, *range(5)]
    assert workers.unfinished == 0
    workers.close()


async def test_put_while_no_thread_can_start_fails_at_once_holds_nothing_and_later_ones_store() -> None:
    layout = Layout("test-model", chunk_tokens=64, bytes_per_token=1024)
    config = Config.load(environ={}, overrides={"max_local_cpu_size": 2 / 1024})
    async with TierCache.open(config, layout) as cache:
        keys = [number.to_bytes(24, "big") for number in range(4)]
        with no_thread_to_be_had():
            for key in keys[:3]:
                with pytest.raises(TierUnavailable, match="no thread"):
                    await asyncio.wait_for(cache.put(key, bytearray(65536), deadline_s=1.0), 60)
        assert cache.cpu.obtainable == cache.cpu.pool.count
        assert await asyncio.wait_for(cache.put(keys[3], bytearray(65536), deadline_s=1.0), 60)


def test_arena_is_touched_by_the_threads_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    with no_thread_to_be_had():
        arena = Arena(ArenaSettings(size_bytes=256 << 20))
    assert arena.memory.nbytes == 256 << 20
    arena.close()
