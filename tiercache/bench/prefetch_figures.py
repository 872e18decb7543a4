"""Measure prefetches from disk beside plain files of the same size, and their cost for a demand read."""

from __future__ import annotations

import asyncio
import time

from tiercache.bench.ceilings import FileCeiling
from tiercache.bench.figures import Figures
from tiercache.bench.workload import (
    Plan,
    config_of,
    in_turn,
    items_of,
    layout_of,
    make_cold,
    new_keys,
    payloads,
    size_name,
)
from tiercache.cache import TierCache

_REQUESTS = 8
_DEMANDS = 8


async def measure_prefetch(figures: Figures, plan: Plan, chunk_bytes: int) -> None:
    """Measure `prefetch.disk_gbps.*` and `prefetch.demand_*_ms`.

    `prefetch.disk_gbps.*`: eight concurrent prefetches, of chunks that are in no memory, until all are hot.
    `prefetch.demand_alone_ms`: a get of such a chunk while nothing else happens. `prefetch.demand_during_ms`: the same
    while a prefetch is in flight.
    """
    size, count = size_name(chunk_bytes), plan.count(chunk_bytes)
    sources = payloads(plan.sizes.source_bytes, chunk_bytes)
    raw, ours = plan.directory / "raw", plan.directory / "ours"
    raw.mkdir(parents=True, exist_ok=True)
    layout = layout_of(chunk_bytes)
    config = config_of(
        (count + 8) * (chunk_bytes + 4096) * 2, ours, 4 * count * (chunk_bytes + 16384), prefetch_share=0.75
    )
    ceiling = FileCeiling(raw, chunk_bytes, count, config.disk_io_threads)
    async with TierCache.open(config, layout) as cache:
        keys = new_keys(count)
        await cache.put_from(items_of(keys, sources))
        await cache.flush(120)
        ceiling.write(durable=False)

        async def read_plain() -> None:
            figures.add(f"ceiling.prefetch_read_gbps.{size}", ceiling.read())

        async def prefetch() -> None:
            make_cold(cache, keys)
            began = time.perf_counter()
            handles = [cache.prefetch(keys[number::_REQUESTS]) for number in range(_REQUESTS)]
            found = [await handle for handle in handles]
            took = time.perf_counter() - began
            assert sum(progress.promoted for progress in found) == count, found
            figures.add(f"prefetch.disk_gbps.{size}", count * chunk_bytes / took / 1e9)

        for pair in range(plan.pairs):
            plan.progress(f"prefetching, {size}, pair {pair + 1} of {plan.pairs}")
            await in_turn(pair, read_plain, prefetch)
            await _measure_demand(figures, cache, keys, size)
    ceiling.close()
    figures.compare(f"prefetch.disk_gbps.{size}", f"ceiling.prefetch_read_gbps.{size}")
    figures.compare(f"prefetch.demand_during_ms.{size}", f"prefetch.demand_alone_ms.{size}")


async def _measure_demand(figures: Figures, cache: TierCache, keys: list[bytes], size: str) -> None:
    wanted, others = keys[-_DEMANDS:] if len(keys) > 2 * _DEMANDS else keys[-1:], keys[:-_DEMANDS] or keys[:-1]
    make_cold(cache, keys)
    for key in wanted:
        figures.add(f"prefetch.demand_alone_ms.{size}", await _get_ms(cache, key))
    make_cold(cache, keys)
    handle = cache.prefetch(others)
    for key in wanted:
        before = handle.progress.promoted
        while handle.progress.promoted < before + 2 and not handle.done:  # noqa: ASYNC110 - no event reports each chunk
            await asyncio.sleep(0)
        if handle.done:
            break
        figures.add(f"prefetch.demand_during_ms.{size}", await _get_ms(cache, key))
    await handle


async def _get_ms(cache: TierCache, key: bytes) -> float:
    began = time.perf_counter()
    async with cache.get(key) as lease:
        took = time.perf_counter() - began
        assert lease is not None
    return took * 1e3
