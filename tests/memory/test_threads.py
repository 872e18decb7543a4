"""Workers: who goes on when a call has ended, and what they do when the machine has no thread left."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tiercache import Layout, TierCache
from tiercache.config import Config
from tiercache.errors import TierUnavailable
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.memory.workers import Call, Workers, to_the_end


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
    assert await asyncio.wait_for(workers.submit(int, 7), 5) == 7
    workers.close()


async def test_threads_that_there_are_run_the_calls_of_those_that_could_not_start() -> None:
    workers = Workers("test", 4)
    go_on = threading.Event()
    first = workers.submit(go_on.wait)
    with no_thread_to_be_had():
        others = [workers.submit(int, number) for number in range(5)]
    go_on.set()
    assert await asyncio.wait_for(asyncio.gather(first, *others), 5) == [True, *range(5)]
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
                    await asyncio.wait_for(cache.put(key, bytearray(65536), deadline_s=1.0), 5)
        assert cache.cpu.obtainable == cache.cpu.pool.count
        assert await asyncio.wait_for(cache.put(keys[3], bytearray(65536), deadline_s=1.0), 5)


def ended_calls(workers: Workers, *calls: Callable[[], object]) -> list[Call[object]]:
    """Calls that the only thread has ended by now, of which the loop has not heard yet."""
    begun = threading.Event()
    ended = [workers.submit(call) for call in calls]
    workers.submit(begun.set)
    assert begun.wait(10)
    return ended


async def test_who_waits_to_the_end_goes_on_before_the_loop_looks_for_anything_else() -> None:
    workers = Workers("test", 1)
    go_on, order = threading.Event(), list[str]()
    call = workers.submit(go_on.wait)
    call.add_done_callback(lambda _: order.append("callback"))

    async def wait() -> None:
        assert await to_the_end(call)
        order.append("waiter")

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait_for(asyncio.gather(call, waiting), 10)
    assert order == ["waiter", "callback"]
    workers.close()


async def test_who_goes_on_and_waits_for_the_next_call_does_not_keep_the_loop() -> None:
    workers = Workers("test", 1)
    order = list[str]()

    async def wait_again_and_again() -> None:
        (call,) = ended_calls(workers, int)
        for _ in range(3):
            await to_the_end(call)
            order.append("waiter")
            asyncio.get_running_loop().call_soon(order.append, "others")
            (call,) = ended_calls(workers, int)

    await asyncio.wait_for(wait_again_and_again(), 10)
    assert order[:4] == ["waiter", "others"] * 2
    workers.close()


async def test_who_waits_to_the_end_does_so_though_the_result_was_given_up() -> None:
    workers = Workers("test", 1)
    go_on = threading.Event()
    call = workers.submit(go_on.wait)
    waiting = asyncio.create_task(to_the_end(call))
    await asyncio.sleep(0)
    call.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 10)
    workers.close()


def test_one_who_stops_the_loop_leaves_the_others_their_results() -> None:
    workers = Workers("test", 1)
    loop = asyncio.new_event_loop()

    async def interrupted() -> None:
        first, second = ended_calls(workers, int, int)

        async def stop() -> None:
            await to_the_end(first)
            raise KeyboardInterrupt

        others.append(loop.create_task(to_the_end(second)))
        await stop()

    others = list[asyncio.Task[object]]()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(interrupted())
    assert loop.run_until_complete(asyncio.wait_for(others[0], 10)) == 0
    workers.close()
    loop.close()


def test_arena_is_touched_by_the_threads_that_there_are() -> None:
    with no_thread_to_be_had():
        arena = Arena(ArenaSettings(size_bytes=256 << 20, threads=4))
    assert arena.memory.nbytes == 256 << 20
    arena.close()
