"""Many moves, some at a time, and how late the loop is meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from tiercache.bench.loop_figures import lags

T = TypeVar("T")
L = TypeVar("L")


async def in_lanes(items: Iterable[T], lanes: Iterable[L], move: Callable[[T, L], Awaitable[object]]) -> None:
    """Move all items. Each lane takes the next one when its last one is moved."""
    left = iter(items)

    async def run(lane: L) -> None:
        for item in left:
            await move(item, lane)

    await asyncio.gather(*(run(lane) for lane in lanes))


async def timed_in_lanes(
    items: Iterable[T], lanes: Iterable[L], move: Callable[[T, L], Awaitable[object]]
) -> tuple[float, list[float]]:
    """Do what `in_lanes` does. Return the seconds that it took, and the sorted lags of the loop in seconds."""
    began_s = time.perf_counter()
    late_s = await lags(in_lanes(items, lanes, move))
    return time.perf_counter() - began_s, late_s
