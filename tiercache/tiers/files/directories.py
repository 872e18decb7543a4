"""The directories of a file tier: opening, scanning, eviction, and replacement.

`Directories` owns one `Directory` per configured path and belongs to the event loop; blocking calls run in
`MetadataWorkers`. A `ChunkIO` moves the bytes. Background tasks scan, trim above caps and quotas, retry failed deletions,
and reopen a directory that was emptied, deleted or mounted again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from tiercache.core.index import CappedIndex, counts_in
from tiercache.core.keys import ChunkKey
from tiercache.device.driver import Tensor
from tiercache.errors import ConfigError, DeviceError, TierFull, TierUnavailable
from tiercache.memory.workers import Workers, retrieve_exception, wait_shielded
from tiercache.tiers.base import TierStatistics
from tiercache.tiers.compression import Compression
from tiercache.tiers.files.access import ACCESS
from tiercache.tiers.files.chunk_files import ChunkFiles, OnlyRead
from tiercache.tiers.files.directory import Deleted, Victims, WrongFormat, default_cap, make_place, place_of
from tiercache.tiers.files.scanning import Directory, scan

logger = logging.getLogger("tiercache.disk")

T = TypeVar("T")

_CLOSE_S = 5.0
_EVICTING_THREADS = 4


class MetadataWorkers(Workers):
    """Threads for metadata calls on mounts that may hang, and for closing files."""

    def __init__(self, name: str, threads: int) -> None:
        super().__init__(f"{name}-metadata", threads)
        self.background = Workers(f"{name}-scan", threads)
        """Threads for scans, so that lookups do not wait for these."""
        self.evicting = Workers(f"{name}-evict", max(_EVICTING_THREADS, threads))
        """Threads for evictions, which writes wait for."""
        self._cleanups: set[asyncio.Future[Any]] = set()

    def later(self, clean_up: Callable[..., object], *arguments: object, workers: Workers | None = None) -> None:
        """Call `clean_up` in a thread, of other `workers` if given, in a new one after close. Only `cleaned_up` waits for
        it.
        """

        def run() -> None:
            try:
                clean_up(*arguments)
            except OSError as error:
                logger.info("%s: could not clean up: %s", self.name, error)

        try:
            work = (workers or self).submit(run)
            self._watch(work)
        except RuntimeError:  # closed meanwhile
            try:
                threading.Thread(target=run, name=f"tiercache-{self.name}-late", daemon=True).start()
            except RuntimeError as error:  # what is left goes with the process
                logger.warning("%s: not cleaned up, since no thread can be started: %s", self.name, error)

    def close(self) -> None:
        super().close()
        self.background.close()
        self.evicting.close()

    async def change(self, call: Callable[..., T], *arguments: object) -> T:
        """Return the result of a call that changes directories. If the caller is cancelled, `cleaned_up` waits for the
        call, so that it creates no directory after the tier was closed.
        """
        work = self.submit(call, *arguments)
        work.add_done_callback(retrieve_exception)
        self._watch(work)
        return await asyncio.shield(work)

    def _watch(self, work: asyncio.Future[Any]) -> None:
        """Let `cleaned_up` wait for `work`."""
        self._cleanups.add(work)
        work.add_done_callback(self._cleanups.discard)

    async def cleaned_up(self) -> None:
        """Wait a bounded time for abandoned work, then close the threads."""
        until_s = asyncio.get_running_loop().time() + _CLOSE_S
        try:
            while self._cleanups and (left_s := until_s - asyncio.get_running_loop().time()) > 0:
                await asyncio.wait(self._cleanups, timeout=left_s)
        finally:
            self.close()


_LARGEST_STEP_BYTES = 64 << 20
_STEPS = 64


@dataclass(frozen=True)
class FileSettings:
    directories: tuple[Path, ...]
    cap_bytes: int
    """Limit of all directories together, in equal shares. 0: 90% of the free space plus our own files at open."""
    threads: int = 4
    """Read threads; writes get at least as many. With 1, chunks are processed one by one in the order of calls."""
    direct: bool | None = None
    """O_DIRECT: True, False, or None to use it where it works."""
    durable: bool = True
    """Call fdatasync before a file is published. A power cut can then lose the newest chunks but never tear one.
    Without it, recent chunks may be lost, and verification finds torn ones. kill -9 is harmless either way.
    """
    admission: str = "all"
    """Admission policy for writes, see tiercache.core.admission."""
    bytes_per_day: float = 0.0
    """Limit of bytes written per day; 0: no limit."""
    file_access: str = "owner"
    """Permissions: "owner" (0600, directories 0700) or "group" (0660, 2770). An existing configured directory
    keeps its mode.
    """
    chunk_bytes: int = 0
    """The largest payload. I/O backends with own buffers need it."""
    many_hosts: bool = False
    """Other hosts share the directories, so reservations must reach the server."""
    compression: str = "none"
    """Compression of payloads in host memory: none, lz4, zstd or auto. See `tiercache.tiers.compression`."""
    item_bytes: int = 1
    """Bytes per number in a payload."""
    tenant_bytes: int = 0
    """Quota of each tenant in all directories together, in equal shares; 0: no quota."""
    beside: bool = True
    """Write temporary files beside the chunks, see `ChunkFiles`."""

    @property
    def tenant_share_bytes(self) -> int:
        """Quota of a tenant in one directory."""
        return self.tenant_bytes // len(self.directories)

    def step_of(self, cap_bytes: int) -> int:
        """Return the bytes that a process reserves at a time in a directory with that cap."""
        return min(_LARGEST_STEP_BYTES, cap_bytes // _STEPS)


class ChunkIO(ABC):
    """I/O backend: moves bytes between memory and files. Calls keep the contracts of `ChunkFiles.read` and
    `ChunkFiles.write`. Cancelling a future does not stop its operation.
    """

    places: int
    """Concurrent reads. Set by `open`."""
    prefetch_places: int | None = None
    """See `Traits.prefetch_concurrency`."""
    sees_remounts = False
    """True if the backend itself detects another mount in place of its own and calls `Directories.remount`."""
    perhaps_files = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EREMOTEIO})
    """Read errors that the file or the device may have caused."""

    async def prepare(self) -> None:  # noqa: B027 - most have nothing to do then
        """Prepare before the directories are opened. Raises ConfigError."""

    async def open(self) -> None:  # noqa: B027
        """Start after the directories are open. Raises ConfigError."""

    @abstractmethod
    async def close(self) -> None:
        """Close. Idempotent; does not wait for hung calls."""

    @property
    def write_places(self) -> int:
        """Concurrent writes."""
        return self.places

    @property
    def serves_device(self) -> bool:
        """True if the backend moves device memory. Set by `open`."""
        return False

    def describe(self) -> str:
        """Return a phrase for a log line, or nothing."""
        return ""

    @abstractmethod
    def read(self, files: ChunkFiles, key: ChunkKey, into: np.ndarray) -> asyncio.Future[int | None]:
        """Read a chunk like `ChunkFiles.read`."""

    @abstractmethod
    def write(
        self, files: ChunkFiles, key: ChunkKey, payload: np.ndarray, payload_bytes: int
    ) -> asyncio.Future[int]:
        """Write a chunk like `ChunkFiles.write`."""

    def read_device(self, files: ChunkFiles, key: ChunkKey, into: Tensor) -> asyncio.Future[int | None]:
        """Read a chunk into device memory like `ChunkFiles.read`."""
        raise DeviceError("there is no device; only host memory is served")

    def write_device(
        self, files: ChunkFiles, key: ChunkKey, payload: Tensor, payload_bytes: int
    ) -> asyncio.Future[int]:
        """Write a chunk from device memory like `ChunkFiles.write`."""
        raise DeviceError("there is no device; only host memory is served")

    def listed(self, kept: Sequence[ChunkKey]) -> None:  # noqa: B027
        """Note the known chunks in a changed subdirectory, whose files other processes may have replaced."""

    async def unmap_deleted(self) -> int:
        """Unmap files that other processes have deleted, which occupy memory. Return their number."""
        return 0

    def suspect(self, error: OSError | None = None) -> None:  # noqa: B027
        """Note that a call failed with `error`, or that a directory was replaced: the mount may be dead."""


_SCAN_WAIT_S = 2.0
"""Longest wait of a write for a scan that may find victims."""
_DEAD_MOUNT = frozenset({errno.ENOTCONN, errno.ESTALE, errno.ESHUTDOWN})
_LOST = "%s was emptied, deleted or replaced by another program; opening it again"
_MOUNTED_ANEW = "another mount is at %s now; scanning it"
_CATCH_UP_S = 1.0
"""Delay before failed work is retried and unused reservations are returned."""
_TRIM_STEP = 16
"""Chunks deleted per call when a cap was lowered. All processes may do so at once, and then see what the others did."""


def give_up_bytes(lacking_bytes: int, needed_bytes: int) -> int:
    """Return how many of the bytes above a cap, or above a tenant's quota, one write evicts."""
    return max(0, min(lacking_bytes, 2 * needed_bytes))


