"""A caller that drops the coroutine of a call: closed in mid way, or collected. Nothing is left of it or raised."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.scheduler import held
from tests.test_cache import CHUNK_BYTES, is_whole, key, opened, payload
from tiercache import Config, Layout, TierCache
from tiercache.testing import JumpingClockLoop

KEYS = [key(number) for number in range(1, 9)]
CALLS: dict[str, Callable[[TierCache], Coroutine[Any, Any, object]]] = {
    "put_many": lambda cache: cache.put_many([key(n) for n in range(100, 140)], [payload(1)] * 40),
    "get_into": lambda cache: cache.get_into(KEYS, [np.empty(CHUNK_BYTES, np.uint8) for _ in KEYS]),
    "warm": lambda cache: cache.warm(KEYS),
    "lookup": lambda cache: cache.lookup_keys([*KEYS, key(99)]),
}


async def goes_on(call: Coroutine[Any, Any, object], steps: int) -> bool:
    """Run it until it waits for the `steps`-th time; False where it ends before that."""
    for step in range(steps):
        try:
            waiting = call.send(None)
        except StopIteration:
            return False
        if step == steps - 1:
            break
        if waiting is None:
            await asyncio.sleep(0)
            continue
        waiting._asyncio_future_blocking = False
        over = asyncio.Event()
        waiting.add_done_callback(lambda _, over=over: over.set())
        await over.wait()
    return True


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("steps", [1, 2, 3])
async def test_what_is_dropped_in_mid_way_gives_everything_back(tmp_path: Path, name: str, steps: int) -> None:
    async with opened(tmp_path) as cache:
        assert await cache.put_many(KEYS, [payload(number) for number in range(1, 9)]) == 8
        assert (await cache.flush()).complete
        for half in KEYS[4:]:
            cache.cpu.forget(half)  # the rest is read from the disk
        call = CALLS[name](cache)
        await goes_on(call, steps)
        call.close()
        await until(lambda: is_whole(cache))
        into = [np.empty(CHUNK_BYTES, np.uint8) for _ in KEYS]
        assert await cache.get_into(KEYS, into) == 8
        assert all(np.array_equal(into[n], payload(n + 1)) for n in range(8))


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", CALLS)
def test_what_is_collected_after_its_loop_says_nothing(tmp_path: Path, name: str) -> None:
    """As of a program that ends in the middle of it."""

    async def main() -> Coroutine[Any, Any, object]:
        async with opened(tmp_path, close_timeout_s=0.2) as cache:
            assert await cache.put_many(KEYS, [payload(number) for number in range(1, 9)]) == 8
            call = CALLS[name](cache)
            await goes_on(call, 1)
            return call

    call = asyncio.run(main())
    call.close()
    del call
    gc.collect()


async def test_what_is_copied_by_threads_for_a_dropped_call_is_no_error_of_the_loop() -> None:
    layout = Layout("m", chunk_tokens=16, bytes_per_token=65536)
    said: list[dict[str, Any]] = []
    async with TierCache.open(Config(max_local_cpu_size=0.1, chunk_size=16), layout) as cache:
        payloads = [np.full(layout.chunk_bytes, number, np.uint8) for number in range(8)]
        assert await cache.put_many(KEYS, payloads) == 8
        asyncio.get_running_loop().set_exception_handler(lambda _, about: said.append(about))
        call = cache.get_into(KEYS, [np.empty_like(one) for one in payloads])
        assert await goes_on(call, 1)
        call.close()
        del call
        await until(lambda: is_whole(cache))
        gc.collect()
    assert said == []


@pytest.mark.parametrize("name", ["lookup_keys", "lookup_each"])
def test_look_up_that_is_dropped_leaves_it_to_the_next_call_to_find_out_whether_the_tier_is_well(name: str) -> None:
    async def refuse() -> None:
        raise OSError("connection refused")

    async def main() -> None:
        async with held.opened("a") as cache:
            tier = held.tier("a")
            tier.chunks, tier.fate = {held.key(1): held.OLD}, refuse
            while cache.statistics().breakers["a"] != "open":
                assert await held.found(cache, held.key(1)) is None
            tier.fate = None
            await asyncio.sleep(1.5)  # the pause of the breaker, on a clock that jumps
            call = getattr(cache, name)([held.key(2)])
            assert await goes_on(call, 1)
            call.close()
            await asyncio.sleep(0)
            assert await held.found(cache, held.key(1)) == held.OLD

    with asyncio.Runner(loop_factory=JumpingClockLoop) as runner:
        runner.run(main())
