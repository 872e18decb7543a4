"""Open a tier for the time of a block, wait for something, and fail as a device does."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from tiercache.tiers.base import Tier
from tiercache.tiers.files.tier import FileTier

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


async def refreshed(tier: FileTier) -> None:
    """Wait until the index includes the changes of other instances before this call."""
    await tier.scanned()
    for refresher in tier.lookup.refreshers.values():
        wanted, pause_s = refresher.begun + 1, 0.001
        refresher.hint()
        while refresher.ended < wanted:
            await asyncio.sleep(pause_s)
            pause_s *= 2


def fails(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))
