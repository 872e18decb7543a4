"""The index of a directory, and how it follows changes by other processes.

`ProbingLookup` holds what this instance stored or found, and asks the directory for other keys; `Deletions` removes what
others on this host delete, as inotify reports it. `RelistingLookup` answers from memory: a `Refresher` per directory lists
changed subdirectories periodically.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import struct
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from tiercache.core.index import CappedIndex, Freshness, pause_s
from tiercache.core.keys import ChunkKey
from tiercache.errors import TierUnavailable
from tiercache.memory.workers import Workers, retrieve_exception
from tiercache.tiers.files.access import ABSENT, require_directory
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directories import Directories, Lookup
from tiercache.tiers.files.directory import CHUNK_NAME, TOP_LEVELS
from tiercache.tiers.files.scanning import Directory, merge

logger = logging.getLogger("tiercache.disk")

T = TypeVar("T")

MOVED_FROM = 0x40
MOVED_TO = 0x80
CREATED = 0x100
DELETED = 0x200
MOVED_SELF = 0x800
"""The watched directory was moved, and is still watched."""
OVERFLOW = 0x4000
IGNORED = 0x8000
"""The watch has ended: its directory was deleted or unmounted."""
_ONLY_DIRECTORIES = 0x01000000
_NO_LINKS = 0x02000000
_HEADER = struct.Struct("iIII")
_READ_BYTES = 1 << 16


class Happening(NamedTuple):
    watch: int
    mask: int
    name: str


class Inotify:
    """An inotify instance. Raises OSError if none is left (fs.inotify.max_user_instances)."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._checked(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify")

    def fileno(self) -> int:
        return self._descriptor

    def watch(self, directory: Path, mask: int) -> int:
        """Watch a directory and return the number in its events. Idempotent. May block on the mount. Raises OSError, also if
        no watch is left (fs.inotify.max_user_watches)."""
        number = self._libc.inotify_add_watch(
            self._descriptor, os.fsencode(directory), mask | _ONLY_DIRECTORIES | _NO_LINKS
        )
        return self._checked(number, str(directory))

    def happened(self) -> list[Happening]:
        """Return pending events. Non-blocking."""
        try:
            raw = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return []
        found, position = [], 0
        while position < len(raw):
            watch, mask, _, length = _HEADER.unpack_from(raw, position)
            position += _HEADER.size + length
            found.append(Happening(watch, mask, os.fsdecode(raw[position - length : position].rstrip(b"\0"))))
        return found

    def close(self) -> None:
        os.close(self._descriptor)

    def _checked(self, result: int, what: str) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), what)
        return result


_ROOT = CREATED | MOVED_TO | MOVED_SELF
"""Subdirectories are created with their first chunks."""
_CHUNKS = DELETED | MOVED_FROM
_PAUSE_S = 1.0
_AT_ONCE = 1024


