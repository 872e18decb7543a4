"""I/O backends that run one large blocking call per chunk in a worker thread.

`PosixIO` serves host memory; `DeviceIO` also moves device memory through `DeviceFiles` or `KvikioFiles`. Prefetches
have their own threads: `Precedence` pauses them between parts of a chunk while a demand read is in flight.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from tiercache.core.keys import ChunkKey
from tiercache.device.device import Device
from tiercache.device.driver import Tensor
from tiercache.errors import ConfigError, DeviceError
from tiercache.memory.workers import Workers, wait_shielded
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directories import ChunkIO, Directories
from tiercache.tiers.files.format import UNLIMITED, DeviceTurns
from tiercache.tiers.files.io_gds import DeviceFiles, KvikioFiles, probe_gds

logger = logging.getLogger("tiercache.disk")

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
        """`begin` a prefetch. Its thread calls the argument of `begin` between two parts."""
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

    def __init__(
        self, directories: Directories, writers: int | None = None, writes_at_device: int | None = None
    ) -> None:
        """`writers`: write threads; by default the number of read threads. `writes_at_device`: concurrent transfers to a
        directory's device; by default no limit."""
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

    @property
    def prefetches_apart(self) -> bool:
        return True

    def read(self, files: ChunkFiles, key: ChunkKey, into: np.ndarray) -> asyncio.Future[int | None]:
        return self._precedence.read(self._readers.submit(files.read, key, into))

    def prefetch(self, files: ChunkFiles, key: ChunkKey, into: np.ndarray) -> asyncio.Future[int | None]:
        return self._precedence.prefetch(key, lambda pause: self._prefetchers.submit(files.read, key, into, pause))

    def hurry(self, key: ChunkKey) -> None:
        self._precedence.hurry(key)

    def write(
        self, files: ChunkFiles, key: ChunkKey, payload: np.ndarray, payload_bytes: int
    ) -> asyncio.Future[int]:
        turns = UNLIMITED
        if self._writes_at_device is not None:
            turns = self._turns.setdefault(files.root, DeviceTurns(self._writes_at_device))
        return self._writers.submit(files.write, key, payload, payload_bytes, turns)


class DeviceIO(PosixIO):
    """Also moves device memory, through cuFile if GPUDirect Storage works, else through pinned host memory. `open` decides.
    Without a device it serves host memory only."""

    def __init__(
        self, directories: Directories, device: Device | None, way: str, files: DeviceFiles | None = None
    ) -> None:
        """`way`: auto (cuFile if it works), cufile (or ConfigError), posix (pinned memory). `files` skips the probe."""
        super().__init__(directories)
        self.device = device
        self.files: DeviceFiles | None = None
        self._way = way
        self._given_files = files

    @property
    def serves_device(self) -> bool:
        return self.files is not None

    async def open(self) -> None:
        if self._given_files is not None:
            await self._take(self._given_files)
            return
        directories = self._directories
        if self.device is None:
            logger.warning(
                "%s: no GPU is in use here: chunks go through host memory, like the disk tier's", directories.option
            )
            return
        driver, pool = self.device.driver, self.device.pool
        paths, chunk_bytes = directories.settings.directories, directories.settings.chunk_bytes
        threads = 2 * directories.settings.threads
        if self._way != "posix":
            reason = await probe_gds(paths, driver)
            if not reason:
                try:
                    await self._take(KvikioFiles(driver, pool.memory, chunk_bytes, threads))
                    return
                except (DeviceError, OSError, ImportError, RuntimeError) as error:
                    reason = str(error)
            if self._way == "cufile":
                raise ConfigError(
                    f"{directories.option}: GPUDirect Storage does not work with {', '.join(map(str, paths))}: {reason}. "
                    "Set use_gds: false to go through pinned host memory instead"
                )
            logger.warning(
                "%s: no GPUDirect Storage (%s): going through pinned host memory", directories.option, reason
            )
        await self._take(DeviceFiles(driver, chunk_bytes, threads))

    async def close(self) -> None:
        files, self.files = self.files, None
        if files is not None:
            self._directories.metadata.later(files.close)
        await super().close()

    def describe(self) -> str:
        return self.files.name if self.files is not None else "host memory only"

    def read_device(self, files: ChunkFiles, key: ChunkKey, into: Tensor) -> asyncio.Future[int | None]:
        device_files, fingerprint = self._device_files(), self._directories.fingerprint

        def read() -> int | None:
            return files.read_by(key, lambda path: device_files.read(path, key, fingerprint, into, direct=files.direct))

        return self._readers.submit(read)

    def write_device(
        self, files: ChunkFiles, key: ChunkKey, payload: Tensor, payload_bytes: int
    ) -> asyncio.Future[int]:
        device_files, fingerprint = self._device_files(), self._directories.fingerprint

        def create(path: str) -> int:
            return device_files.write(
                path, key, fingerprint, payload, payload_bytes, direct=files.direct, durable=files.durable
            )

        return self._writers.submit(files.write_by, key, payload_bytes, create)

    def _device_files(self) -> DeviceFiles:
        if self.files is None:
            raise DeviceError(f"{self._directories.name}: there is no device; only host memory is served")
        return self.files

    async def _take(self, files: DeviceFiles) -> None:
        """Open `files` and use them. Closes them on failure or cancellation."""
        try:
            await wait_shielded(self._directories.metadata.submit(files.open))
        except BaseException:
            self._directories.metadata.later(files.close)
            raise
        self.files = files


def places_of(threads: int) -> int:
    """Return the operations to accept for so many threads: two more, which wait for the next free thread; 1 for one."""
    return threads + 2 if threads > 1 else 1
