"""Measure the lag of the event loop while the disk is busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from tiercache.bench.figures import Figures
from tiercache.bench.workload import MIB, Plan, config_of, layout_of, new_keys, payloads
from tiercache.cache import TierCache

_CHUNK_BYTES = 2 * MIB
_BEAT_S = 0.001


async def measure_loop(figures: Figures, plan: Plan) -> None:
    """Measure the lag of a timer that is due every millisecond: p99 and max of each run.

    `lag_*`: while puts saturate the disk: half an arena of chunks in the write queue, single puts waiting for room.
    """
    count = plan.count(_CHUNK_BYTES)
    sources = payloads(plan.sizes.source_bytes, _CHUNK_BYTES)
    config = config_of(max(16, count // 2) * _CHUNK_BYTES, plan.directory / "loop", 8 * count * _CHUNK_BYTES)
    async with TierCache.open(config, layout_of(_CHUNK_BYTES)) as cache:

        async def saturate(keys: list[bytes]) -> None:
            for number, key in enumerate(keys):
                await cache.put(key, sources[number % len(sources)])
            await cache.flush(120)

        for pair in range(plan.pairs):
            plan.progress(f"loop, run {pair + 1} of {plan.pairs}")
            keys = new_keys(count)
            busy = await lags(saturate(keys))
            figures.add("loop.lag_p99_ms", p99(busy) * 1e3)
            figures.add("loop.lag_max_ms", busy[-1] * 1e3)
            await cache.forget(keys)


async def lags(work: Coroutine[Any, Any, Any], clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Return the sorted lags in seconds of a heartbeat while `work` runs. A beat is due one period after the previous
    beat ran.

    The default clock is not the loop's, since uvloop's has a resolution of a millisecond.
    """
    loop = asyncio.get_running_loop()
    found: list[float] = []
    handle: asyncio.TimerHandle

    def beat(due_s: float) -> None:
        nonlocal handle
        now_s = clock()
        found.append(max(0.0, now_s - due_s))
        handle = loop.call_later(_BEAT_S, beat, now_s + _BEAT_S)

    handle = loop.call_later(_BEAT_S, beat, clock() + _BEAT_S)
    try:
        await work
    finally:
        handle.cancel()
    return sorted(found) or [0.0]


def p99(values: list[float]) -> float:
    return values[len(values) * 99 // 100]
