"""Turns at a tier."""

from __future__ import annotations

import asyncio

import pytest

from tiercache.core.budget import Purpose
from tiercache.scheduler.places import Places


async def test_turn_that_is_passed_over_while_it_is_cancelled_is_no_failure() -> None:
    places = Places(1)
    await places.acquire(Purpose.READ)
    waiting = asyncio.create_task(places.acquire(Purpose.PREFETCH))
    await asyncio.sleep(0)
    waiting.cancel()
    places.release(Purpose.READ)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert places.free == 1
