"""What the tests of the Weka tier share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.tiers.opened import open_tier
from tests.tiers.test_disk import FILE_BYTES, FINGERPRINT
from tiercache.core.keys import ChunkKey
from tiercache.testing import JumpingClockLoop, chunk
from tiercache.tiers.weka import WekaSettings, WekaTier


class JumpingPolicy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return JumpingClockLoop()


@asynccontextmanager
async def opened(directory: Path, cap_chunks: int = 64, **settings: object) -> AsyncIterator[WekaTier]:
    """A tier that has finished its first scan, with a cap of `cap_chunks` files and the directory that they lie in."""
    chosen = {"refresh_s": 5.0, "threads": 4, "direct": None} | settings
    cap_bytes = cap_chunks * FILE_BYTES + 4096
    tier = WekaTier(WekaSettings((directory,), cap_bytes, **chosen), FINGERPRINT)  # type: ignore[arg-type]
    async with open_tier(tier):
        await tier.refreshed()
        yield tier


def key_of(number: int) -> ChunkKey:
    return chunk(number)[0]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)
