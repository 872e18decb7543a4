"""The CPU tier beside memcpy, and what single operations and batches cost beside the copy."""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from tiercache.bench.ceilings import memcpy
from tiercache.bench.figures import Figures
from tiercache.bench.peer import Peer
from tiercache.bench.workload import MIB, Plan, config_of, in_turn, items_of, layout_of, new_keys, nothing, payloads
from tiercache.cache import TierCache
from tiercache.memory.arena import Arena, ArenaSettings

_CHUNK_BYTES = 2 * MIB
_SMALL_BYTES = 4096
_BATCHES = (32, 256)
"""Chunks: prompts of 8 k and of 64 k tokens."""


async def measure_cpu(figures: Figures, plan: Plan) -> None:
    """GB/s of batches that are larger than the last-level cache.

    `cpu.put_gbps`: `put_from` into a full hot cache, which evicts as it goes. `ceiling.memcpy_gbps`: numpy.copyto of the
    same payloads into as much pre-faulted memory, in as many threads; `ceiling.memcpy_1_thread_gbps`: in one.
    `cpu.get_gbps`: `get_into` of hot chunks. `ceiling.memcpy_out_gbps`: numpy.copyto that way.
    """
    count = plan.count(_CHUNK_BYTES)
    sources = payloads(plan.sizes.source_bytes, _CHUNK_BYTES)
    targets = np.ones_like(sources)
    ceiling = Arena(ArenaSettings(size_bytes=count * _CHUNK_BYTES))
    rows = ceiling.memory.reshape(count, _CHUNK_BYTES)
    config = config_of(count * _CHUNK_BYTES * 5 // 4)
    with Peer.start(plan, "cpu", _CHUNK_BYTES, count) as peer:
        async with TierCache.open(config, layout_of(_CHUNK_BYTES)) as cache:
            threads = cache.cpu.copiers.threads
            await cache.put_from(items_of(new_keys(cache.cpu.pool.count), sources))
            keys: list[bytes] = []
            places = [targets[number % len(targets)] for number in range(count)]

            async def copy_in() -> None:
                figures.add("ceiling.memcpy_1_thread_gbps", memcpy(rows, sources, count, 1))
                figures.add("ceiling.memcpy_gbps", memcpy(rows, sources, count, threads))

            async def put() -> None:
                items = items_of(keys, sources)
                began = time.perf_counter()
                assert await cache.put_from(items) == count
                figures.add("cpu.put_gbps", count * _CHUNK_BYTES / (time.perf_counter() - began) / 1e9)

            async def copy_out() -> None:
                figures.add("ceiling.memcpy_out_gbps", memcpy(targets, rows, count, threads))

            async def get() -> None:
                began = time.perf_counter()
                assert await cache.get_into(keys, places) == count
                figures.add("cpu.get_gbps", count * _CHUNK_BYTES / (time.perf_counter() - began) / 1e9)

            for pair in range(plan.pairs):
                plan.progress(f"CPU tier, pair {pair + 1} of {plan.pairs}")
                keys[:] = new_keys(count)
                await in_turn(pair, copy_in, put)
                peer.add(figures, "put", put=("cpu.put_gbps", "cpu.put_gbps"))
                await in_turn(pair, copy_out, get)
                peer.add(figures, "get", get=("cpu.get_gbps", "cpu.get_gbps"))
    ceiling.close()
    figures.compare("cpu.put_gbps", "ceiling.memcpy_gbps")
    figures.compare("cpu.get_gbps", "ceiling.memcpy_out_gbps")
    async with TierCache.open(config_of(4 * max(_BATCHES) * 2 * _SMALL_BYTES), layout_of(_SMALL_BYTES)) as cache:
        for pair in range(plan.pairs):
            plan.progress(f"single operations, {pair + 1} of {plan.pairs}")
            await _singles(cache, figures, plan.sizes.singles)
            await _on_the_loop(cache, figures, plan.sizes.singles)
            for size in _BATCHES:
                await _batches(cache, figures, size, max(1, plan.sizes.singles // 10))


async def _singles(cache: TierCache, figures: Figures, count: int) -> None:
    """Medians of `count`, in us, the kinds in turn.

    `cpu.put_latency_us`: all of a single `put` of 4 KiB, which the loop copies itself. `cpu.put_overhead_us`: what we
    add on the loop to one that a thread copies - a put whose source does nothing, less `cpu.hand_over_us`, which is a call
    that does nothing in the same thread and back.
    `cpu.get_overhead_us`: entering and leaving `async with cache.get(key)` of a hot chunk and looking at its bytes.
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
    """`cpu.put_loop_us`: what a single put that a thread copies takes of the loop's processor time, less what a call takes
    that does nothing in the same thread. The least of some rounds of each, in turn. Waits are not in it."""
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
    """Medians of us a chunk in `put_from` and `get_to` with sources and sinks that do nothing: all of the batch's time."""
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