class Directories:
    """All directories of a tier. Methods run on the event loop; blocking calls run in `metadata`."""

    def __init__(
        self,
        name: str,
        option: str,
        settings: FileSettings,
        fingerprint: bytes,
        metadata_threads: int,
        io: Callable[[Directories], ChunkIO],
    ) -> None:
        """`option` is the configuration key of the directories, for messages. `io` is a factory that must not access the
        directories yet.
        """
        self.name = name
        self.option = option
        self.settings = settings
        self.fingerprint = fingerprint
        self.all: list[Directory] = []
        self.compression = Compression(
            settings.compression, settings.item_bytes, concurrency=settings.threads, tier=name
        )
        self.counters = TierStatistics()
        self.metadata = MetadataWorkers(name, metadata_threads)
        self.closed = False
        self._only_reads = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.io = io(self)

    async def open(self, *, only_reads: bool = False) -> None:
        """Open all directories and start scanning. `only_reads`: change nothing in them. After a ConfigError everything is
        closed, and the call may be repeated.
        """
        self._only_reads = only_reads
        try:
            await self._open_all()
        except BaseException:
            self._close_files()
            self.all.clear()
            raise
        for directory in self.all:
            self.begin_scan(directory, first=True)
            self.begin(self._catch_up(directory), f"catch-up-{directory.files.root}")

    async def _open_all(self) -> None:
        await self.io.prepare()
        places: list[Path] = []
        for path in self.settings.directories:
            place = await self._place_of(path)
            if place in places:
                other = self.settings.directories[places.index(place)]
                raise ConfigError(
                    f"{self.option}: {other} and {path} are one directory, which would be filled twice; name it once"
                )
            places.append(place)
        if not self.settings.cap_bytes and not self._only_reads:
            with self._configured(places[0]):
                cap_bytes = await self.metadata.change(default_cap, places, ACCESS[self.settings.file_access])
            self.settings = replace(self.settings, cap_bytes=cap_bytes)
        share_bytes = self.settings.cap_bytes // len(self.settings.directories)
        for place in places:
            files = self.make_files(place, share_bytes)
            await self._open_files(files)
            directory = Directory(files, CappedIndex(self.settings.tenant_share_bytes))
            self.all.append(directory)
        await self.io.open()
        self._limit_all()  # they may have changed meanwhile

    def limit(self, cap_bytes: int, tenant_bytes: int) -> None:
        """Change the cap and the quota, and evict what exceeds them in the background."""
        self.settings = replace(self.settings, cap_bytes=cap_bytes, tenant_bytes=tenant_bytes)
        self._limit_all()
        for directory in self.all:
            self.begin(self._trim(directory), f"trim-{directory.files.root}")

    def _limit_all(self) -> None:
        for directory in self.all:
            self._limit_files(directory.files)
            directory.index.limit(self.settings.tenant_share_bytes)

    def _limit_files(self, files: ChunkFiles) -> None:
        share_bytes = self.settings.cap_bytes // len(self.settings.directories)
        files.limit(share_bytes, self.settings.step_of(share_bytes))

    async def close(self) -> None:
        """Cancel background tasks and close the directories. Waits a bounded time for hung calls."""
        self.closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._close_files()
        await self.metadata.cleaned_up()

    def _close_files(self) -> None:
        for directory in self.all:
            self.metadata.later(directory.files.close)

    @property
    def is_open(self) -> bool:
        """Return True if every directory has been opened, until the tier is closed."""
        return not self.closed and len(self.all) == len(self.settings.directories)

    def begin(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` in the background until it ends or the tier closes."""
        task = asyncio.create_task(work, name=f"tiercache-{name}")
        task.add_done_callback(_complain)
        task.add_done_callback(self._tasks.discard)
        self._tasks.add(task)
        return task

    # Locating chunks

    def contains(self, key: ChunkKey) -> bool:
        return any(key in directory.index for directory in self.all)

    def known(self) -> Sequence[Container[ChunkKey]]:
        """Return the keys in each directory's index."""
        return [directory.index.keys for directory in self.all]

    def prefix(self, keys: Sequence[ChunkKey]) -> int:
        """See `Tier.prefix`."""
        return sum(counts_in(self.known(), keys))

    def places(self, key: ChunkKey) -> list[Directory]:
        """Return the directory that is known to hold a chunk, else all of them, the likeliest first.

        Rendezvous hashing (Thaler and Ravishankar) ranks them: each gets an equal share, and an added directory takes its
        share evenly from the others. Older chunks are still found.
        """
        if len(self.all) == 1:
            return self.all
        for directory in self.all:
            if key in directory.index:
                return [directory]
        return sorted(self.all, key=lambda directory: xxhash.xxh3_64_intdigest(key, directory.seed), reverse=True)

    # Scans

    def begin_scan(self, directory: Directory, *, first: bool) -> None:
        if self.closed:
            return
        directory.scanning = self.begin(self._scan(directory, first), f"scan-{directory.files.root}")

    def scan_soon(self, directory: Directory) -> None:
        """Start a scan unless one runs or the last one was recent."""
        if directory.scanning is None and asyncio.get_running_loop().time() >= directory.next_scan_s:
            self.begin_scan(directory, first=False)

    async def scanned_soon(self, directory: Directory, *, pause: bool = False) -> bool:
        """Call `scan_soon` and wait a bounded time. Return True if a scan ended.

        `pause`: first wait for the rest of the pause after the last scan, but no longer than for a scan. Used by a
        write that knows too few victims, which would fail until then; other processes may have evicted those that it
        knew.
        """
        now_s = asyncio.get_running_loop().time()
        if pause and directory.scanning is None and directory.next_scan_s > now_s:
            await asyncio.sleep(min(directory.next_scan_s - now_s, _SCAN_WAIT_S))
            directory.next_scan_s = min(directory.next_scan_s, asyncio.get_running_loop().time())
        self.scan_soon(directory)
        scanning = directory.scanning
        if scanning is None:
            return False
        return bool((await asyncio.wait([scanning], timeout=_SCAN_WAIT_S))[0])

    async def scanned(self) -> None:
        """Wait for all running scans, and for the evictions to which they lead."""
        await asyncio.gather(*(directory.scanning for directory in self.all if directory.scanning is not None))
        for directory in self.all:
            async with directory.trimming:
                pass

    async def first_scan(self, directory: Directory) -> None:
        """Wait until the directory has been scanned once."""
        while not directory.scanned and directory.scanning is not None:
            await asyncio.wait([directory.scanning])

    async def _scan(self, directory: Directory, first: bool) -> None:
        files = directory.files
        failure: OSError | TierUnavailable | None = None
        try:
            found = await scan(directory, self.metadata.background, first=first)
            if found is not None:
                self.counters.strays += found.strays
        except (OSError, TierUnavailable) as error:
            failure = error
            logger.warning("%s could not be scanned: %s", files.root, error)
        finally:
            if directory.files is files:
                directory.scanned, directory.scanning = True, None
        if isinstance(failure, FileNotFoundError):
            await self.replace(directory, files)
            return
        if isinstance(failure, OSError):
            # Without a count nothing is written, so perhaps no other call notices a dead mount.
            self.io.suspect(failure)
            if await self.is_replaced(files, failure):
                with contextlib.suppress(OSError, TierUnavailable):
                    await self.reopen(directory, files)
        await self._trim(directory)

    # Making room

    async def make_room(self, directory: Directory, needed_bytes: int, deficit_bytes: int) -> Victims:
        """Return the victims of a write of `needed_bytes` that lacks `deficit_bytes`, the least recently used chunks of the
        index. Raises TierFull.
        """
        files, index = directory.files, directory.index
        if deficit_bytes > 0 and directory.scanned and directory.is_doubtful:
            if 2 * index.used_bytes > files.cap_bytes:
                self.scan_soon(directory)
            elif await self.scanned_soon(directory):
                deficit_bytes = min(deficit_bytes, files.capacity.used_bytes + needed_bytes - files.cap_bytes)
        deficit_bytes = give_up_bytes(deficit_bytes, needed_bytes)
        if deficit_bytes > index.used_bytes and directory.files is files:
            known_bytes = files.capacity.used_bytes
            await self.metadata.submit(files.capacity.refresh)
            deficit_bytes -= known_bytes - files.capacity.used_bytes
        if (
            deficit_bytes > index.used_bytes
            and directory.files is files
            and await self.scanned_soon(directory, pause=True)
        ):
            deficit_bytes = min(deficit_bytes, files.capacity.used_bytes + needed_bytes - files.cap_bytes)
        if directory.files is not files:
            return []  # the new directory has its own deficit
        if deficit_bytes > index.used_bytes:
            raise TierFull(
                f"{files.root}: {files.capacity.used_bytes} of {files.cap_bytes} bytes are in use and only "
                f"{index.used_bytes} of them are known chunks"
            )
        return self._evict(directory, deficit_bytes)

    def trim_soon(self, directory: Directory) -> None:
        """Evict in the background what exceeds tenants' quotas; other instances may have written it."""
        if not self.closed and not directory.trimming.locked() and directory.index.excess_bytes > 0:
            self.begin(self._trim(directory), f"trim-{directory.files.root}")

    async def _trim(self, directory: Directory) -> None:
        """Evict what exceeds the cap or a quota, in steps, so that writes can run in between."""
        files = directory.files
        async with directory.trimming:
            while directory.files is files and not self._only_reads:
                if files.capacity.used_bytes > files.cap_bytes:
                    with contextlib.suppress(OSError, TierUnavailable):  # then by the last known count
                        await self.metadata.evicting.submit(files.capacity.refresh)
                excess_bytes = max(files.capacity.used_bytes - files.cap_bytes, directory.index.excess_bytes)
                victims = self._evict(directory, excess_bytes, _TRIM_STEP)
                if not victims or (await self.delete(directory, victims)).error is not None:
                    return

    def _evict(self, directory: Directory, needed_bytes: int, most: int | None = None) -> Victims:
        victims = directory.index.evict(needed_bytes, most)
        self.counters.evicted += len(victims)
        return victims

    async def delete(self, directory: Directory, victims: Victims, reuse_bytes: int = 0) -> Deleted:
        """Delete the files of evicted chunks like `ChunkFiles.delete_all`, whose errors are in the result. Those that are
        left go back into the index, as the most recently used.
        """
        files = directory.files
        try:
            with directory.leaving(victims):
                done = await wait_shielded(self.metadata.evicting.submit(files.delete_all, victims, reuse_bytes))
        except (OSError, TierUnavailable) as error:
            done = Deleted(left=victims, error=error)
        if directory.files is files:
            for key, occupied_bytes in done.left:
                directory.index.add(key, occupied_bytes)
        if done.error is not None:
            logger.warning("%s: chunks could not be evicted: %s", files.root, done.error)
        return done

    # Retries

    async def _catch_up(self, directory: Directory) -> None:
        """Retry failed deletions and counter updates. Other instances cannot use freed bytes that stay counted, and this one
        may have nothing to write.
        """
        while True:
            await asyncio.sleep(_CATCH_UP_S)
            if directory.files.is_behind:
                with contextlib.suppress(TierUnavailable):  # no thread could be started
                    await self.metadata.change(directory.files.catch_up)

    # Replaced directories

    async def is_replaced(self, files: ChunkFiles, error: OSError) -> bool:
        """Return True if our open files are gone, or are on a dead mount that another mount has replaced."""
        if self.io.sees_remounts or error.errno not in _DEAD_MOUNT:
            return isinstance(error, FileNotFoundError)
        return await self.metadata.submit(files.answers)

    async def reopen(self, directory: Directory, stale: ChunkFiles) -> None:
        """Open a directory again that was emptied, deleted or replaced. `stale` are the files that the caller used;
        concurrent calls with the same `stale` replace them once.
        """
        self.io.suspect()
        async with directory.replacing:
            if directory.files is stale:
                if await self.metadata.submit(stale.is_away):  # writes would fill the device below the mount
                    raise TierUnavailable(f"{stale.root.parent} is not there any more")
                await self.metadata.change(stale.access.make_root, stale.root.parent)
                mounted_anew = await self.metadata.submit(stale.is_mounted_anew)
                logger.warning(_MOUNTED_ANEW if mounted_anew else _LOST, stale.root.parent)
                try:
                    fresh = await self._opened_anew(directory)
                except ConfigError as error:
                    raise TierUnavailable(f"{self.name}: {error}") from error
                if self.closed:
                    self.metadata.later(fresh.close)
                    raise TierUnavailable(f"{self.name} is closed")
                directory.begin_anew(fresh, CappedIndex(self.settings.tenant_share_bytes))
                self.metadata.later(stale.close)
                self.begin_scan(directory, first=True)
        if not directory.files.capacity.trusted:
            await self.scanned_soon(directory)
            if not directory.files.capacity.trusted:
                raise TierUnavailable(f"{self.name}: the chunks in {stale.root} are being counted")

    async def remount(self) -> None:
        """Reopen all directories on the new mount. The indexes stay valid."""
        for directory in self.all:
            async with directory.replacing:
                fresh = await self._opened_anew(directory)
                self.metadata.later(directory.files.close)
                directory.files = fresh
                # Writes that the old mount lost are still counted until a scan.
                self.begin_scan(directory, first=False)

    async def replace(self, directory: Directory, stale: ChunkFiles, *, may_make: bool = True) -> None:
        """Call `reopen` if the directory was wiped. `may_make`: also if it is missing."""
        try:
            is_there = may_make or await self.metadata.submit(stale.root.is_dir)
            if is_there and await self.metadata.submit(stale.is_wiped):
                await self.reopen(directory, stale)
        except (OSError, TierUnavailable) as error:
            logger.info("%s: %s", stale.root, error)

    # Opening

    def make_files(self, directory: Path, cap_bytes: int) -> ChunkFiles:
        settings = self.settings
        return (OnlyRead if self._only_reads else ChunkFiles)(
            directory,
            cap_bytes,
            self.fingerprint,
            direct=settings.direct,
            durable=settings.durable,
            step_bytes=settings.step_of(cap_bytes),
            many_hosts=settings.many_hosts,
            beside=settings.beside,
            access=ACCESS[settings.file_access],
            compression=self.compression,
        )

    @contextlib.contextmanager
    def _configured(self, directory: Path) -> Iterator[None]:
        """Turn errors of a directory into ConfigError."""
        try:
            yield
        except WrongFormat as error:
            raise ConfigError(f"{self.option}: {error}") from error
        except OSError as error:
            raise ConfigError(f"{self.option}: {directory} cannot be used: {error}") from error

    async def _place_of(self, directory: Path) -> Path:
        """Return the root that stores the chunks of a configured directory."""
        with self._configured(directory):
            if self._only_reads:
                return await self.metadata.submit(place_of, directory)
            return await self.metadata.change(make_place, directory, ACCESS[self.settings.file_access])

    async def _opened_anew(self, directory: Directory) -> ChunkFiles:
        """Open the directory that has the configured path now, under the same rules as at the start. Raises ConfigError."""
        place = await self._place_of(self.settings.directories[self.all.index(directory)])
        fresh = self.make_files(place, directory.files.cap_bytes)
        await self._open_files(fresh)
        self._limit_files(fresh)
        return fresh

    async def _open_files(self, files: ChunkFiles) -> None:
        with self._configured(files.root):
            try:
                await self.metadata.change(files.open)
            except BaseException:
                self.metadata.later(files.close)  # a cancelled call may still run; this one waits for it
                raise


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s ended unexpectedly", task.get_name(), exc_info=error)
