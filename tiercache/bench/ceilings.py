"""What the machine can do without us: memcpy, and plain O_DIRECT files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.tiers.chunk_file import supports_direct_io

THREADS = 4
"""As many as the disk tier uses for each direction."""


class FileCeiling:
    """Files of one size, written and read with as few calls as possible, from pre-faulted huge-page memory."""

    def __init__(self, directory: Path, size_bytes: int, count: int) -> None:
        self._paths = [directory / f"ceiling.{number}" for number in range(count)]
        self._size_bytes = size_bytes
        self._arena = Arena(ArenaSettings(size_bytes=THREADS * 2 * size_bytes))
        self._arena.memory[:] = np.random.default_rng(1).integers(0, 256, self._arena.memory.nbytes, dtype=np.uint8)
        self._flag = os.O_DIRECT if supports_direct_io(directory) else 0

    def write(self, *, durable: bool) -> float:
        """GB/s of fallocate + pwrite (+ fdatasync with `durable`) of new files."""
        self.remove()

        def write(number: int) -> None:
            descriptor = os.open(self._paths[number], os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flag, 0o600)
            os.posix_fallocate(descriptor, 0, self._size_bytes)
            done = 0
            while done < self._size_bytes:
                done += os.pwrite(descriptor, self._memory(number)[done:].data, done)
            if durable:
                os.fdatasync(descriptor)
            os.close(descriptor)

        return self._run(write)

    def read(self) -> float:
        """GB/s of preadv of the files written last."""

        def read(number: int) -> None:
            descriptor = os.open(self._paths[number], os.O_RDONLY | self._flag)
            done = 0
            while done < self._size_bytes:
                done += os.preadv(descriptor, [self._memory(number)[done:].data], done)
            os.close(descriptor)

        return self._run(read)

    def remove(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self.remove()
        self._arena.close()

    def _memory(self, number: int) -> np.ndarray:
        start = number % (THREADS * 2) * self._size_bytes
        return self._arena.memory[start : start + self._size_bytes]

    def _run(self, job: Callable[[int], None]) -> float:
        with ThreadPoolExecutor(THREADS) as pool:
            began = time.perf_counter()
            list(pool.map(job, range(len(self._paths))))
            took = time.perf_counter() - began
        return len(self._paths) * self._size_bytes / took / 1e9


def memcpy(slots: np.ndarray, sources: np.ndarray, count: int) -> float:
    """GB/s of numpy.copyto over `count` pairs of equal rows, one thread."""
    began = time.perf_counter()
    for number in range(count):
        np.copyto(slots[number % len(slots)], sources[number % len(sources)])
    return count * sources.shape[1] / (time.perf_counter() - began) / 1e9