class Deletions:
    """Follows deletions in one directory. Belongs to the event loop; `follow` is its task.

    A deleted chunk may have been stored again, so each key is checked before it leaves the index. Deletions by other hosts
    are not reported.
    """

    def __init__(
        self, directories: Directories, directory: Directory, on_stored: Callable[[ChunkKey], None] | None = None
    ) -> None:
        """`on_stored`: see `Lookup.follow_deletions`."""
        self._directories = directories
        self._directory = directory
        self._on_stored = on_stored
        self._mask = _CHUNKS if on_stored is None else _CHUNKS | MOVED_TO
        self._gone: dict[ChunkKey, None] = {}
        self._new: set[str] = set()
        """Subdirectories that are not watched yet."""
        self._is_short = True
        """True if a directory may be unwatched or events were lost."""
        self._is_elsewhere = False
        """True if the watched directory is no longer at its path."""
        self._news = asyncio.Event()
        directory.on_other_files = self._begin_elsewhere

    async def follow(self) -> None:
        """Follow until cancelled. Ends with a warning if no watch is left."""
        try:
            while True:
                await self._follow_here(Inotify())
        except OSError as error:
            self._give_up(error)

    async def _follow_here(self, inotify: Inotify) -> None:
        """Follow until another directory has the path. Raises OSError."""
        loop = asyncio.get_running_loop()
        loop.add_reader(inotify.fileno(), self._note, inotify)
        self._is_short, self._is_elsewhere = True, False
        try:
            while not self._is_elsewhere:
                self._news.clear()
                try:
                    await self._catch_up(inotify)
                except TierUnavailable:  # no thread could be started
                    self._is_short = True
                if self._is_short:
                    await asyncio.sleep(_PAUSE_S)
                else:
                    await self._news.wait()
        finally:
            loop.remove_reader(inotify.fileno())
            self._directories.metadata.later(inotify.close)  # a hung thread may use it

    def _begin_elsewhere(self) -> None:
        self._is_elsewhere = True
        self._news.set()

    def _give_up(self, error: OSError) -> None:
        logger.warning(
            "%s: what others delete there is noticed only when it is asked for: %s (fs.inotify.max_user_instances, "
            "fs.inotify.max_user_watches: 257 a directory)", self._directory.files.root, error,
        )  # fmt: skip

    def _note(self, inotify: Inotify) -> None:
        for happening in inotify.happened():
            if happening.mask & MOVED_SELF:
                self._begin_elsewhere()
            elif happening.mask & (OVERFLOW | IGNORED):
                self._is_short = True
            elif happening.mask & _CHUNKS and CHUNK_NAME.fullmatch(happening.name):
                key = bytes.fromhex(happening.name)
                if key in self._directory.index or self._directory.is_looked_for(key):
                    self._gone[key] = None
            elif self._on_stored is not None and happening.mask & MOVED_TO and CHUNK_NAME.fullmatch(happening.name):
                self._on_stored(bytes.fromhex(happening.name))
            elif happening.mask & _ROOT and happening.name in _NUMBERS:
                self._new.add(happening.name)
        if self._gone or self._new or self._is_short:
            self._news.set()

    async def _catch_up(self, inotify: Inotify) -> None:
        if self._is_short or self._new:
            came = self._new if self._on_stored is not None else set()
            new = TOP_LEVELS if self._is_short else list(self._new)
            self._is_short, self._new = False, set()
            try:
                found = await self._directories.metadata.submit(
                    _watch, inotify, self._directory.files, new, self._mask, came
                )
                if self._on_stored is not None:
                    for key in found:
                        self._on_stored(key)
            except FileNotFoundError:
                self._is_short = True  # the directory was deleted; a write creates it again
            await self._look_through({_NUMBERS[name] for name in new})
        while self._gone:
            await self._look_for([self._gone.popitem()[0] for _ in range(min(len(self._gone), _AT_ONCE))])

    async def _look_through(self, numbers: set[int]) -> None:
        """Check all known chunks in these subdirectories, one slice per turn of the loop."""
        for number in sorted(numbers):
            known = self._directory.index.keys.part(number)
            for start in range(0, len(known), _AT_ONCE):
                keys = [key for key in known[start : start + _AT_ONCE] if key in self._directory.index]
                if keys:
                    await self._look_for(keys)
            await asyncio.sleep(0)

    async def _look_for(self, keys: list[ChunkKey]) -> None:
        directory, files, index = self._directory, self._directory.files, self._directory.index
        began = {key: directory.look_for(key) for key in keys}
        try:
            missing = await self._directories.metadata.submit(_missing, files, keys)
        except BaseException:
            self._gone.update(dict.fromkeys(keys))
            raise
        finally:
            latest = {key for key, since in began.items() if directory.looked(key, since)}
        # Chunks that exist again have new files.
        self._directories.io.deleted(keys)
        if directory.index is index:
            for key in missing:
                if key in latest:
                    index.remove(key)
                elif key in index:
                    self._gone[key] = None  # it changed during the check


_NUMBERS = {name: number for number, name in enumerate(TOP_LEVELS)}


def _watch(
    inotify: Inotify, files: ChunkFiles, names: Sequence[str], mask: int, came: Container[str]
) -> list[ChunkKey]:
    """Watch the root and the existing ones of these subdirectories. Blocks. Raises FileNotFoundError without a root.

    Return the chunks in those that just `came`, which may precede the watch.
    """
    inotify.watch(files.root, _ROOT)
    found = []
    for name in names:
        with contextlib.suppress(*ABSENT):
            inotify.watch(files.root / name, mask)
            if name in came:
                chunks = filter(CHUNK_NAME.fullmatch, os.listdir(files.root / name))
                found += [bytes.fromhex(chunk) for chunk in chunks]
    return found


def _missing(files: ChunkFiles, keys: list[ChunkKey]) -> list[ChunkKey]:
    """Return the keys without files. Blocks."""
    found = []
    for key in keys:
        try:
            os.lstat(files.path(key))
        except ABSENT:
            found.append(key)
        except OSError as error:  # unknown
            logger.debug("%s: %s", files.root, error)
    return found


