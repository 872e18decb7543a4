"""Measure keys, lookups and the index: the costs of the event loop itself."""

from __future__ import annotations

import os
import random
import time
import tracemalloc

from tiercache.bench.figures import Figures
from tiercache.bench.workload import MIB, Plan, config_of, layout_of, new_keys, nothing
from tiercache.cache import TierCache
from tiercache.core.index import CappedIndex
from tiercache.core.keys import KEY_BYTES, chunk_keys

_SMALL_BYTES = 4096
_ADMISSIONS = 20_000


async def measure_core(figures: Figures, plan: Plan) -> None:
    """Measure `hash.tokens_per_s`, `lookup.keys_per_s` and `index.*`.

    `hash.tokens_per_s`: keys of one prompt. `lookup.keys_per_s`: `cache.lookup_keys` of one batch of hot keys.
    `index.*`: see `_index`.
    """
    sizes = plan.sizes
    tokens = [random.randrange(150_000) for _ in range(sizes.tokens)]
    namespace = bytes(KEY_BYTES)
    arena_bytes = max(64 * MIB, 2 * sizes.lookups * _SMALL_BYTES)
    async with TierCache.open(config_of(arena_bytes), layout_of(_SMALL_BYTES)) as cache:
        keys = new_keys(sizes.lookups)
        await cache.put_from([(key, _SMALL_BYTES, nothing) for key in keys])
        for pair in range(plan.pairs):
            plan.progress(f"keys and lookups, {pair + 1} of {plan.pairs}")
            began = time.perf_counter()
            chunk_keys(namespace, tokens, 256)
            figures.add("hash.tokens_per_s", sizes.tokens / (time.perf_counter() - began))
            began = time.perf_counter()
            hit = await cache.lookup_keys(keys)
            figures.add("lookup.keys_per_s", len(keys) / (time.perf_counter() - began))
            assert hit.chunks == len(keys), hit
    plan.progress(f"index of {sizes.entries:,} entries")
    _index(figures, plan)


def _index(figures: Figures, plan: Plan) -> None:
    """Measure `index.bytes_per_entry`, `index.admit_us` and `index.admit_p99_us`.

    `index.bytes_per_entry`: all that Python allocates for an entry, its key included (tracemalloc). `index.admit_us`,
    `index.admit_p99_us`: making room for a chunk and adding it, in a full index.
    """
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = CappedIndex()
    for _ in range(plan.sizes.entries):
        index.add(os.urandom(KEY_BYTES), 2 * MIB)
    figures.add("index.bytes_per_entry", (tracemalloc.get_traced_memory()[0] - before) / plan.sizes.entries)
    tracemalloc.stop()
    for _ in range(plan.pairs):
        took = []
        for key in new_keys(min(_ADMISSIONS, plan.sizes.entries)):
            began = time.perf_counter()
            index.evict(2 * MIB)
            index.add(key, 2 * MIB)
            took.append(time.perf_counter() - began)
        took.sort()
        figures.add("index.admit_us", took[len(took) // 2] * 1e6)
        figures.add("index.admit_p99_us", took[len(took) * 99 // 100] * 1e6)
