"""A caller that drops the coroutine of a call in the middle: nothing is left of it."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.test_cache import CHUNK_BYTES, is_whole, key, opened, payload
from tiercache import TierCache

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
