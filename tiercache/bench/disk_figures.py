"""Measure the disk tier beside plain files of the same size."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

import numpy as np

from tiercache.bench.ceilings import FileCeiling
from tiercache.bench.figures import Figures
from tiercache.bench.workload import (
    Measurement,
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


async def measure_disk(
    figures: Figures,
    plan: Plan,
    chunk_bytes: int,
    writes: Sequence[Measurement] = (),
    reads: Sequence[Measurement] = (),
) -> None:
    """Measure GB/s with the default threads of `disk_io_threads` on both sides.

    The tier writes with twice as many; plain files gain nothing from that. Deletions between measurements are synced
    before the next. `disk.put_durable_gbps`: from the caller's memory until `flush` reports that all is written: copy,
    checksum, file with fdatasync, name.
    `disk.get_cold_gbps`: `warm` of chunks that are in no memory: read, verify, insert. Ceilings: see `FileCeiling`.

    `writes` are measured in turn with the writes, and `reads` with the reads into memory.
    """
    size = size_name(chunk_bytes)
    count = plan.count(chunk_bytes)
    sources = payloads(plan.sizes.source_bytes, chunk_bytes)
    raw, ours = plan.directory / "raw", plan.directory / "ours"
    raw.mkdir(parents=True, exist_ok=True)
    layout = layout_of(chunk_bytes)
    arena_bytes = (count + 8) * (chunk_bytes + 4096) * 5 // 4
    disk_bytes = 4 * count * (chunk_bytes + 16384)
    config = config_of(arena_bytes, ours, disk_bytes)
    ceiling = FileCeiling(raw, chunk_bytes, count, config.disk_io_threads)
    async with TierCache.open(config, layout) as cache:
        keys: list[bytes] = []

        async def write_plain() -> None:
            figures.add(f"ceiling.file_write_gbps.{size}", ceiling.write(durable=True))

        async def write_ours() -> None:
            figures.add(f"disk.put_durable_gbps.{size}", await _write(cache, keys, sources))

        async def read_plain() -> None:
            figures.add(f"ceiling.file_read_gbps.{size}", ceiling.read())

        async def read_ours() -> None:
            figures.add(f"disk.get_cold_gbps.{size}", await _warm(cache, keys, chunk_bytes))

        for pair in range(plan.pairs):
            plan.progress(f"disk tier, {size}, pair {pair + 1} of {plan.pairs}")
            keys[:] = new_keys(count)
            await in_turn(pair, write_plain, write_ours, *writes)
            await in_turn(pair, read_plain, read_ours, *reads)
            await cache.forget(keys)
            await asyncio.to_thread(os.sync)
    ceiling.close()
    figures.compare(f"disk.put_durable_gbps.{size}", f"ceiling.file_write_gbps.{size}")
    figures.compare(f"disk.get_cold_gbps.{size}", f"ceiling.file_read_gbps.{size}")


async def _write(cache: TierCache, keys: list[bytes], sources: np.ndarray) -> float:
    items = items_of(keys, sources)
    began = time.perf_counter()
    await cache.put_from(items)
    report = await cache.flush(120)
    took = time.perf_counter() - began
    assert cache.tiers[0].prefix(keys) == len(keys), report
    return float(len(keys) * sources.shape[1] / took / 1e9)


async def _warm(cache: TierCache, keys: list[bytes], chunk_bytes: int) -> float:
    make_cold(cache, keys)
    began = time.perf_counter()
    assert await cache.warm(keys) == len(keys)
    return len(keys) * chunk_bytes / (time.perf_counter() - began) / 1e9
