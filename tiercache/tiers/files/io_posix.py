"""The I/O backend that runs one large blocking call per chunk in a worker thread.

Prefetches have their own threads: `Precedence` pauses them between parts of a chunk while a demand read is in flight.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from tiercache.core.keys import ChunkKey
from tiercache.memory.workers import Workers
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directories import ChunkIO, Directories
from tiercache.tiers.files.format import DeviceTurns

_PATIENCE_S = 0.05
"""Longest total pause of a prefetch, so that steady or hung reads do not stop it."""


class Precedence:
    """Pauses prefetches during demand reads. Belongs to the event loop."""

    def __init__(self) -> None:
        self._reads = 0
        self._prefetches: dict[ChunkKey, tuple[threading.Event, asyncio.Future[int | None]]] = {}
        """Prefetches that may pause, with the event that resumes each."""

    def read(self, work: asyncio.Future[int | None]) -> asyncio.Future[int | None]:
        """Pause prefetches until the read `work` ends."""
        self._reads += 1
        if self._reads == 1:
            for may_go_on, _ in self._prefetches.values():
                may_go_on.clear()
        work.add_done_callback(self._ended)
        return work

    def prefetch(
        self, key: ChunkKey, begin: Callable[[Callable[[], None]], asyncio.Future[int | None]]
    ) -> asyncio.Future[int | None]:
        """Start a prefetch by `begin`. Its thread calls the argument of `begin` between two parts."""
        may_go_on = threading.Event()
        if not self._reads:
            may_go_on.set()
        work = begin(_Pause(may_go_on))
        self._prefetches[key] = may_go_on, work
        work.add_done_callback(partial(self._arrived, key))
        return work

    def hurry(self, key: ChunkKey) -> None:
        """Turn a prefetch that got a waiter into a demand read."""
        found = self._prefetches.pop(key, None)
        if found is not None:
            may_go_on, work = found
            may_go_on.set()
            self.read(work)

    def _arrived(self, key: ChunkKey, work: asyncio.Future[int | None]) -> None:
        if self._prefetches.get(key, (None, None))[1] is work:
            del self._prefetches[key]

    def _ended(self, _: asyncio.Future[int | None]) -> None:
        self._reads -= 1
        if not self._reads:
            for may_go_on, _ in self._prefetches.values():
                may_go_on.set()


class _Pause:
    """The pauses of one prefetch. Called in its thread."""

    def __init__(self, may_go_on: threading.Event) -> None:
        self._may_go_on = may_go_on
        self._left_s = _PATIENCE_S

    def __call__(self) -> None:
        if self._left_s > 0 and not self._may_go_on.is_set():
            began_s = time.monotonic()
            self._may_go_on.wait(self._left_s)
            self._left_s -= time.monotonic() - began_s


class PosixIO(ChunkIO):
    """pread and pwrite between host memory and files."""

    prefetches_apart = True

    def __init__(
        self, directories: Directories, writers: int | None = None, writes_at_device: int | None = None
    ) -> None:
        """`writers`: write threads; by default the number of read threads. `writes_at_device`: concurrent transfers to a
        directory's device; by default no limit.
        """
        threads = directories.settings.threads
        self.places = places_of(threads)
        self._directories = directories
        self._readers = Workers(f"{directories.name}-read", threads)
        self._prefetchers = Workers(f"{directories.name}-prefetch", threads)
        """Separate, so that reads always find threads."""
        self._precedence = Precedence()
        self._writers = Workers(f"{directories.name}-write", writers or threads)
        self._writes_at_device = writes_at_device
        self._turns: dict[Path, DeviceTurns] = {}

    @property
    def write_places(self) -> int:
        return places_of(self._writers.threads)

    async def close(self) -> None:
        self._readers.close()
        self._prefetchers.close()
        self._writers.close()

    def read(self, files: ChunkFiles, key: ChunkKey, into: np.ndarray) -> asyncio.Future[int | None]:
        return self._precedence.read(self._readers.submit(files.read, key, into))

    def prefetch(self, files: ChunkFiles, key: ChunkKey, into: np.ndarray) -> asyncio.Future[int | None]:
        return self._precedence.prefetch(key, lambda pause: self._prefetchers.submit(files.read, key, into, pause))

    def hurry(self, key: ChunkKey) -> None:
        self._precedence.hurry(key)

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
