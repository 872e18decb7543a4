"""Keys, look-ups and the index: what the event loop itself pays for."""

from __future__ import annotations

import os
import random
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from tiercache.bench.figures import Figures
from tiercache.core.eviction import make_order
from tiercache.core.index import CappedIndex
from tiercache.core.keys import KEY_BYTES, chunk_keys

_TOKENS = 131072
_LOOKUPS = 10_000
_ENTRIES = 1_000_000


def measure_core(figures: Figures, pairs: int, progress: Callable[[str], None]) -> None:
    progress("hashing")
    tokens = [random.randrange(150_000) for _ in range(_TOKENS)]
    array = np.array(tokens, dtype=np.uint32)
    namespace = bytes(KEY_BYTES)
    for _ in range(pairs):
        figures.add("hash.tokens_per_s", _TOKENS / _timed(lambda: chunk_keys(namespace, tokens, 256)))
        figures.add("hash.array_tokens_per_s", _TOKENS / _timed(lambda: chunk_keys(namespace, array, 256)))
    progress("index of a million entries")
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = CappedIndex(make_order("LRU"))
    for _ in range(_ENTRIES):
        index.add(os.urandom(KEY_BYTES), 2 << 20)
    figures.add("index.bytes_per_entry", (tracemalloc.get_traced_memory()[0] - before) / _ENTRIES)
    tracemalloc.stop()
    known = list(index.order.entries)[:_LOOKUPS]
    for _ in range(pairs):
        figures.add("lookup.keys_per_s", _LOOKUPS / _timed(lambda: index.prefix(known)))
        took = []
        for _ in range(20_000):
            key = os.urandom(KEY_BYTES)
            began = time.perf_counter()
            index.evict(1)
            index.add(key, 2 << 20)
            took.append(time.perf_counter() - began)
        took.sort()
        figures.add("index.admit_p99_us", took[len(took) * 99 // 100] * 1e6)
        known = list(index.order.entries)[:_LOOKUPS]


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
