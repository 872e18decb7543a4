"""Turns at something scarce."""

import asyncio

import pytest

from tiercache.core.budget import Purpose
from tiercache.scheduler.places import Places


async def test_a_turn_that_is_cancelled_while_a_place_is_given_back_ends_as_cancelled() -> None:
    places = Places(1)
    await places.acquire(Purpose.READ)
    waiting = asyncio.create_task(places.acquire(Purpose.READ))
    await asyncio.sleep(0)
    waiting.cancel()
    places.release(Purpose.READ)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert places.free == 1
