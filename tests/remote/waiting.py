"""Waiting until a server is well again."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tiercache.errors import TierFull, TierUnavailable

T = TypeVar("T")


async def eventually(work: Callable[[], Awaitable[T]], is_wanted: Callable[[T], bool] = lambda _: True) -> T:
    """Try again until it raises neither TierUnavailable nor TierFull, and its result is wanted."""
    async with asyncio.timeout(20):
        while True:
            try:
                if is_wanted(found := await work()):
                    return found
            except (TierUnavailable, TierFull):
                pass
            await asyncio.sleep(0.02)
