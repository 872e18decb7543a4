"""The I/O backend that runs one large blocking call per chunk in a worker thread."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from tiercache.core.keys import ChunkKey
from tiercache.memory.workers import Workers
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directories import ChunkIO, Directories
from tiercache.tiers.files.format import DeviceTurns


class PosixIO(ChunkIO):
    """pread and pwrite between host memory and files."""

    def __init__(
        self, directories: Directories, writers: int | None = None, writes_at_device: int | None = None
    ) -> None:
        """`writers`: write threads; by default the number of read threads. `writes_at_device`: concurrent transfers to a
        directory's device; by default no limit.
        """
        threads = directories.settings.threads
        self.places = places_of(threads)
        self.prefetch_places = max(1, threads // 4)  # more of them slow the reads beside them
        self._directories = directories
        self._readers = Workers(f"{directories.name}-read", threads)
        self._writers = Workers(f"{directories.name}-write", writers or threads)
        self._writes_at_device = writes_at_device
        self._turns: dict[Path, DeviceTurns] = {}

    @property
    def write_places(self) -> int:
        return places_of(self._writers.threads)

    async def close(self) -> None:
        self._readers.close()
        self._writers.close()

    def read(self, files: ChunkFiles, key: ChunkKey, into: np.ndarray) -> asyncio.Future[int | None]:
        return self._readers.submit(files.read, key, into)

    def write(
        self, files: ChunkFiles, key: ChunkKey, payload: np.ndarray, payload_bytes: int
    ) -> asyncio.Future[int]:
        turns = None
        if self._writes_at_device is not None:
            turns = self._turns.setdefault(files.root, DeviceTurns(self._writes_at_device))
        return self._writers.submit(files.write, key, payload, payload_bytes, turns)


def places_of(threads: int) -> int:
    """Return how many operations to accept: two more than threads, which wait for a free thread; 1 for one thread."""
    return threads + 2 if threads > 1 else 1
