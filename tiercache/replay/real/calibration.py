"""Measure the speed of this machine's memory and disk through the cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from statistics import median

from tiercache.cache import TierCache
from tiercache.core.keys import KEY_BYTES, ChunkKey
from tiercache.replay.real.contents import Contents
from tiercache.replay.real.place import opened
from tiercache.replay.real.serial import ReplayFailed, check
from tiercache.replay.setting import Setting

_CHUNKS = 256
_BATCH = 32
_ROUNDS = 3
_LEAST_S = 1e-9


@dataclass(frozen=True)
class Speeds:
    """Speeds of a machine, as input of a simulation."""

    ram_bytes_per_s: float
    """Delivery from the hot cache in one batch."""
    flash_bytes_per_s: float
    """Rate of reads from disk in a batch, not counting the time to deliver a hot chunk."""
    flash_latency_s: float
    """Extra time of a get of a single chunk on disk."""


async def calibrated(chunk_bytes: int, directory: Path) -> Speeds:
    """Return speeds from the median times of gets: of one cold chunk, of 32 cold chunks and of 32 hot chunks.

    Needs an empty directory, and takes a second or two.
    """
    contents = Contents(chunk_bytes)
    keys = [blake2b(b"%d" % number, digest_size=KEY_BYTES).digest() for number in range(_CHUNKS)]
    parts = [keys[start : start + _BATCH] for start in range(0, _CHUNKS, _BATCH)]
    hot_s: list[float] = []
    cold_s: list[float] = []
    single_s: list[float] = []
    async with opened(Setting(2 * _CHUNKS, None), chunk_bytes, 2 * _CHUNKS, directory, one_at_a_time=False) as cache:
        await cache.put_from([(key, chunk_bytes, contents.source(key)) for key in keys])
        await cache.flush()
        for _ in range(_ROUNDS):
            cache.clear_hot()
            cold_s += [await _got_s(cache, contents, part) for part in parts]
            hot_s += [await _got_s(cache, contents, part) for part in parts]
            cache.clear_hot()
            single_s += [await _got_s(cache, contents, [key]) for key in keys[::8]]
    check(contents)
    hot_chunk_s = median(hot_s) / _BATCH
    flash_chunk_s = max(_LEAST_S, median(cold_s) / _BATCH - hot_chunk_s)
    latency_s = max(0.0, median(single_s) - flash_chunk_s - hot_chunk_s)
    return Speeds(chunk_bytes / hot_chunk_s, chunk_bytes / flash_chunk_s, latency_s)


async def _got_s(cache: TierCache, contents: Contents, keys: Sequence[ChunkKey]) -> float:
    began_s = time.perf_counter()
    if await cache.get_to(keys, [contents.sink(key) for key in keys]) != len(keys):
        raise ReplayFailed("calibration: a chunk that was written could not be read")
    return time.perf_counter() - began_s
