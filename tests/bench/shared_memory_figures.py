"""The shared memory tier, filled by another process, beside this process's own hot cache.

As a program of its own it is that other process: DIRECTORY COUNT SOURCE_BYTES.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from tiercache.bench.figures import Figures
from tiercache.bench.workload import (
    MIB,
    Plan,
    config_of,
    in_turn,
    items_of,
    layout_of,
    new_keys,
    payloads,
)
from tiercache.cache import TierCache
from tiercache.config import Config
from tiercache.core.header import file_bytes
from tiercache.core.keys import KEY_BYTES, ChunkKey
from tiercache.errors import TierCacheError
from tiercache.tiers.shared_memory import SharedMemoryTier

_CHUNK_BYTES = 2 * MIB
_SHARED_MEMORY = Path("/dev/shm")
_ARENA_CHUNKS = 64
"""Memory that the chunks of this tier do not pass through."""
_WRITER_S = 120
_UNMAPPED_S = 0.2
"""What unmapping all chunks in the background may take, before the next measurement begins."""


async def measure_shared_memory(figures: Figures, plan: Plan) -> None:
    """GB/s of `get_into` for 2 MiB chunks, and leases a second, in turn with the own hot cache.

    `shared_memory.first_get_gbps`: chunks that this process has not mapped yet, so with mapping and verification.
    `shared_memory.get_gbps`: the same ones again. `shared_memory.hot_get_gbps`: `get_into` of chunks in the own hot cache.
    `shared_memory.leases_per_s`, `shared_memory.hot_leases_per_s`: `async with cache.get(key)`, and a look at the view.
    """
    count = plan.count(_CHUNK_BYTES)
    sources = payloads(plan.sizes.source_bytes, _CHUNK_BYTES)
    keys, own = _keys(count), new_keys(count)
    places = [sources[number % len(sources)] for number in range(count)]
    first = sources[0].copy()
    with _directory() as directory:
        config = _config(directory, count)
        await asyncio.to_thread(_fill_elsewhere, directory, count, plan.sizes.source_bytes)
        hot_config = config_of(count * _CHUNK_BYTES * 5 // 4)
        async with (
            TierCache.open(hot_config, layout_of(_CHUNK_BYTES)) as hot,
            TierCache.open(config, layout_of(_CHUNK_BYTES)) as cache,
        ):
            tier = cache.tiers[0]
            assert isinstance(tier, SharedMemoryTier)
            await tier.scanned()
            await hot.put_from(items_of(own, sources))

            async def get_hot() -> None:
                figures.add("shared_memory.hot_get_gbps", await _get(hot, own, places))

            async def get_shared() -> None:
                tier.mappings.clear()
                await asyncio.sleep(_UNMAPPED_S)
                figures.add("shared_memory.first_get_gbps", await _get(cache, keys, places))
                figures.add("shared_memory.get_gbps", await _get(cache, keys, places))

            async def lease_hot() -> None:
                figures.add("shared_memory.hot_leases_per_s", await _leases(hot, own, plan.sizes.singles))

            async def lease_shared() -> None:
                figures.add("shared_memory.leases_per_s", await _leases(cache, keys, plan.sizes.singles))

            for pair in range(plan.pairs):
                plan.progress(f"shared memory tier, pair {pair + 1} of {plan.pairs}")
                await in_turn(pair, get_hot, get_shared)
                await in_turn(pair, lease_hot, lease_shared)
            assert np.array_equal(first, sources[0])
            assert cache.statistics().reader.hits["cpu"] == 0
    figures.compare("shared_memory.get_gbps", "shared_memory.hot_get_gbps")
    figures.compare("shared_memory.first_get_gbps", "shared_memory.get_gbps")
    figures.compare("shared_memory.leases_per_s", "shared_memory.hot_leases_per_s")


def _directory() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="tiercache-bench-", dir=_SHARED_MEMORY)
    except OSError as error:
        raise TierCacheError(f"{_SHARED_MEMORY} cannot be used: {error.strerror}") from error


def _config(directory: str, count: int) -> Config:
    cap_bytes = (count + 1) * file_bytes(_CHUNK_BYTES)
    return config_of(
        _ARENA_CHUNKS * _CHUNK_BYTES, shared_memory_path=directory, max_shared_memory_size=cap_bytes / 2**30
    )


def _keys(count: int) -> list[ChunkKey]:
    """The same in both processes."""
    return [number.to_bytes(KEY_BYTES, "big") for number in range(count)]


def _fill_elsewhere(directory: str, count: int, source_bytes: int) -> None:
    command = [sys.executable, "-m", __name__, directory, str(count), str(source_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_WRITER_S, check=False)
    if done.returncode:
        raise TierCacheError(f"the process that writes failed: {done.stderr.strip()[-500:]}")


async def _fill(directory: str, count: int, source_bytes: int) -> None:
    sources = payloads(source_bytes, _CHUNK_BYTES)
    keys = _keys(count)
    async with TierCache.open(_config(directory, count), layout_of(_CHUNK_BYTES)) as cache:
        items = items_of(keys, sources)
        for start in range(0, count, 16):
            await cache.put_from(items[start : start + 16])
        report = await cache.flush(_WRITER_S)
        if cache.tiers[0].prefix(keys) != count:
            raise TierCacheError(f"not all chunks were written: {report}")


async def _get(cache: TierCache, keys: list[ChunkKey], places: list[np.ndarray]) -> float:
    began = time.perf_counter()
    assert await cache.get_into(keys, places) == len(keys)
    return len(keys) * _CHUNK_BYTES / (time.perf_counter() - began) / 1e9


async def _leases(cache: TierCache, keys: list[ChunkKey], count: int) -> float:
    """The inverse of the median."""
    took = []
    for number in range(count):
        began = time.perf_counter()
        async with cache.get(keys[number % len(keys)]) as lease:
            assert lease is not None and lease.view is not None
        took.append(time.perf_counter() - began)
    return 1.0 / median(took)


if __name__ == "__main__":
    asyncio.run(_fill(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
