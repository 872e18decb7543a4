"""Measure the ceilings of the machine: memcpy, and plain O_DIRECT files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.tiers.files.format import supports_direct_io


class FileCeiling:
    """Files of one size, written and read with as few calls as the system allows.

    Each thread handles one file after another: open, fallocate, one pwritev, fdatasync if asked for, close. No header,
    no checksum, no rename, no copy; always from and to the same page-aligned, pre-faulted, huge-page memory. Uses
    O_DIRECT if the file system supports it. Otherwise uses the page cache, and drops the cached pages before a read.
    """

    def __init__(self, directory: Path, size_bytes: int, count: int, threads: int) -> None:
        self._paths = [directory / f"ceiling.{number}" for number in range(count)]
        self._size_bytes = size_bytes
        self._threads = threads
        self._arena = Arena(ArenaSettings(size_bytes=threads * 2 * size_bytes))
        self._arena.memory[:] = np.random.default_rng(1).integers(0, 256, self._arena.memory.nbytes, dtype=np.uint8)
        self._flag = os.O_DIRECT if supports_direct_io(directory) else 0

    def write(self, *, durable: bool) -> float:
        """Write new files and return GB/s. With `durable`, each thread syncs a file before it takes the next file."""
        self.remove()

        def write(number: int) -> None:
            descriptor = os.open(self._paths[number], os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flag, 0o600)
            os.posix_fallocate(descriptor, 0, self._size_bytes)
            done = 0
            while done < self._size_bytes:
                done += os.pwritev(descriptor, [self._memory(number)[done:].data], done)
            if durable:
                os.fdatasync(descriptor)
            os.close(descriptor)

        return self._run(write)

    def read(self) -> float:
        """Read the written files, after dropping them from the page cache, and return GB/s."""
        drop_cached(self._paths)

        def read(number: int) -> None:
            descriptor = os.open(self._paths[number], os.O_RDONLY | self._flag)
            done = 0
            while done < self._size_bytes:
                done += os.preadv(descriptor, [self._memory(number)[done:].data], done)
            os.close(descriptor)

        return self._run(read)

    def remove(self) -> None:
        """Remove the files and sync, so that a mount with `discard` does not free their blocks during a measurement."""
        for path in self._paths:
            path.unlink(missing_ok=True)
        os.sync()

    def close(self) -> None:
        self.remove()
        self._arena.close()

    def _memory(self, number: int) -> np.ndarray:
        start = number % (self._threads * 2) * self._size_bytes
        return self._arena.memory[start : start + self._size_bytes]

    def _run(self, job: Callable[[int], None]) -> float:
        with ThreadPoolExecutor(self._threads) as pool:
            began = time.perf_counter()
            list(pool.map(job, range(len(self._paths))))
            took = time.perf_counter() - began
        return len(self._paths) * self._size_bytes / took / 1e9


def drop_cached(paths: Sequence[Path | str]) -> None:
    """Write back and drop the cached pages of files, so that reading them reaches the device."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def memcpy(targets: np.ndarray, sources: np.ndarray, threads: int) -> float:
    """Copy all rows with numpy.copyto, and return the seconds.

    Each thread takes the next row after finishing a row, so that no two threads read, or write, the same memory.
    """
    rows = iter(range(len(sources)))

    def copy(_: int) -> None:
        for row in rows:
            np.copyto(targets[row], sources[row])

    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        list(pool.map(copy, range(threads)))
        return time.perf_counter() - began
