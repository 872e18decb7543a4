"""The cache as an embedder uses it: CPU tier, disk tier, and the event loop beside them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tiercache.bench.ceilings import FileCeiling, memcpy
from tiercache.bench.figures import Figures
from tiercache.cache import TierCache
from tiercache.config import Config
from tiercache.core.keys import KEY_BYTES
from tiercache.core.layout import Layout

Progress = Callable[[str], None]

MIB = 1 << 20
_CHUNK_TOKENS = 256
_SOURCE_BYTES = 256 * MIB
"""Larger than last-level caches."""
_SINGLES = 500


def layout_of(chunk_bytes: int) -> Layout:
    return Layout("bench", chunk_tokens=_CHUNK_TOKENS, bytes_per_token=chunk_bytes // _CHUNK_TOKENS)


def config_of(arena_bytes: int, directory: Path | None = None, disk_bytes: int = 0) -> Config:
    values: dict[str, object] = {"max_local_cpu_size": arena_bytes / 2**30}
    if directory is not None:
        values |= {"local_disk": str(directory), "max_local_disk_size": disk_bytes / 2**30}
    return Config.load(environ={}, overrides=values)


def new_keys(count: int) -> list[bytes]:
    return [os.urandom(KEY_BYTES) for _ in range(count)]


def _sources(chunk_bytes: int) -> np.ndarray:
    rows = max(2, _SOURCE_BYTES // chunk_bytes)
    return np.random.default_rng(2).integers(0, 256, (rows, chunk_bytes), dtype=np.uint8)


async def measure_cpu(figures: Figures, pairs: int, total_bytes: int, progress: Progress) -> None:
    """`put` against memcpy of the same bytes, and what single operations and batches cost beside the copy."""
    chunk_bytes = 2 * MIB
    count = total_bytes // chunk_bytes
    sources = _sources(chunk_bytes)
    async with TierCache.open(config_of(total_bytes + total_bytes // 4), layout_of(chunk_bytes)) as cache:
        slots = np.stack([np.empty(chunk_bytes, np.uint8) for _ in range(len(sources))])
        slots[:] = 1
        buffers = list(slots)
        for pair in range(pairs):
            progress(f"CPU tier, pair {pair + 1} of {pairs}")
            keys = new_keys(count)
            figures.add("ceiling.memcpy_gbps", memcpy(slots, sources, count))
            items = [(key, chunk_bytes, _copy_of(sources[n % len(sources)])) for n, key in enumerate(keys)]
            began = time.perf_counter()
            assert await cache.put_from(items) == count
            figures.add("cpu.put_gbps", count * chunk_bytes / (time.perf_counter() - began) / 1e9)
            places = [buffers[n % len(buffers)] for n in range(count)]
            began = time.perf_counter()
            assert await cache.get_into(keys, places) == count
            figures.add("cpu.get_gbps", count * chunk_bytes / (time.perf_counter() - began) / 1e9)
            await _overheads(cache, figures, keys)
    figures.compare("cpu.put_gbps", "ceiling.memcpy_gbps")
    figures.compare("cpu.get_gbps", "ceiling.memcpy_gbps")


async def _overheads(cache: TierCache, figures: Figures, keys: Sequence[bytes]) -> None:
    """`put_overhead`: a single put whose source does nothing, less an empty hand-over to the same threads. `put_latency`: all
    of a single put of 4 KiB, hand-over included. `get_overhead`: entering and leaving `cache.get` of a hot chunk."""
    loop_time = time.perf_counter
    small = np.zeros(4096, np.uint8)
    puts, hand_overs, latencies, gets = [], [], [], []
    for n in range(_SINGLES):
        first, second = new_keys(2)
        began = loop_time()
        await cache.put_from([(first, 4096, _nothing)])
        puts.append(loop_time() - began)
        began = loop_time()
        await cache.cpu.copiers.submit(_nothing, small)
        hand_overs.append(loop_time() - began)
        began = loop_time()
        await cache.put(second, small)
        latencies.append(loop_time() - began)
        began = loop_time()
        async with cache.get(second) as lease:
            assert lease is not None
        gets.append(loop_time() - began)
    middle = _SINGLES // 2
    figures.add("cpu.put_overhead_us", (sorted(puts)[middle] - sorted(hand_overs)[middle]) * 1e6)
    figures.add("cpu.put_latency_us", sorted(latencies)[middle] * 1e6)
    figures.add("cpu.hand_over_us", sorted(hand_overs)[middle] * 1e6)
    figures.add("cpu.get_overhead_us", sorted(gets)[middle] * 1e6)
    batch = new_keys(min(32, cache.cpu.pool.count // 4))
    began = loop_time()
    await cache.put_from([(key, 4096, _nothing) for key in batch])
    figures.add("cpu.batch_put_overhead_us", (loop_time() - began) / len(batch) * 1e6)
    began = loop_time()
    assert await cache.get_to(batch, [_nothing] * len(batch)) == len(batch)
    figures.add("cpu.batch_get_overhead_us", (loop_time() - began) / len(batch) * 1e6)


async def measure_disk(
    figures: Figures, pairs: int, total_bytes: int, directory: Path, chunk_bytes: int, progress: Progress
) -> None:
    """Durable puts (until flushed) and cold gets against plain O_DIRECT files of the same size, thread for thread."""
    size = f"{chunk_bytes // MIB}MiB"
    count = max(8, total_bytes // chunk_bytes)
    sources = _sources(chunk_bytes)
    raw, ours = directory / "raw", directory / "ours"
    raw.mkdir(parents=True, exist_ok=True)
    ceiling = FileCeiling(raw, chunk_bytes, count)
    config = config_of((count + 8) * (chunk_bytes + 4096) * 5 // 4, ours, 4 * count * (chunk_bytes + 16384))
    async with TierCache.open(config, layout_of(chunk_bytes)) as cache:
        for pair in range(pairs):
            progress(f"disk tier, {size}, pair {pair + 1} of {pairs}")
            figures.add(f"ceiling.file_write_gbps.{size}", ceiling.write(durable=True))
            keys = new_keys(count)
            began = time.perf_counter()
            await cache.put_from([(key, chunk_bytes, _copy_of(sources[n % len(sources)])) for n, key in enumerate(keys)])
            report = await cache.flush(120)
            took = time.perf_counter() - began
            assert cache.tiers[0].prefix(keys) == count, report
            figures.add(f"disk.put_durable_gbps.{size}", count * chunk_bytes / took / 1e9)
            cache.clear_hot()
            figures.add(f"ceiling.file_read_gbps.{size}", ceiling.read())
            began = time.perf_counter()
            assert await cache.warm(keys) == count
            figures.add(f"disk.get_cold_gbps.{size}", count * chunk_bytes / (time.perf_counter() - began) / 1e9)
            cache.clear_hot()
            figures.add(f"ceiling.file_write_not_durable_gbps.{size}", ceiling.write(durable=False))
            await cache.forget(keys)
    ceiling.close()
    figures.compare(f"disk.put_durable_gbps.{size}", f"ceiling.file_write_gbps.{size}")
    figures.compare(f"disk.get_cold_gbps.{size}", f"ceiling.file_read_gbps.{size}")


async def measure_loop(figures: Figures, pairs: int, total_bytes: int, directory: Path, progress: Progress) -> None:
    """How late a timer of 1 ms fires while puts keep the disk saturated, and while nothing happens."""
    chunk_bytes = 2 * MIB
    count = total_bytes // chunk_bytes
    sources = _sources(chunk_bytes)
    config = config_of(total_bytes // 2, directory / "ours", 4 * total_bytes)
    async with TierCache.open(config, layout_of(chunk_bytes)) as cache:
        for pair in range(pairs):
            progress(f"event loop, run {pair + 1} of {pairs}")
            idle = await _lags(asyncio.sleep(0.5))
            figures.add("loop.idle_lag_p99_ms", idle[len(idle) * 99 // 100] * 1e3)
            keys = new_keys(count)

            async def saturate(keys: Sequence[bytes] = keys) -> None:
                for n, key in enumerate(keys):
                    await cache.put(key, sources[n % len(sources)])
                await cache.flush(120)

            busy = await _lags(saturate())
            figures.add("loop.lag_p99_ms", busy[len(busy) * 99 // 100] * 1e3)
            figures.add("loop.lag_max_ms", busy[-1] * 1e3)
            await cache.forget(keys)


async def _lags(work: object) -> list[float]:
    """Sorted lags in seconds of a 1 ms heartbeat while `work` (a coroutine) runs."""
    loop = asyncio.get_running_loop()
    lags: list[float] = []
    handle: asyncio.TimerHandle

    def beat(due: float) -> None:
        nonlocal handle
        now = loop.time()
        lags.append(now - due)
        handle = loop.call_at(now + 0.001, beat, now + 0.001)

    handle = loop.call_at(loop.time() + 0.001, beat, loop.time() + 0.001)
    await work  # type: ignore[misc]
    handle.cancel()
    return sorted(lags)


async def measure_restart(figures: Figures, directory: Path, progress: Progress, files: int = 100_000) -> None:
    """Seconds until `files` chunk files are indexed again, while gets are served."""
    place = directory / "restart"
    chunk_bytes = 64 * 1024
    config = config_of(64 * MIB, place, files * 2 * (chunk_bytes + 16384))
    async with TierCache.open(config, layout_of(chunk_bytes)) as cache:
        payload = np.ones(chunk_bytes, np.uint8)
        served = new_keys(8)
        for key in served:
            await cache.put(key, payload)
        await cache.flush(60)
    progress(f"making {files:,} chunk files")
    await asyncio.to_thread(_make_files, place, files - len(served))
    progress(f"indexing {files:,} chunk files")
    began = time.perf_counter()
    async with TierCache.open(config, layout_of(chunk_bytes)) as cache:
        (disk,) = cache.tiers
        scanning = asyncio.create_task(disk.scanned())  # type: ignore[attr-defined]
        slowest = 0.0
        while not scanning.done():
            cache.clear_hot()
            asked = time.perf_counter()
            async with cache.get(served[0]) as lease:
                assert lease is not None
            slowest = max(slowest, time.perf_counter() - asked)
            await asyncio.wait([scanning], timeout=0.01)
        figures.add("restart.index_100k_s", time.perf_counter() - began)
        figures.add("restart.slowest_get_ms", slowest * 1e3)
        assert disk.statistics().resident == files, disk.statistics()


def _make_files(place: Path, count: int) -> None:
    """Empty chunks of the right length: indexing reads names and sizes only."""
    for key in new_keys(count):
        name = key.hex()
        leaf = place / name[:2] / name[2:4]
        leaf.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(leaf / name, os.O_WRONLY | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, 8192)
        os.close(descriptor)


def _copy_of(source: np.ndarray) -> Callable[[np.ndarray], None]:
    return lambda slot: np.copyto(slot, source)


def _nothing(payload: np.ndarray) -> None:
    """Neither fills nor reads."""
