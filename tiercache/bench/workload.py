"""Sizes of the measurements, and their common caches, keys and payloads."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiercache.bench.ceilings import drop_cached
from tiercache.cache import TierCache
from tiercache.config import Config
from tiercache.core.keys import KEY_BYTES, ChunkKey
from tiercache.core.layout import Layout
from tiercache.payloads import Source

MIB = 1 << 20
CHUNK_SIZES = (2 * MIB, 32 * MIB)
_CHUNK_TOKENS = 256

Progress = Callable[[str], None]
Measurement = Callable[[], Awaitable[None]]
"""Take a sample of one or more figures."""


@dataclass(frozen=True)
class Sizes:
    """`FULL` measures; `QUICK` only tests that everything works, and its figures mean nothing."""

    total_bytes: int
    """Bytes moved in each measurement."""
    source_bytes: int
    """Bytes of the caller's memory for payloads: larger than last-level caches."""
    singles: int
    """Single puts and gets in each pair."""
    tokens: int
    lookups: int
    entries: int
    """Entries of the measured index."""
    files: int
    """Chunk files that are indexed after the restart."""


FULL = Sizes(1024 * MIB, 256 * MIB, 500, 131072, 10_000, 1_000_000, 100_000)
QUICK = Sizes(128 * MIB, 64 * MIB, 5, 4096, 100, 2_000, 200)


@dataclass(frozen=True)
class Plan:
    """Parameters of a run."""

    pairs: int
    quick: bool
    """Use sizes that only test that everything works."""
    directory: Path
    """Directory for the disk measurements."""
    progress: Progress = print
    """Called with what is measured next."""

    @property
    def sizes(self) -> Sizes:
        return QUICK if self.quick else FULL

    def count(self, chunk_bytes: int) -> int:
        return max(4, self.sizes.total_bytes // chunk_bytes)


def size_name(chunk_bytes: int) -> str:
    return f"{chunk_bytes // MIB}MiB"


def layout_of(chunk_bytes: int) -> Layout:
    return Layout("bench", chunk_tokens=_CHUNK_TOKENS, bytes_per_token=chunk_bytes // _CHUNK_TOKENS)


def config_of(arena_bytes: int, directory: Path | None = None, disk_bytes: int = 0, **more: object) -> Config:
    values: dict[str, object] = {"max_local_cpu_size": arena_bytes / 2**30, **more}
    if directory is not None:
        values |= {"local_disk": str(directory), "max_local_disk_size": disk_bytes / 2**30}
    return Config.load(environ={}, overrides=values)


def new_keys(count: int) -> list[ChunkKey]:
    return [os.urandom(KEY_BYTES) for _ in range(count)]


def payloads(source_bytes: int, chunk_bytes: int) -> np.ndarray:
    """Return random bytes, uint8[chunks, chunk_bytes]."""
    rows = max(2, source_bytes // chunk_bytes)
    return np.random.default_rng(2).integers(0, 256, (rows, chunk_bytes), dtype=np.uint8)


def items_of(keys: Sequence[ChunkKey], sources: np.ndarray) -> list[tuple[ChunkKey, int, Source]]:
    """Return an item for `put_from` for each key, with the payloads in turn."""
    return [(key, sources.shape[1], _copy_of(sources[n % len(sources)])) for n, key in enumerate(keys)]


def _copy_of(source: np.ndarray) -> Source:
    return lambda slot: np.copyto(slot, source)


async def in_turn(pair: int, *measurements: Measurement) -> None:
    """Run the measurements of a pair, in reverse order for odd pairs, so that none always finds an idle device."""
    for measure in measurements if pair % 2 == 0 else reversed(measurements):
        await measure()


def nothing(payload: np.ndarray) -> None:
    """Do nothing. Serves as a source or sink that touches no byte."""


def make_cold(cache: TierCache, keys: Sequence[ChunkKey]) -> None:
    """Leave chunks on disk only: empty the hot cache, and drop the files from the page cache."""
    cache.ahead.release_all()
    cache.clear_hot()
    (disk,) = cache.tiers
    drop_cached([disk.path(key) for key in keys])  # type: ignore[attr-defined]
