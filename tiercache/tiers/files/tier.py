"""The file tier: one file per chunk in one or several directories, under a physical cap.

`FileTier` belongs to the event loop: it decides, counts, and hands whole operations to worker threads, which run
`chunk_files.py`. Two parts differ between file systems: a `ChunkIO` moves bytes, and a `ProbingLookup` knows which chunks
exist. A tier for one file system is a preset that chooses both.

A tier that opens late exists before its mount answers, and is used as soon as it does. A mount without room for the tier's
own small files counts as one that does not answer.
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
from tiercache.tiers.base import DeviceTier, Tier, TierStatistics, Traits
from tiercache.tiers.files.access import Mount, local_locks, mount_of
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directories import ChunkIO, Directories, FileSettings, give_up_bytes
from tiercache.tiers.files.directory import SUBDIRECTORY, TOP_LEVELS, Deleted, reads_back
from tiercache.tiers.files.format import NO_ROOM
from tiercache.tiers.files.index import ProbingLookup
from tiercache.tiers.files.scanning import Directory

logger = logging.getLogger("tiercache.disk")

_ATTEMPTS = 4
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
"""Begin a call with the result of `ChunkFiles.read`."""
BeginWrite = Callable[[ChunkFiles], "asyncio.Future[int]"]
"""Begin a call with the result of `ChunkFiles.write`. It is called again after a failed attempt."""


class FileTier(DeviceTier):
    def __init__(
        self,
        name: str,
        option: str,
        settings: FileSettings,
        fingerprint: bytes,
        io: Callable[[Directories], ChunkIO],
        lookup: Callable[[Directories], ProbingLookup] = ProbingLookup,
        *,
        metadata_threads: int = 1,
        late_s: float | None = None,
    ) -> None:
        """Describe a tier; nothing is opened.

        `option` is the configuration key that names the directories, for messages. With `late_s`, `open` waits at most so
        many seconds for the mount and then continues in the background; until it ends, operations raise TierUnavailable.
        """
        self.name = name
        self.option = option
        self.directories = Directories(name, option, settings, fingerprint, metadata_threads, io)
        self.lookup = lookup(self.directories)
        self.traits = self._traits()
        self.admission: Admission = Admission(settings.admission)
        self.governor = Governor(settings.bytes_per_day)
        self._statistics = self.directories.counters
        self._said_uncounted = False
        self._late_s = late_s
        self._on_change: Callable[[ChunkKey], None] | None = None
        self._opening: asyncio.Task[None] | None = None

    @property
    def settings(self) -> FileSettings:
        """The settings. Once the tier is open, `cap_bytes` is the cap in force."""
        return self.directories.settings

    @property
    def serves_device(self) -> bool:
        return self.directories.io.serves_device

    async def open(self) -> None:
        """Open the directories. Raises ConfigError if waiting does not help. A cancelled call closes the tier."""
        try:
            if self._late_s is None:
                await self._open_directories()
            else:
                await self._open_late(self._late_s)
        except (Exception, asyncio.CancelledError):  # not GeneratorExit, after which no await is allowed
            await self.close()
            raise
        self.traits = self._traits()

    async def _open_directories(self) -> None:
        await self.directories.open(only_reads=not self.writes)
        self.lookup.begin()
        if self._on_change is not None:
            self.tell(self._on_change)

    def take_over(self, before: Tier) -> None:
        super().take_over(before)
        assert isinstance(before, FileTier)
        self.admission, self.governor = before.admission, before.governor
        self._statistics = self.directories.counters = before.directories.counters
        self.directories.compression.stored_bytes = before.directories.compression.stored_bytes
        if before._on_change is not None:
            self.tell(before._on_change)

    @property
    def capacity_bytes(self) -> int:
        return self.settings.cap_bytes

    def limit(self, cap_bytes: int, tenant_bytes: int) -> None:
        """Change the cap and the quota of an open tier. What exceeds them is evicted in the background, in steps."""
        self.directories.limit(cap_bytes, tenant_bytes)

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
        """Open the directories. Raises TierUnavailable if waiting may help, else ConfigError."""
        try:
            # A hung mount hangs in this call, after which nothing has to be undone.
            for mount in await self.directories.metadata.submit(_mounts_of, self.settings.directories, self.writes):
                option, _ = local_locks(mount)
                if option:
                    logger.warning(
                        "%s: %s is mounted with %s: the cap holds among the instances of one host, not of all",
                        self.name, mount.point, option,
                    )  # fmt: skip
            await self._open_directories()
        except (OSError, ConfigError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(cause, OSError):
                raise
            is_missing = isinstance(cause, FileNotFoundError)
            # Another instance may make a missing directory, and a user may delete ours while they are made. A full mount
            # may get free space again.
            if (
                cause.errno in _AWAY
                or cause.errno in NO_ROOM
                or (is_missing and (not self.writes or f"/{SUBDIRECTORY}" in str(cause.filename)))
            ):
                raise TierUnavailable(f"{self.name}: {cause}") from error
            raise ConfigError(f"{self.option}: {cause}") from error

    @contextmanager
    def _at_mount(self) -> Iterator[None]:
        """Bracket an operation on the directories. Raises TierUnavailable if a tier that opens late is not open, or if its
        mount does not answer.
        """
        is_late = self._late_s is not None
        if is_late and self._opening is None:
            raise TierUnavailable(f"{self.name}: closed")
        if is_late and not self.directories.is_open:
            raise TierUnavailable(f"{self.describe()} cannot be reached")
        try:
            yield
        except OSError as error:
            self.directories.io.suspect(error)
            if is_late and (error.errno in _AWAY or isinstance(error, FileNotFoundError)):
                raise TierUnavailable(f"{self.name}: {error}") from error
            raise

    def contains(self, key: ChunkKey) -> bool:
        return self.directories.contains(key)

    def offered(self) -> Sequence[Container[ChunkKey]]:
        return self.directories.known() if self.traffic.refuses_none else super().offered()

    def tell(self, on_change: Callable[[ChunkKey], None]) -> None:
        self._on_change = on_change
        for directory in self.directories.all:
            directory.index.on_change = on_change
        self.lookup.follow()

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        with self._at_mount():
            return await self.lookup.probe(keys)

    async def probe_each(self, keys: Sequence[ChunkKey]) -> list[bool]:
        with self._at_mount():
            return await self.lookup.probe_each(keys)

    def statistics(self) -> TierStatistics:
        directories = self.directories
        counters = TierStatistics(**vars(self._statistics))
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

    async def own_keys(self) -> set[ChunkKey]:
        """Return the existing chunks of this tier's layout, stored by any process. Reads every header. Raises OSError.

        The caller sets a deadline. After cancellation one subdirectory is still read in its thread.
        """
        found: set[ChunkKey] = set()
        for directory in self.directories.all:
            for top in TOP_LEVELS:
                found |= await self.directories.metadata.submit(directory.files.own_keys, top)
        return found

    def path(self, key: ChunkKey) -> str:
        """Return the path where `key` is or would be stored."""
        return self.directories.places(key)[0].files.path(key)

    # Reading

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        return await self._read(key, lambda files: self.directories.io.read(files, key, into))

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
            self.lookup.missed(directories[0])
        if length is None:
            self._statistics.read_misses += 1
            return None
        self._statistics.reads += 1
        self._statistics.read_bytes += length
        directory.refused.pop(key, None)
        return length

    async def _read_from(self, directory: Directory, key: ChunkKey, read: BeginRead) -> int | None:
        is_obsolete = directory.looking()
        try:
            length = await wait_shielded(read(directory.files))
        except CorruptChunk as error:
            self._found_bad(directory, key)
            logger.warning("a chunk failed verification: %s", error)
            raise
        except OSError as error:
            if not await self._is_files_fault(directory.files, error):
                raise
            self._found_bad(directory, key)
            logger.warning("a chunk cannot be read: %s", error)
            await self.directories.metadata.submit(directory.files.delete_bad, key)
            raise CorruptChunk(f"{directory.files.path(key)}: cannot be read: {error}") from error
        if length is None:
            if not is_obsolete(key):  # else it was stored after we had looked
                directory.removed(key)
            return None
        if key in directory.index:
            directory.index.touch(key)
        # Otherwise a scan or a probe adds it, since the bytes that it occupies are unknown here.
        return length

    def _found_bad(self, directory: Directory, key: ChunkKey) -> None:
        directory.refuse(key)
        self._statistics.corrupt += 1

    async def _is_files_fault(self, files: ChunkFiles, error: OSError) -> bool:
        """Return True if only the file is unreadable, False if the device fails to read the manifest too."""
        if error.errno in _FILES_OWN_FAULT:
            return True
        return error.errno in self.directories.io.perhaps_files and await self.directories.metadata.submit(
            reads_back, files.root
        )

    # Writing

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        io = self.directories.io
        return await self._write(key, payload_bytes, lambda files: io.write(files, key, payload, payload_bytes))

    async def write_device(self, key: ChunkKey, payload: Tensor, payload_bytes: int) -> bool:
        io = self.directories.io
        return await self._write(key, payload_bytes, lambda files: io.write_device(files, key, payload, payload_bytes))

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
            # The cap cannot be kept before the existing files are counted.
            if not self._said_uncounted:
                self._said_uncounted = True
                logger.warning(
                    "%s: its count of bytes is missing or wrong; nothing is written before a scan", directory.files.root
                )
            self.directories.scan_soon(directory)
            return False
        now_s = asyncio.get_running_loop().time()
        index = directory.index
        if not index.fits(key, needed_bytes):
            return False
        if not self.admission.admits(key) or not self.governor.allows(needed_bytes, now_s):
            return False
        index.expect(key, needed_bytes)
        is_obsolete = directory.looking()
        try:
            occupied_bytes = await self._write_evicting(directory, key, needed_bytes, write)
        except BaseException:
            self.governor.give_back(needed_bytes)
            self._statistics.write_failures += 1
            raise
        finally:
            index.expect(key, -needed_bytes)
        directory.refused.pop(key, None)
        if not is_obsolete(key) or key in directory.index:
            directory.add(key, occupied_bytes)
        else:  # the key was found meanwhile, and evicted: this file, or an older one before it
            await directory.until_deleted(key)
            is_obsolete = directory.looking()
            occupied_bytes = await self.directories.metadata.submit(directory.files.occupied_by, key)
            if occupied_bytes and not is_obsolete(key):
                directory.add(key, occupied_bytes)
                self.directories.trim_soon(directory)  # others may have been written meanwhile
        self._statistics.writes += 1
        self._statistics.written_bytes += payload_bytes
        return True

    async def _write_evicting(self, directory: Directory, key: ChunkKey, needed_bytes: int, write: BeginWrite) -> int:
        deficit_bytes = directory.files.capacity.used_bytes + needed_bytes - directory.files.cap_bytes
        attempt = 0
        while attempt < _ATTEMPTS:
            own_bytes = give_up_bytes(directory.index.lacking_bytes(key), needed_bytes)
            victims = await self.directories.make_room(directory, needed_bytes, deficit_bytes - own_bytes)
            # Chosen after the wait, since a failed wait would lose them.
            own = directory.index.evict_own(key, give_up_bytes(directory.index.lacking_bytes(key), needed_bytes))
            self._statistics.evicted += len(own)
            victims += own
            files, done = directory.files, Deleted()
            try:
                if victims:
                    done = await self.directories.delete(directory, victims, needed_bytes)
                if done.error is not None and not isinstance(done.error, PermissionError):
                    raise done.error
                if not files.capacity.trusted:  # it was opened anew meanwhile
                    raise TierUnavailable(f"{self.name}: the chunks in {files.root} are being counted")
                return await wait_shielded(write(files))
            except TierFull:
                # Victims that another instance had deleted do not count as an attempt.
                attempt += not victims or bool(done.freed_bytes or done.left)
                deficit_bytes = max(needed_bytes, files.capacity.used_bytes + needed_bytes - files.cap_bytes)
            except OSError as error:
                if await self.directories.is_replaced(files, error):
                    await self.directories.reopen(directory, files)
                    deficit_bytes = 0
                    attempt += 1
                    continue
                if error.errno not in NO_ROOM:
                    raise
                # Files of others fill the device below our cap: evict, and raise TierFull if that does not help.
                attempt += not victims or bool(done.freed_bytes)
                if await self.directories.io.unmap_deleted():
                    deficit_bytes = 0
                    continue
                deficit_bytes = needed_bytes << max(0, attempt - 1)
                if deficit_bytes > directory.index.used_bytes:
                    await self.directories.scanned_soon(directory)  # other instances may have stored chunks to evict
                if not directory.index.used_bytes:
                    raise TierFull(f"{files.root}: {error.strerror}, and nothing of ours is left to evict") from error
                deficit_bytes = min(deficit_bytes, directory.index.used_bytes)
        raise TierFull(f"{directory.files.root}: no room after {_ATTEMPTS} attempts")

    def used(self, keys: Sequence[ChunkKey]) -> Sequence[ChunkKey]:
        # Uses of hot chunks count too, so that a chunk in use is not evicted here before it leaves the hot cache.
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
        # A chunk may be in several directories, if some were added later, and in none of the indexes. After a cancellation
        # the thread goes on.
        for directory in self.directories.all:
            directory.index.remove(key)
        places = [directory.files for directory in self.directories.all]
        try:
            with self._at_mount():
                return await self.directories.metadata.submit(_remove, places, key)
        finally:
            # A lookup or listing that ran meanwhile may have seen the file.
            for directory in self.directories.all:
                directory.removed(key)

    def _traits(self) -> Traits:
        io = self.directories.io
        return Traits(
            durable=True,
            shared=True,
            read_concurrency=io.places,
            write_concurrency=io.write_places,
            prefetch_concurrency=io.prefetch_places,
        )


def _mounts_of(directories: Sequence[Path], may_miss: bool) -> list[Mount]:
    """Return the mounts of the directories, and raise their errors. `may_miss`: they may be missing. Blocks."""
    for directory in directories:
        try:
            with os.scandir(directory) as entries:
                next(entries, None)
        except FileNotFoundError:
            if not may_miss:
                raise
    return list(dict.fromkeys(mount_of(directory) for directory in directories))


def _remove(places: Sequence[ChunkFiles], key: ChunkKey) -> bool:
    """Return True if the chunk was in any directory. Raises the error of a directory after all others were tried."""
    gone, failure = False, None
    for files in places:
        try:
            gone = files.remove(key) or gone
        except (OSError, TierUnavailable) as error:
            failure = error
    if failure is not None:
        raise failure
    return gone
