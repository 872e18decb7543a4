"""Measure a restart over many chunk files."""

from __future__ import annotations

import asyncio
import os
import time

import numpy as np

from tiercache.bench.figures import Figures
from tiercache.bench.workload import MIB, Plan, config_of, layout_of, new_keys
from tiercache.cache import TierCache
from tiercache.core.header import file_bytes
from tiercache.tiers.disk import DiskTier

_CHUNK_BYTES = 64 * 1024
_SERVED = 8


async def measure_restart(figures: Figures, plan: Plan) -> None:
    """Measure `restart.index_100k_s`: from opening the cache until all files are in the index, oldest first.

    All but a few files are sparse: indexing reads names and sizes, never payloads. Directory entries are in the
    kernel's caches, as after a restart of the process. Meanwhile chunks are read from the disk one after another:
    `restart.slowest_get_ms`. `lookup.disk_keys_per_s`: `cache.lookup_keys` of chunks that are only on disk.
    """
    place = plan.directory / "restart"
    files = plan.sizes.files
    config = config_of(64 * MIB, place, files * 2 * (_CHUNK_BYTES + 16384))
    layout = layout_of(_CHUNK_BYTES)
    served = new_keys(_SERVED)
    async with TierCache.open(config, layout) as cache:
        payload = np.ones(_CHUNK_BYTES, np.uint8)
        for key in served:
            await cache.put(key, payload)
        await cache.flush(60)
        (disk,) = cache.tiers
        assert isinstance(disk, DiskTier)
        keys = new_keys(files - len(served))
        paths = [disk.path(key) for key in keys]
    plan.progress(f"making {files:,} chunk files")
    await asyncio.to_thread(_make_files, paths)
    plan.progress(f"indexing {files:,} chunk files")
    began = time.perf_counter()
    async with TierCache.open(config, layout) as cache:
        (disk,) = cache.tiers
        assert isinstance(disk, DiskTier)
        index_complete = disk.scanned()
        slowest = 0.0
        scanning = asyncio.ensure_future(index_complete)
        while not scanning.done():
            for key in served:
                asked = time.perf_counter()
                async with cache.get(key) as lease:
                    assert lease is not None
                slowest = max(slowest, time.perf_counter() - asked)
            cache.clear_hot()
            await asyncio.wait([scanning], timeout=0.01)
        figures.add("restart.index_100k_s", time.perf_counter() - began)
        figures.add("restart.slowest_get_ms", slowest * 1e3)
        assert disk.statistics().resident == files, disk.statistics()
        asked_for = keys[: plan.sizes.lookups]
        for _ in range(plan.pairs):
            began = time.perf_counter()
            hit = await cache.lookup_keys(asked_for)
            figures.add("lookup.disk_keys_per_s", len(asked_for) / (time.perf_counter() - began))
            assert hit.by_tier["disk"] == len(asked_for), hit


def _make_files(paths: list[str]) -> None:
    for path in paths:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, file_bytes(_CHUNK_BYTES))
        os.close(descriptor)