_SETTLE_S = 1.0
_HURRY = 10
"""A hint can shorten the pause by this factor."""
_PATIENCE_S = 30.0


def pauses_s(refresh_s: float, calls_s: Sequence[float]) -> tuple[float, float]:
    """Return the pause after a refresh with calls of these times, and how much longer to wait for a hint."""
    least_s = max(refresh_s / _HURRY, pause_s(calls_s))
    return least_s, max(0.0, refresh_s - least_s)


class Refresher:
    """Keeps a directory's index and counter fresh. Belongs to the event loop; `run` is its task.

    Keys in `ignored` are never added.
    """

    def __init__(
        self,
        directory: Directory,
        workers: Workers,
        refresh_s: float,
        ignored: Container[ChunkKey],
        on_gone: Callable[[list[ChunkKey]], None],
        on_refresh: Callable[[], None],
    ) -> None:
        self.directory = directory
        self.refresh_s = refresh_s
        self.listings = 0
        """Number of subdirectory listings."""
        self._workers = workers
        self._ignored = ignored
        self._on_gone = on_gone
        self._on_refresh = on_refresh
        self._index: object = None
        self._freshness = Freshness(_SETTLE_S)
        self._hint = asyncio.Event()
        self._calls_s: list[float] = []
        """Duration of each call of this refresh."""
        self._begun = 0
        self._ended = 0
        self._end = asyncio.Event()

    def hint(self) -> None:
        """Refresh sooner, since a chunk was missed that may be new."""
        self._hint.set()

    async def refreshed(self) -> None:
        """Wait for a refresh that begins after this call."""
        wanted = self._begun + 1
        self.hint()
        while self._ended < wanted:
            await self._end.wait()

    async def run(self) -> None:
        """Refresh periodically until cancelled."""
        failing = False
        while True:
            self._hint.clear()
            self._begun += 1
            self._calls_s.clear()
            try:
                await self._refresh()
                self._on_refresh()
                failing = False
            except (OSError, TierUnavailable) as error:
                if not failing:
                    logger.warning("%s could not be listed: %s", self.directory.files.root, error)
                failing = True
                self._calls_s.clear()  # failed calls do not lengthen the pause
            self._ended = self._begun
            self._end.set()
            self._end = asyncio.Event()
            least_s, more_s = pauses_s(self.refresh_s, self._calls_s)
            await asyncio.sleep(least_s)
            try:
                async with asyncio.timeout(more_s):
                    await self._hint.wait()
            except TimeoutError:
                pass

    async def _refresh(self) -> None:
        loop = asyncio.get_running_loop()
        files, index = self.directory.files, self.directory.index
        if index is not self._index:
            # The directory was replaced.
            self._index, self._freshness = index, Freshness(_SETTLE_S)
        await self._ask(files, files.capacity.refresh)
        times_ns = await self._ask(files, directory_times_ns, files)
        for directory in self._freshness.stale(times_ns, loop.time()):
            began_s = loop.time()
            with self.directory.looking_around() as gone:
                await self._list(files, index, directory, gone)
            if index is not self.directory.index:
                return
            self._freshness.listed(directory, began_s)

    async def _list(self, files: ChunkFiles, index: CappedIndex, directory: int, gone: Container[ChunkKey]) -> None:
        """Update the index from a subdirectory. The listing may contain keys that are `gone`."""
        before = index.group(directory)
        found = await self._ask(files, files.scanner.scan, TOP_LEVELS[directory], before)
        self.listings += 1
        if index is self.directory.index:
            _, dropped = await merge(index, found, before, (gone, self._ignored))
            if dropped:
                self._on_gone(dropped)

    async def _ask(self, files: ChunkFiles, call: Callable[..., T], *arguments: object) -> T:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        answer = await answered(self._workers.submit(call, *arguments), str(files.root))
        self._calls_s.append(loop.time() - began_s)
        return answer


def directory_times_ns(files: ChunkFiles) -> list[int]:
    """Return the modification time of each of the 256 subdirectories; 0 if missing. Blocks."""
    times_ns = []
    root = str(files.root)
    for top in TOP_LEVELS:
        try:
            times_ns.append(require_directory(f"{root}/{top}").st_mtime_ns)
        except ABSENT:
            times_ns.append(0)
    return times_ns


async def answered(work: asyncio.Future[T], what: str) -> T:
    """Wait for a background call; log a warning while it takes long."""
    work.add_done_callback(retrieve_exception)  # also if abandoned
    while not (await asyncio.wait([work], timeout=_PATIENCE_S))[0]:
        logger.warning("%s has not answered for %.0f s; what it holds is known only as it was", what, _PATIENCE_S)
    return work.result()


