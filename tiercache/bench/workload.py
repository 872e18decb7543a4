"""How much is measured, and the caches, keys and payloads that all measurements share."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiercache.config import Config
from tiercache.core.keys import KEY_BYTES, ChunkKey
from tiercache.core.layout import Layout
from tiercache.payloads import Source

MIB = 1 << 20
CHUNK_SIZES = (2 * MIB, 32 * MIB)
_CHUNK_TOKENS = 256

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Sizes:
    """`FULL` measures; `QUICK` only shows that everything works, its figures mean nothing."""

    total_bytes: int
    """Moved in each measurement."""
    source_bytes: int
    """Caller's memory that payloads come from: larger than last-level caches."""
    singles: int
    """Single puts and gets in each pair."""
    tokens: int
    lookups: int
    entries: int
    """In the index that is measured."""
    files: int
    """Chunk files that are indexed again."""


FULL = Sizes(1024 * MIB, 256 * MIB, 500, 131072, 10_000, 1_000_000, 100_000)
QUICK = Sizes(128 * MIB, 64 * MIB, 5, 4096, 100, 2_000, 200)


@dataclass(frozen=True)
class Plan:
    """What one run measures, and where."""

    pairs: int
    sizes: Sizes
    directory: Path
    progress: Progress
    peer_python: Path | None = None
    """A Python that has LMCache; None measures no peer."""
    peer_script: Path | None = None
    """The program that it runs."""
    chunks: Path | None = None
    """A directory of chunks, whose payloads are compressed; None: generated ones are."""
    quick: bool = False
    """Whether `sizes` are those that only show that everything works."""

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
    """Random bytes, uint8[chunks, chunk_bytes]."""
    rows = max(2, source_bytes // chunk_bytes)
    return np.random.default_rng(2).integers(0, 256, (rows, chunk_bytes), dtype=np.uint8)


def items_of(keys: Sequence[ChunkKey], sources: np.ndarray) -> list[tuple[ChunkKey, int, Source]]:
    """What `put_from` takes: a key each, and the payloads in turn."""
    return [(key, sources.shape[1], _copy_of(sources[n % len(sources)])) for n, key in enumerate(keys)]


def _copy_of(source: np.ndarray) -> Source:
    return lambda slot: np.copyto(slot, source)


async def in_turn(pair: int, *measurements: Callable[[], Awaitable[None]]) -> None:
    """Run the measurements of a pair; in every other pair the last one first, so that none always meets a rested device."""
    for measure in measurements if pair % 2 == 0 else reversed(measurements):
        await measure()


def nothing(payload: np.ndarray) -> None:
    """A source or sink that touches no byte."""
