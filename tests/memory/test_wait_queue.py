"""Waiters for a slot: what is left when one of them goes."""

import asyncio
from math import inf

import pytest

from tiercache.memory.slots import WRITE, WaitQueue

LARGE, SMALL = b"large", b"small"


@pytest.mark.parametrize("ends", ["is cancelled", "has waited long enough"])
async def test_waiter_that_goes_lets_those_behind_it_take_what_is_free(ends: str) -> None:
    queue = WaitQueue[bytes](lambda purpose, key: key if key == SMALL else None, lambda taken, purpose: None)
    until_s = inf if ends == "is cancelled" else asyncio.get_running_loop().time() + 0.05
    large = asyncio.create_task(queue.wait(WRITE, lambda: until_s, LARGE))
    small = asyncio.create_task(queue.wait(WRITE, lambda: inf, SMALL))
    await asyncio.sleep(0)
    assert len(queue.waiting[WRITE]) == 2, "first come, first served"
    if ends == "is cancelled":
        large.cancel()
    async with asyncio.timeout(5):
        assert await small == SMALL
    assert large.cancelled() if ends == "is cancelled" else large.result() is None
    assert not any(queue.waiting)
