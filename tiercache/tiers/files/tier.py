"""The file tier: one file per chunk in one or several directories, under a physical cap.

This is the asynchronous half: it decides and counts, and hands whole operations to worker threads; `chunk_files.py` is the
half that blocks. File systems differ in two parts (`directories.py`): how bytes move, and what is known of a directory.
A tier for one file system is a choice of these.

The mount of a directory may be away. A tier that opens late is there from the start, and used once its mount answers. A
mount that is so full that our bookkeeping finds no room on it counts as away.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tiercache.core.admission import Admission, Governor
from tiercache.core.header import file_bytes
from tiercache.core.keys import ChunkKey
from tiercache.core.tenants import added_up, shown
from tiercache.device.driver import Tensor
from tiercache.errors import ConfigError, CorruptChunk, TierFull, TierUnavailable
from tiercache.memory.workers import wait_shielded
from tiercache.tiers.base import DeviceTier, TierStatistics, Traits
from tiercache.tiers.files.access import (
    ACCESS,
    Access,
    Mount,
    NotAFile,
    local_locks,
    mount_of,
    warn_of_missing_mount,
)
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directories import ChunkIO, Directories, FileSettings, Lookup, give_up_bytes
from tiercache.tiers.files.directory import NameTaken, Victims, reads_back
from tiercache.tiers.files.format import NO_ROOM
from tiercache.tiers.files.index import ProbingLookup
from tiercache.tiers.files.scanning import Directory

logger = logging.getLogger("tiercache.disk")

_ATTEMPTS = 4
_FILES_TO_DOUBT = 3
"""After so many unreadable files in a row the device is tested by reading something else: bad files may lie together."""
_FILES_OWN_FAULT = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODATA})
_AWAY = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNREFUSED, errno.ECONNRESET, errno.EREMOTEIO}
    | {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ESHUTDOWN}
    | {errno.ENODEV, errno.ENXIO}
)
"""Errors of file systems whose server is away."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
"""Bounds of the pause between two attempts to open a tier whose mount is away."""

BeginRead = Callable[[ChunkFiles], "asyncio.Future[int | None]"]
"""Begins what does as `ChunkFiles.read`."""
BeginWrite = Callable[[ChunkFiles, Victims], "asyncio.Future[int]"]
"""Begins what does as `ChunkFiles.write`; called several times, perhaps."""