_PROBED = 1024
"""Keys per call in a thread."""


class ProbingLookup(Lookup):
    """Contains what this instance stored or found. A probe looks up other keys in the directory."""

    def __init__(self, directories: Directories) -> None:
        self._directories = directories

    def follow_deletions(self, directory: Directory, on_stored: Callable[[ChunkKey], None] | None = None) -> None:
        deletions = Deletions(self._directories, directory, on_stored)
        self._directories.begin(deletions.follow(), f"deletions-{directory.files.root}")

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        directories = self._directories
        position = directories.prefix(keys)
        while position < len(keys):
            part = keys[position : position + _PROBED]
            await self._look_for(part, gaps=False)
            there = directories.prefix(part)
            position += there
            if there < len(part):
                break
        return position

    async def probe_each(self, keys: Sequence[ChunkKey]) -> list[bool]:
        unknown = [key for key in keys if not self._directories.contains(key)]
        for start in range(0, len(unknown), _PROBED):
            await self._look_for(unknown[start : start + _PROBED], gaps=True)
        return [self._directories.contains(key) for key in keys]

    async def _look_for(self, keys: Sequence[ChunkKey], *, gaps: bool) -> None:
        """Add existing chunks of `keys` to the index; without `gaps`, stop at the first missing one."""
        directories = self._directories
        unknown = [(directories.places(key), key) for key in keys if key not in directories.refused]
        with contextlib.ExitStack() as looking:
            gone = {directory: looking.enter_context(directory.looking_around()) for directory in directories.all}
            found = await directories.metadata.submit(_existing, unknown, gaps)
        for key, directory, size_bytes in found:
            if key not in directory.index and key not in gone[directory]:
                directory.add(key, size_bytes)


class RelistingLookup(ProbingLookup):
    """Answers lookups from memory, for mounts with slow metadata calls. A task keeps it fresh."""

    def __init__(self, directories: Directories, refresh_s: float = 1.0) -> None:
        """`refresh_s`: the shortest time between two refreshes without a hint."""
        super().__init__(directories)
        self.refreshers: dict[Directory, Refresher] = {}
        self._refresh_s = refresh_s
        self._watchers = Workers(f"{directories.name}-refresh", len(directories.settings.directories))

    def follow_deletions(self, directory: Directory, on_stored: Callable[[ChunkKey], None] | None = None) -> None:
        """Do nothing: the refresher sees deletions."""

    def begin(self, directory: Directory) -> None:
        directories = self._directories

        def refreshed() -> None:
            directories.trim_soon(directory)
            directories.replace_soon(directory)

        refresher = Refresher(
            directory, self._watchers, self._refresh_s, directories.refused, directories.io.deleted, refreshed
        )
        self.refreshers[directory] = refresher
        directories.begin(self._follow(directory, refresher), f"refresh-{directory.files.root}")

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        """Probe from memory, or the mount until the first scan has ended."""
        directories = self._directories
        position = directories.prefix(keys)
        if position < len(keys):
            directory = directories.places(keys[position])[0]
            if not directory.scanned:
                return await super().probe(keys)
            self.missed(directory)
        return position

    async def probe_each(self, keys: Sequence[ChunkKey]) -> list[bool]:
        directories = self._directories
        first = {directories.places(key)[0] for key in keys if not directories.contains(key)}
        if not all(directory.scanned for directory in first):
            return await super().probe_each(keys)
        for directory in first:
            self.missed(directory)
        return [directories.contains(key) for key in keys]

    def missed(self, directory: Directory) -> None:
        self.refreshers[directory].hint()

    async def refreshed(self) -> None:
        await asyncio.gather(*(refresher.refreshed() for refresher in self.refreshers.values()))

    def close(self) -> None:
        self._watchers.close()

    async def _follow(self, directory: Directory, refresher: Refresher) -> None:
        await self._directories.first_scan(directory)
        await refresher.run()


def _existing(unknown: list[tuple[list[Directory], ChunkKey]], gaps: bool) -> list[tuple[ChunkKey, Directory, int]]:
    """Return the directories and sizes of existing chunks; without `gaps`, stop at the first missing one. Blocks."""
    found: list[tuple[ChunkKey, Directory, int]] = []
    for directories, key in unknown:
        for directory in directories:
            if occupied_bytes := directory.files.occupied_by(key):
                found.append((key, directory, occupied_bytes))
                break
        else:
            if not gaps:
                break
    return found
