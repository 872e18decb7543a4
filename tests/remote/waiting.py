"""Waiting until a server is well again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tiercache.errors import TierUnavailable

T = TypeVar("T")


async def eventually(work: Callable[[], Awaitable[T]]) -> T:
    """Try again until it does not raise TierUnavailable. The pauses spare the processor."""
    async with asyncio.timeout(15):
        while True:
            try:
                return await work()
            except TierUnavailable:
                await asyncio.sleep(0.02)