class FileTier(DeviceTier):
    def __init__(
        self,
        name: str,
        option: str,
        settings: FileSettings,
        fingerprint: bytes,
        io: Callable[[Directories], ChunkIO],
        lookup: Callable[[Directories], Lookup] = ProbingLookup,
        *,
        metadata_threads: int = 1,
        late_s: float | None = None,
    ) -> None:
        """`option` is the configuration key that names the directories, for messages.

        A tier with `late_s` may open late: `open` waits so many seconds for the mount and goes on in the background, and
        until then operations raise TierUnavailable.
        """
        self.name = name
        self.option = option
        self.directories = Directories(name, option, settings, fingerprint, metadata_threads, io, lookup)
        self.traits = self._traits()
        self.admission = Admission(settings.admission)
        self.governor = Governor(settings.bytes_per_day)
        self._statistics = self.directories.counters
        self._said_uncounted = False
        self._unreadable: set[ChunkKey] = set()
        """The first files that could not be read since a read succeeded, at most `_FILES_TO_DOUBT`."""
        self._evicted_for_quotas = 0
        self._late_s = late_s
        self._opening: asyncio.Task[None] | None = None

    @property
    def settings(self) -> FileSettings:
        """With the true cap, once the tier is open."""
        return self.directories.settings

    @property
    def serves_device(self) -> bool:
        return self.directories.io.serves_device

    async def open(self) -> None:
        """Raises ConfigError for what does not pass by waiting. Cancelled, it closes again."""
        try:
            if self._late_s is None:
                await self.directories.open(only_reads=not self.writes)
            else:
                await self._open_late(self._late_s)
        except (Exception, asyncio.CancelledError):  # not GeneratorExit: nothing would run what waits
            await self.close()
            raise
        self.traits = self._traits()

    async def close(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
            await asyncio.wait([opening], timeout=self._late_s)
        await self.directories.io.close()
        await self.directories.close()

    def describe(self) -> str:
        places = ", ".join(str(directory) for directory in self.settings.directories)
        if not self.directories.is_open:
            return f"{self.name} ({places})"
        way = self.directories.io.describe()
        most = f"at most {self.settings.cap_bytes / 2**30:.2f} GB" if self.writes else "only read"
        return f"{self.name} ({places}, {most}{way and ', '}{way})"

    # Opening late

    async def _open_late(self, late_s: float) -> None:
        opening = self._opening = asyncio.create_task(self._keep_opening(), name=f"tiercache-open-{self.name}")
        await asyncio.wait([opening], timeout=late_s)
        if opening.done():
            opening.result()
            return

        def report(opening: asyncio.Task[None]) -> None:
            if not opening.cancelled() and (error := opening.exception()) is not None:
                logger.error("%s stays out of use: %s", self.name, error)

        opening.add_done_callback(report)
        logger.warning("%s cannot be reached; the tier is used as soon as it answers", self.describe())

    async def _keep_opening(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._open_once()
                return
            except TierUnavailable as error:
                logger.warning("%s; trying again", error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _open_once(self) -> None:
        """Raises TierUnavailable for what may pass by waiting, ConfigError for what does not."""
        try:
            # First, and by itself: a mount that hangs does it here, where nothing has to be undone.
            access = ACCESS[self.settings.file_access] if self.writes else None
            for mount in await self.directories.metadata.submit(_mounts_of, self.settings.directories, access):
                option, _ = local_locks(mount)
                if option:
                    logger.warning(
                        "%s: %s is mounted with %s: the cap holds among the instances of one host, not of all",
                        self.name, mount.point, option,
                    )  # fmt: skip
            await self.directories.open(only_reads=not self.writes)
        except (OSError, ConfigError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(cause, OSError):
                raise
            is_missing = isinstance(cause, FileNotFoundError)
            # A missing directory is made by an instance that writes. Bookkeeping may be deleted while it is begun. A full
            # mount has files of others, which may go.
            if (
                cause.errno in _AWAY
                or cause.errno in NO_ROOM
                or (is_missing and (not self.writes or "/.tiercache" in str(cause.filename)))
            ):
                raise TierUnavailable(f"{self.name}: {cause}") from error
            raise ConfigError(f"{self.option}: {cause}") from error

    @contextmanager
    def _at_mount(self) -> Iterator[None]:
        """Bracket an operation on the directories. Raises TierUnavailable where a tier that may open late is not open, or
        its mount is away."""
        is_late = self._late_s is not None
        if is_late and self._opening is None:
            raise TierUnavailable(f"{self.name}: closed")
        if is_late and not self.directories.is_open:
            raise TierUnavailable(f"{self.describe()} cannot be reached")
        try:
            yield
        except OSError as error:
            self.directories.io.failed(error)
            if is_late and (error.errno in _AWAY or isinstance(error, FileNotFoundError)):
                raise TierUnavailable(f"{self.name}: {error}") from error
            raise

    def contains(self, key: ChunkKey) -> bool:
        return self.directories.contains(key)

    def offered(self) -> Sequence[Container[ChunkKey]]:
        return self.directories.known() if self.traffic.refuses_none else super().offered()

    def tell(self, on_change: Callable[[ChunkKey], None]) -> None:
        self.directories.tell(on_change)

    def prefix(self, keys: Sequence[ChunkKey]) -> int:
        return self.directories.prefix(keys)

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        with self._at_mount():
            return await self.directories.lookup.probe(keys)

    async def probe_each(self, keys: Sequence[ChunkKey]) -> list[bool]:
        with self._at_mount():
            return await self.directories.lookup.probe_each(keys)

    def statistics(self) -> TierStatistics:
        directories = self.directories
        counters = TierStatistics(**vars(self._statistics))
        counters.evicted = directories.evicted + self._evicted_for_quotas
        counters.stored_bytes = directories.compression.stored_bytes or counters.written_bytes
        counters.resident = sum(len(directory.index) for directory in directories.all)
        counters.occupied_bytes = sum(
            directory.files.capacity.used_bytes if self.writes else directory.index.used_bytes
            for directory in directories.all
        )
        counters.tenants = shown(added_up(directory.index.tenant_statistics() for directory in directories.all))
        return counters

    async def scanned(self) -> None:
        """Wait until the index is complete (for tests and tools; the tier serves before that)."""
        await self.directories.scanned()

    async def refreshed(self) -> None:
        """Wait until the index has what other instances did before this call, where it follows them (for tests and
        tools)."""
        await self.scanned()
        await self.directories.lookup.refreshed()

    def path(self, key: ChunkKey) -> str:
        """The file that holds `key`, or would."""
        return self.directories.path(key)

    # Reading

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        return await self._read(key, lambda files: self.directories.io.read(files, key, into))

    async def prefetch(self, key: ChunkKey, into: np.ndarray) -> int | None:
        return await self._read(key, lambda files: self.directories.io.prefetch(files, key, into))

    def hurry(self, key: ChunkKey) -> None:
        self.directories.io.hurry(key)

    async def read_device(self, key: ChunkKey, into: Tensor) -> int | None:
        return await self._read(key, lambda files: self.directories.io.read_device(files, key, into))

    async def _read(self, key: ChunkKey, read: BeginRead) -> int | None:
        with self._at_mount():
            length, directories = None, self.directories.places(key)
            is_known = key in directories[0].index
            for directory in directories:
                length = await self._read_from(directory, key, read)
                if length is not None:
                    break
        if not is_known:
            self.directories.lookup.missed(directories[0])
        if length is None:
            self._statistics.read_misses += 1
            return None
        self._statistics.reads += 1
        self._statistics.read_bytes += length
        self.directories.refused.pop(key, None)
        return length

    async def _read_from(self, directory: Directory, key: ChunkKey, read: BeginRead) -> int | None:
        began = directory.look_for(key)
        try:
            length = await wait_shielded(read(directory.files))
        except CorruptChunk as error:
            self._found_bad(directory, key)
            logger.warning("a chunk failed verification: %s", error)
            raise
        except OSError as error:
            if not await self._is_files_fault(directory.files, key, error):
                raise
            self._found_bad(directory, key)
            logger.warning("a chunk cannot be read: %s", error)
            await self.directories.metadata.submit(directory.files.set_aside, key)
            raise CorruptChunk(f"{directory.files.path(key)}: cannot be read: {error}") from error
        finally:
            is_latest = directory.looked(key, began)
            self.directories.catch_up_soon(directory)
        self._unreadable.clear()
        if length is None:
            if is_latest:  # else it was stored after we had looked
                directory.index.remove(key)
            return None
        if key in directory.index:
            directory.index.touch(key)
            directory.note(key)
        # Else the scan, or a probe, takes it up with the bytes that it occupies: a compressed one has fewer than were read.
        return length

    def _found_bad(self, directory: Directory, key: ChunkKey) -> None:
        directory.index.remove(key)
        self.directories.refuse(key)
        self._statistics.corrupt += 1

    async def _is_files_fault(self, files: ChunkFiles, key: ChunkKey, error: OSError) -> bool:
        """An unreadable file costs itself, however many lie together; a device that reads nothing at all has failed."""
        if isinstance(error, NotAFile) or error.errno in _FILES_OWN_FAULT:
            return True
        if error.errno not in self.directories.io.perhaps_files:
            return False
        if len(self._unreadable) < _FILES_TO_DOUBT:
            self._unreadable.add(key)
        if len(self._unreadable) >= _FILES_TO_DOUBT:
            if not await self.directories.metadata.submit(reads_back, files.root):
                return False
            self._unreadable.clear()
        return True

    # Writing

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        io = self.directories.io
        return await self._write(
            key, payload_bytes, lambda files, victims: io.write(files, key, payload, payload_bytes, victims)
        )

    async def write_device(self, key: ChunkKey, payload: Tensor, payload_bytes: int) -> bool:
        io = self.directories.io
        return await self._write(
            key, payload_bytes, lambda files, victims: io.write_device(files, key, payload, payload_bytes, victims)
        )

    async def _write(self, key: ChunkKey, payload_bytes: int, write: BeginWrite) -> bool:
        if not self.writes:
            return False
        with self._at_mount():
            return await self._write_to(self.directories.places(key)[0], key, payload_bytes, write)

    async def _write_to(self, directory: Directory, key: ChunkKey, payload_bytes: int, write: BeginWrite) -> bool:
        await directory.until_deleted(key)
        if key in directory.index:
            directory.index.touch(key)
            return True
        self.admission.used(key)
        needed_bytes = file_bytes(payload_bytes)
        if needed_bytes > directory.files.cap_bytes:
            return False
        if not directory.files.capacity.trusted:
            # Files without a count: the cap cannot be kept before they are counted.
            if not self._said_uncounted:
                self._said_uncounted = True
                logger.warning(
                    "%s: its count of bytes is missing; nothing is written before a scan", directory.files.root
                )
            self.directories.scan_soon(directory)
            return False
        now_s = asyncio.get_running_loop().time()
        index = directory.index
        if not index.fits(key, needed_bytes):
            return False
        if not self.admission.admits(key) or not self.governor.allows(needed_bytes, now_s):
            return False
        began, is_latest = directory.look_for(key), False
        index.expect(key, needed_bytes)
        try:
            occupied_bytes = await self._write_evicting(directory, key, needed_bytes, write)
        except BaseException as error:
            self.governor.give_back(needed_bytes)
            self._statistics.write_failures += 1
            if not isinstance(error, NameTaken):
                raise
            logger.warning("a chunk cannot be stored: %s", error)
            return False
        finally:
            index.expect(key, -needed_bytes)
            is_latest = directory.looked(key, began)
            self.directories.catch_up_soon(directory)
        self.directories.refused.pop(key, None)
        if is_latest or key in directory.index:  # else it was seen before we heard of it, and evicted
            directory.add(key, occupied_bytes)
        directory.note(key)
        self._statistics.writes += 1
        self._statistics.written_bytes += payload_bytes
        return True

    async def _write_evicting(self, directory: Directory, key: ChunkKey, needed_bytes: int, write: BeginWrite) -> int:
        deficit_bytes = directory.files.capacity.used_bytes + needed_bytes - directory.files.cap_bytes
        attempt = 0
        while attempt < _ATTEMPTS:
            own_bytes = give_up_bytes(directory.index.lacking_bytes(key), needed_bytes)
            victims = await self.directories.make_room(directory, needed_bytes, deficit_bytes - own_bytes)
            # Chosen only now: what was chosen before a wait would be lost if that failed.
            own = directory.index.evict_own(key, give_up_bytes(directory.index.lacking_bytes(key), needed_bytes))
            self._evicted_for_quotas += len(own)
            victims += own
            files = directory.files
            try:
                try:
                    with directory.leaving(victims):
                        return await wait_shielded(write(files, victims))
                finally:
                    for left, occupied_bytes in victims.left if directory.files is files else ():
                        directory.index.add(
                            left, occupied_bytes
                        )  # as the newest: all others go before it is tried again
            except TierFull:
                # Victims that another instance had deleted were no attempt, and are out of the index now.
                attempt += not victims.were_gone or bool(victims.left)
                deficit_bytes = max(needed_bytes, files.capacity.used_bytes + needed_bytes - files.cap_bytes)
            except FileNotFoundError:
                await self.directories.reopen(directory, files)
                deficit_bytes = 0
                attempt += 1
            except OSError as error:
                if await self.directories.is_replaced(files, error):
                    await self.directories.reopen(directory, files)
                    attempt += 1
                    continue
                if error.errno not in NO_ROOM:
                    raise
                # The device is fuller than our cap allows for: make room at our own expense, then say so.
                attempt += not victims.were_gone
                if await self.directories.close_deleted():
                    deficit_bytes = 0
                    continue
                deficit_bytes = needed_bytes << max(0, attempt - 1)
                if deficit_bytes > directory.index.used_bytes:
                    await self.directories.scanned_soon(
                        directory
                    )  # others may have filled it since we looked what is there
                if not directory.index.used_bytes:
                    raise TierFull(f"{files.root}: {error.strerror}, and nothing of ours is left to evict") from error
                deficit_bytes = min(deficit_bytes, directory.index.used_bytes)
        raise TierFull(f"{directory.files.root}: no room after {_ATTEMPTS} attempts")

    def used(self, keys: Sequence[ChunkKey]) -> Sequence[ChunkKey]:
        # Also what was hot: a chunk that leaves the hot cache after a hundred uses should not have left here long before.
        for directory in self.directories.all:
            directory.index.touch_prefix(keys)
        if self.settings.admission == "all":
            return ()
        wanted = []
        for key in keys:
            self.admission.used(key)
            if self.admission.admits(key) and not self.contains(key):
                wanted.append(key)
        return wanted

    def continued(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self.admission.continued(key)

    # Removing

    async def remove(self, key: ChunkKey) -> bool:
        if not self.writes:
            return False
        # From every directory: it may lie, too, where it was stored before others were added. What we do not know of may be
        # somebody else's. Whoever stops waiting leaves it to the thread.
        places = []
        for directory in self.directories.all:
            places.append((directory.files, directory.index.remove(key)))
            directory.note(key)
        try:
            with self._at_mount():
                return await self.directories.metadata.submit(_remove, places, key)
        finally:
            # Who looked at the directory meanwhile may have seen it still.
            for directory in self.directories.all:
                directory.removed(key)
                self.directories.catch_up_soon(directory)

    def _traits(self) -> Traits:
        io = self.directories.io
        return Traits(
            durable=True,
            shared=True,
            read_concurrency=io.places,
            write_concurrency=io.write_places,
            prefetches_apart=io.prefetches_apart,
        )


def _mounts_of(directories: Sequence[Path], access: Access | None) -> list[Mount]:
    """Ask the mounts, and raise their errors. With `access`, make missing directories. Runs in a thread."""
    for directory in directories:
        if access is not None and not directory.is_dir():
            warn_of_missing_mount(directory)
            access.make_root(directory)
        with os.scandir(directory) as entries:
            next(entries, None)
    return list(dict.fromkeys(mount_of(directory) for directory in directories))


def _remove(places: list[tuple[ChunkFiles, int | None]], key: ChunkKey) -> bool:
    """Whether the chunk was anywhere. A directory that fails keeps it in no other; its error is raised at the end."""
    gone, failure = False, None
    for files, occupied_bytes in places:
        try:
            gone = files.remove(key, occupied_bytes) or gone
        except (OSError, TierUnavailable) as error:
            failure = error
    if failure is not None:
        raise failure
    return gone
