"""Measure the CPU tier beside memcpy, and the overhead of single operations and batches beside the copy."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from statistics import median

import numpy as np

from tiercache.bench.ceilings import memcpy
from tiercache.bench.figures import Figures
from tiercache.bench.workload import MIB, Plan, config_of, items_of, layout_of, new_keys, nothing, payloads
from tiercache.cache import TierCache
from tiercache.core.keys import ChunkKey
from tiercache.memory.arena import Arena, ArenaSettings

_CHUNK_BYTES = 2 * MIB
_SMALL_BYTES = 4096
_BATCHES = (32, 256)
"""Chunks per batch: prompts of 8 k and of 64 k tokens."""


async def measure_cpu(figures: Figures, plan: Plan) -> None:
    """Measure GB/s of batches larger than the last-level cache, tiercache and the ceiling in turn.

    A batch has `source_bytes`, like a prompt of 32 k tokens with chunks of 256 tokens and 2 MiB. A sample covers all
    batches of a pair. `cpu.put_gbps`: `put_from` into a full hot cache, which evicts meanwhile. `ceiling.memcpy_gbps`:
    numpy.copyto of the same payloads into as much pre-faulted memory, in as many threads. `cpu.get_gbps`: `get_into` of
    hot chunks. `ceiling.memcpy_out_gbps`: numpy.copyto in that direction.
    """
    sources = payloads(plan.sizes.source_bytes, _CHUNK_BYTES)
    targets = np.ones_like(sources)
    size = len(sources)
    batches = plan.count(_CHUNK_BYTES) // size
    count = batches * size
    ceiling = Arena(ArenaSettings(size_bytes=count * _CHUNK_BYTES))
    rows = ceiling.memory.reshape(batches, size, _CHUNK_BYTES)
    config = config_of(count * _CHUNK_BYTES * 5 // 4)
    async with TierCache.open(config, layout_of(_CHUNK_BYTES)) as cache:
        threads = cache.cpu.copiers.threads
        await cache.put_from(items_of(new_keys(cache.cpu.pool.count), sources))
        keys: list[list[ChunkKey]] = []

        async def copy_in(batch: int) -> float:
            return memcpy(rows[batch], sources, threads)

        async def put(batch: int) -> float:
            items = items_of(keys[batch], sources)
            began = time.perf_counter()
            assert await cache.put_from(items) == size
            return time.perf_counter() - began

        async def copy_out(batch: int) -> float:
            return memcpy(targets, rows[batch], threads)

        async def get(batch: int) -> float:
            began = time.perf_counter()
            assert await cache.get_into(keys[batch], list(targets)) == size
            return time.perf_counter() - began

        ways_in = {
            "ceiling.memcpy_gbps": copy_in,
            "cpu.put_gbps": put,
        }
        ways_out = {"ceiling.memcpy_out_gbps": copy_out, "cpu.get_gbps": get}
        for pair in range(plan.pairs):
            plan.progress(f"CPU tier, pair {pair + 1} of {plan.pairs}")
            keys[:] = [new_keys(size) for _ in range(batches)]
            await _batch_by_batch(figures, pair, batches, sources.nbytes, ways_in)
            await _batch_by_batch(figures, pair, batches, sources.nbytes, ways_out)
    ceiling.close()
    figures.compare("cpu.put_gbps", "ceiling.memcpy_gbps")
    figures.compare("cpu.get_gbps", "ceiling.memcpy_out_gbps")
    await _measure_overheads(figures, plan)


async def _batch_by_batch(
    figures: Figures, pair: int, batches: int, batch_bytes: int, ways: Mapping[str, Callable[[int], Awaitable[float]]]
) -> None:
    """Measure `ways` in turn, and record a sample of each. A way takes the number of a batch and returns its seconds.

    All ways run a batch before any runs the next. Their order is reversed for every other batch.
    """
    took_s = dict.fromkeys(ways, 0.0)
    for batch in range(batches):
        for name in list(ways) if (pair + batch) % 2 == 0 else list(ways)[::-1]:
            took_s[name] += await ways[name](batch)
    for name, seconds in took_s.items():
        figures.add(name, batches * batch_bytes / seconds / 1e9)


async def _measure_overheads(figures: Figures, plan: Plan) -> None:
    """Measure overheads with chunks so small that their copy takes almost no time."""
    async with TierCache.open(config_of(4 * max(_BATCHES) * 2 * _SMALL_BYTES), layout_of(_SMALL_BYTES)) as cache:
        for pair in range(plan.pairs):
            plan.progress(f"single operations, {pair + 1} of {plan.pairs}")
            await _singles(cache, figures, plan.sizes.singles)
            await _on_the_loop(cache, figures, plan.sizes.singles)
            for size in _BATCHES:
                await _batches(cache, figures, size, max(1, plan.sizes.singles // 10))


async def _singles(cache: TierCache, figures: Figures, count: int) -> None:
    """Measure medians of `count` single operations in us, alternating the kinds.

    `cpu.put_latency_us`: a whole `put` of 4 KiB, which the loop copies itself. `cpu.put_overhead_us`: the loop's
    overhead for a put that a thread copies. It is a put whose source does nothing, less `cpu.hand_over_us`, which is an
    empty call in such a thread. That call is awaited as a future, which takes a round of the loop (3 to 5 us) that a
    put does not need. `cpu.get_overhead_us`: entering and leaving `async with cache.get(key)` of a hot chunk and
    reading its bytes.
    """
    now = time.perf_counter
    small = np.zeros(_SMALL_BYTES, np.uint8)
    puts, hand_overs, latencies, gets = [], [], [], []
    for _ in range(count):
        first, second = new_keys(2)
        began = now()
        await cache.put_from([(first, _SMALL_BYTES, nothing)])
        puts.append(now() - began)
        began = now()
        await cache.cpu.copiers.submit(nothing, small)
        hand_overs.append(now() - began)
        began = now()
        await cache.put(second, small)
        latencies.append(now() - began)
        began = now()
        async with cache.get(second) as lease:
            assert lease is not None and lease.view is not None
        gets.append(now() - began)
    figures.add("cpu.put_overhead_us", (median(puts) - median(hand_overs)) * 1e6)
    figures.add("cpu.put_latency_us", median(latencies) * 1e6)
    figures.add("cpu.hand_over_us", median(hand_overs) * 1e6)
    figures.add("cpu.get_overhead_us", median(gets) * 1e6)


async def _on_the_loop(cache: TierCache, figures: Figures, count: int) -> None:
    """Measure `cpu.put_loop_us`: the loop's processor time for a put that a thread copies, less that of an empty call.

    Takes the minimum of some rounds of each, in turn. Excludes waits.
    """
    now = time.thread_time
    small = np.zeros(_SMALL_BYTES, np.uint8)
    puts, hand_overs = [], []
    for _ in range(5):
        items = [(key, _SMALL_BYTES, nothing) for key in new_keys(count)]
        began = now()
        for item in items:
            await cache.put_from([item])
        puts.append(now() - began)
        began = now()
        for _ in items:
            await cache.cpu.copiers.submit(nothing, small)
        hand_overs.append(now() - began)
    figures.add("cpu.put_loop_us", (min(puts) - min(hand_overs)) / count * 1e6)


async def _batches(cache: TierCache, figures: Figures, size: int, count: int) -> None:
    """Measure the median us per chunk of `put_from` and `get_to` for batches with empty sources and sinks."""
    puts, gets = [], []
    for _ in range(count):
        keys = new_keys(size)
        items = [(key, _SMALL_BYTES, nothing) for key in keys]
        sinks = [nothing] * size
        began = time.perf_counter()
        await cache.put_from(items)
        puts.append(time.perf_counter() - began)
        began = time.perf_counter()
        assert await cache.get_to(keys, sinks) == size
        gets.append(time.perf_counter() - began)
    suffix = "" if size == max(_BATCHES) else f".{size}_chunks"
    figures.add(f"cpu.batch_put_overhead_us{suffix}", median(puts) / size * 1e6)
    figures.add(f"cpu.batch_get_overhead_us{suffix}", median(gets) / size * 1e6)
