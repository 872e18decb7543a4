"""Open a tier for the time of a block, wait for something, and fail as a device does."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from tiercache.tiers.base import Tier

AnyTier = TypeVar("AnyTier", bound=Tier)


@asynccontextmanager
async def open_tier(tier: AnyTier) -> AsyncIterator[AnyTier]:
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def fails(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))
