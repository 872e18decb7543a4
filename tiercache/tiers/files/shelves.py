"""The directories of a file tier: opened, looked through in the background, caught up with, and begun anew when somebody
empties, deletes or replaces them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tiercache.core.index import CappedIndex
from tiercache.core.keys import ChunkKey
from tiercache.device.driver import Tensor
from tiercache.errors import ConfigError, DeviceError, TierFull, TierUnavailable
from tiercache.memory.workers import Workers, retrieve_exception
from tiercache.tiers.base import TierStatistics
from tiercache.tiers.compression import Compression
from tiercache.tiers.files.access import ACCESS
from tiercache.tiers.files.directory import Victims, WrongFormat, default_cap, found_place, make_place
from tiercache.tiers.files.scanning import Shelf, scan
from tiercache.tiers.files.volume import OnlyRead, Volume

logger = logging.getLogger("tiercache.disk")

_CLOSE_S = 5.0


class MetadataWorkers(Workers):
    """The mount may hang, and the loop must not: whatever is closed is closed here."""

    def __init__(self, name: str, threads: int) -> None:
        super().__init__(f"{name}-metadata", threads)
        self.background = Workers(f"{name}-scan", threads)
        """For scans, and deletions after one: look-ups do not wait for them. The next scan waits for those deletions."""
        self._cleanups: set[asyncio.Future[Any]] = set()

    async def opened(self, open_it: Callable[[], object], close_it: Callable[[], object]) -> None:
        """Call `open_it` in a thread. Where it fails or the caller is cancelled, `close_it` is called when it has ended."""
        unwanted = threading.Event()

        def run() -> None:
            try:
                open_it()
            finally:
                if unwanted.is_set():  # here, too: by now there may be no loop that would close it
                    close_it()

        opening = self.submit(run)
        try:
            await asyncio.shield(opening)
        except BaseException:
            # Cancelled, it may still be at work in its thread.
            unwanted.set()
            opening.add_done_callback(retrieve_exception)
            opening.add_done_callback(lambda _: self.later(close_it))
            self.watch(opening)
            raise

    def later(self, clean_up: Callable[..., object], *arguments: object) -> None:
        """Do it in a thread. Nobody waits for it but `cleaned_up`; when the threads are closed, one is made for it."""

        def run() -> None:
            try:
                clean_up(*arguments)
            except OSError as error:
                logger.info("%s: could not clean up: %s", self.name, error)

        try:
            work = self.submit(run)
        except RuntimeError:  # closed meanwhile
            threading.Thread(target=run, name=f"tiercache-{self.name}-late", daemon=True).start()
            return
        self.watch(work)

    def close(self) -> None:
        super().close()
        self.background.close()

    def watch(self, work: asyncio.Future[Any]) -> None:
        """Something that is still at work, though nobody waits for it any more."""
        self._cleanups.add(work)
        work.add_done_callback(self._cleanups.discard)

    async def cleaned_up(self) -> None:
        """Wait for all that, but not for long, and let the threads end."""
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
    """Of all directories together; each gets an equal share. 0 takes nine tenths of what is free (or ours already) when the
    tier opens."""
    threads: int = 4
    """For reads; as many again for writes, or more. 1: one chunk after the other, in the order in which they were asked
    for."""
    direct: bool | None = None
    """O_DIRECT: True, False, or None to use it where it works."""
    durable: bool = True
    """fdatasync each file before it gets its name. Its name follows with the file system's next commit (seconds): a power
    cut can lose the newest chunks but never show half of one. Without, all that was written lately may be lost, and what is
    torn is found by verification. Neither matters for kill -9."""
    admission: str = "all"
    """Which chunks are worth writing, see tiercache.core.admission."""
    bytes_per_day: float = 0.0
    """The most that is written a day; 0: no limit."""
    file_access: str = "owner"
    """Who may read what is stored: "owner" (0600, directories 0700) or "group" (0660, 2770). Directories that exist already
    keep their modes, except those below them that are ours."""
    chunk_bytes: int = 0
    """The largest payload. Needed by those that move chunks through buffers of their own."""
    many_hosts: bool = False
    """Other hosts use the directories, too, and must see what this one has reserved when it is gone."""
    compression: str = "none"
    """What is done to payloads in host memory: none, lz4, zstd or auto. See `tiercache.tiers.compression`."""
    item_bytes: int = 1
    """Length of a number in them."""
    tenant_bytes: int = 0
    """What each tenant may have of all directories together, of each an equal share; 0: no quota."""
    beside: bool = True
    """A file is made in the directory in which it will have its name, see `Volume`."""

    @property
    def tenant_share_bytes(self) -> int:
        """Of one directory."""
        return self.tenant_bytes // len(self.directories)

    def step_of(self, cap_bytes: int) -> int:
        """In how large steps a process reserves bytes of a directory with that cap."""
        return min(_LARGEST_STEP_BYTES, cap_bytes // _STEPS)


class Mover(ABC):
    """Who moves bytes between memory and files. What a call promises is what `Volume.read` and `Volume.write` promise; what
    has been begun goes on when its future is cancelled."""

    places: int
    """How many reads it takes on at a time. Known once it is open."""
    sees_remounts = False
    """Whether it finds out itself that another mount is in the place of its own, and calls `Shelves.remount`."""
    perhaps_files = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EREMOTEIO})
    """Errors of a read that are the file's fault, or the device's."""

    async def prepare(self) -> None:  # noqa: B027 - most have nothing to do then
        """Before the directories are opened. Raises ConfigError."""

    async def open(self) -> None:  # noqa: B027
        """The directories are open. Raises ConfigError."""

    @abstractmethod
    async def close(self) -> None:
        """Idempotent; does not wait for what hangs."""

    @property
    def write_places(self) -> int:
        """How many writes it takes on at a time."""
        return self.places

    @property
    def serves_device(self) -> bool:
        """Whether it moves device memory. Known once it is open."""
        return False

    @property
    def keeps_files_open(self) -> bool:
        """A deleted file takes its space until it is closed."""
        return False

    def describe(self) -> str:
        """A phrase for a log line, or nothing."""
        return ""

    @abstractmethod
    def read(self, volume: Volume, key: ChunkKey, into: np.ndarray) -> asyncio.Future[int | None]:
        """As `Volume.read`."""

    @property
    def prefetches_apart(self) -> bool:
        """As `Traits.prefetches_apart`."""
        return False

    def prefetch(self, volume: Volume, key: ChunkKey, into: np.ndarray) -> asyncio.Future[int | None]:
        """As `read`; it may stand still while there are reads."""
        return self.read(volume, key, into)

    def hurry(self, key: ChunkKey) -> None:  # noqa: B027
        """As `Tier.hurry`."""

    @abstractmethod
    def write(
        self, volume: Volume, key: ChunkKey, payload: np.ndarray, payload_bytes: int, victims: Victims
    ) -> asyncio.Future[int]:
        """As `Volume.write`."""

    def read_device(self, volume: Volume, key: ChunkKey, into: Tensor) -> asyncio.Future[int | None]:
        """As `Volume.read`, into device memory."""
        raise DeviceError("there is no device; only host memory is served")

    def write_device(
        self, volume: Volume, key: ChunkKey, payload: Tensor, payload_bytes: int, victims: Victims
    ) -> asyncio.Future[int]:
        """As `Volume.write`, from device memory."""
        raise DeviceError("there is no device; only host memory is served")

    def forget(self, path: str) -> None:  # noqa: B027
        """The file at `path` is gone, or is being deleted: close it. Blocks; in a worker thread."""

    def deleted(self, keys: Sequence[ChunkKey]) -> None:  # noqa: B027
        """Chunks are being deleted, or were, by any process: close their files soon."""

    async def close_deleted(self) -> int:
        """Close the files that other processes have deleted. Return how many there were."""
        return 0

    def failed(self, error: OSError) -> None:  # noqa: B027
        """A call failed, perhaps because the mount is dead."""

    def suspect(self) -> None:  # noqa: B027
        """A directory is not what it was."""


class Knowledge(ABC):
    """What is known of a directory."""

    @abstractmethod
    def make_index(self) -> CappedIndex:
        """An empty one."""

    def begin(self, shelf: Shelf) -> None:  # noqa: B027 - only shared directories need it
        """Keep the index of a shelf fresh from now on."""

    @abstractmethod
    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        """As `Tier.probe`."""

    @abstractmethod
    async def probe_each(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """As `Tier.probe_each`."""

    def missed(self, shelf: Shelf) -> None:  # noqa: B027
        """Somebody read a chunk that is in no index."""

    def follow_deletions(  # noqa: B027 - what follows everything needs nothing for it
        self, shelf: Shelf, on_stored: Callable[[ChunkKey], None] | None = None
    ) -> None:
        """What others delete is to leave the index soon, and not when somebody asks for it. `on_stored` is called with the
        chunks that somebody stores, here or elsewhere on this host, as far as the kernel tells."""

    async def refreshed(self) -> None:  # noqa: B027
        """Wait until the index has what others did before this call, where it follows them."""

    def close(self) -> None:  # noqa: B027
        """Let threads end. What was begun is called off by then."""


_SCAN_WAIT_S = 2.0
"""How long a write waits for a scan that may find room."""
_DEAD_MOUNT = frozenset({errno.ENOTCONN, errno.ESTALE, errno.ESHUTDOWN})
_DELETED = "%s was deleted by somebody else; it was made anew"
_EMPTIED = "%s was emptied or replaced by somebody else; starting it anew"
_MOUNTED_ANEW = "another mount is at %s now; what lies on it is being looked for"
_REFUSED_KEPT = 4096
_CATCH_UP_S = 1.0
"""Until what failed is tried again, and what is not used any more is given back. It costs a call or two, and may be room
that others lack."""
_SWEEP_S = 5.0
"""How long a file may stay open, and allocated, that another instance deleted."""
_TRIM_STEP = 256
"""Chunks that are evicted in one hand-over where a cap was lowered."""
_OVER_THE_CAP = 8
"""A cap that is exceeded by more chunks than these was lowered. Writes then make room for themselves, and the rest is
evicted in the background."""
_FIRST_FOUND_S = 2.0
"""The time that a write to a full directory waits for the first scan to find victims."""


def give_up_bytes(lacking_bytes: int, needed_bytes: int) -> int:
    """Return how many of the bytes above a cap, or above a tenant's quota, one write evicts."""
    return 2 * needed_bytes if lacking_bytes > _OVER_THE_CAP * needed_bytes else max(0, lacking_bytes)


class Shelves:
    """All methods belong to the event loop. Calls that block run in `metadata`."""

    def __init__(
        self,
        name: str,
        option: str,
        settings: FileSettings,
        fingerprint: bytes,
        metadata_threads: int,
        mover: Callable[[Shelves], Mover],
        knowledge: Callable[[Shelves], Knowledge],
    ) -> None:
        """`option` is the configuration key that names the directories, for messages. The parts are made here; none looks at
        another one then."""
        self.name = name
        self.option = option
        self.settings = settings
        self.fingerprint = fingerprint
        self.all: list[Shelf] = []
        self.compression = Compression(
            settings.compression, settings.item_bytes, concurrency=settings.threads, tier=name
        )
        self.counters = TierStatistics()
        self.refused: dict[ChunkKey, None] = {}
        """Bad chunks that may still lie there (read-only directory): a look into the directory does not take them up."""
        self.metadata = MetadataWorkers(name, metadata_threads)
        self.closed = False
        self._only_reads = False
        self._unclosed: list[Shelf] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._scans: set[asyncio.Task[None]] = set()
        self._on_change: Callable[[ChunkKey], None] | None = None
        self.mover = mover(self)
        self.knowledge = knowledge(self)
        self.evicted = 0
        """Chunks that this instance evicted for the cap, or because tenants were above their quotas."""

    async def open(self, *, only_reads: bool = False) -> None:
        """`only_reads`: change nothing there. Raises ConfigError with everything closed again: it may be tried once more."""
        self._only_reads = only_reads
        try:
            await self._open_all()
        except BaseException:
            self.all.clear()
            self._close_volumes()
            raise
        for shelf in self.all:
            self.begin_scan(shelf, first=True)
            self.knowledge.begin(shelf)
        if self._on_change is not None:
            self.tell(self._on_change)
        self.begin(self._sweep(), f"sweep-{self.name}")

    async def _open_all(self) -> None:
        await self.mover.prepare()
        places = [await self._place_of(directory) for directory in self.settings.directories]
        if not self.settings.cap_bytes and not self._only_reads:
            self.settings = replace(self.settings, cap_bytes=await self._default_cap(places))
        share_bytes = self.settings.cap_bytes // len(self.settings.directories)
        for place in places:
            volume = self.make_volume(place, share_bytes)
            await self._open_volume(volume)
            shelf = Shelf(volume, self.knowledge.make_index())
            self.all.append(shelf)
            self._unclosed.append(shelf)
            self._require_another(volume)
        await self.mover.open()

    async def close(self) -> None:
        """Call off what is done in the background, then close the directories. Waits for what hangs, but not for long."""
        self.closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.knowledge.close()
        self._close_volumes()
        await self.metadata.cleaned_up()

    def _close_volumes(self) -> None:
        while self._unclosed:
            self.metadata.later(self._unclosed.pop().volume.close)

    @property
    def is_open(self) -> bool:
        """Return True if every directory has been opened."""
        return len(self.all) == len(self.settings.directories)

    def begin(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """In the background, until it ends or the tier is closed."""
        task = asyncio.create_task(work, name=f"tiercache-{name}")
        task.add_done_callback(_complain)
        task.add_done_callback(self._tasks.discard)
        self._tasks.add(task)
        return task

    def tell(self, on_change: Callable[[ChunkKey], None]) -> None:
        """As `Tier.tell`, also before the directories are open."""
        self._on_change = on_change
        for shelf in self.all:
            shelf.index.on_change = on_change
            self.knowledge.follow_deletions(shelf)

    # Where chunks are

    def contains(self, key: ChunkKey) -> bool:
        return any(key in shelf.index for shelf in self.all)

    def known(self) -> Sequence[Container[ChunkKey]]:
        """The chunks known in each directory."""
        return [shelf.index.keys for shelf in self.all]

    def prefix(self, keys: Sequence[ChunkKey]) -> int:
        """As `Tier.prefix`."""
        if len(self.all) == 1:
            return self.all[0].index.prefix(keys)
        for position, key in enumerate(keys):
            if not self.contains(key):
                return position
        return len(keys)

    def places(self, key: ChunkKey) -> list[Shelf]:
        """Where a chunk is known to be, else where it may be, the likeliest first.

        Directories are ranked by rendezvous hashing (Thaler and Ravishankar): each gets an equal share, and one that is
        added takes its own from all alike. What lies elsewhere since before is still found.
        """
        if len(self.all) == 1:
            return self.all
        for shelf in self.all:
            if key in shelf.index:
                return [shelf]
        return sorted(self.all, key=lambda shelf: xxhash.xxh3_64_intdigest(key, shelf.seed), reverse=True)

    def path(self, key: ChunkKey) -> str:
        """The file that holds `key`, or would."""
        return self.places(key)[0].volume.path(key)

    def refuse(self, key: ChunkKey) -> None:
        self.refused[key] = None
        if len(self.refused) > _REFUSED_KEPT:
            del self.refused[next(iter(self.refused))]

    def deleted(self, keys: list[ChunkKey]) -> None:
        """Chunks are being deleted, or were, by any process: a file that is open still takes its space."""
        self.mover.deleted(keys)

    async def close_deleted(self) -> int:
        """Close deleted files, which take space while they are open. Return how many there were."""
        return await self.mover.close_deleted()

    # Looking through directories

    def begin_scan(self, shelf: Shelf, *, first: bool) -> None:
        if self.closed:
            return
        task = shelf.scanning = self.begin(self._scan(shelf, first), f"scan-{shelf.volume.root}")
        self._scans.add(task)
        task.add_done_callback(self._scans.discard)

    def scan_soon(self, shelf: Shelf) -> None:
        """Look again what is there, but not all the time."""
        if shelf.scanning is None and asyncio.get_running_loop().time() >= shelf.next_scan_s:
            self.begin_scan(shelf, first=False)

    async def scanned_soon(self, shelf: Shelf) -> bool:
        """As `scan_soon`, and wait for it, but not for long; whether one ended."""
        self.scan_soon(shelf)
        scanning = shelf.scanning
        if scanning is None:
            return False
        return bool((await asyncio.wait([scanning], timeout=_SCAN_WAIT_S))[0])

    async def scanned(self) -> None:
        """Wait for all scans that are under way."""
        await asyncio.gather(*self._scans)

    async def first_scan(self, shelf: Shelf) -> None:
        """Wait until the shelf was looked through once."""
        while not shelf.scanned and self._scans:
            await asyncio.wait(self._scans)

    async def _scan(self, shelf: Shelf, first: bool) -> None:
        volume = shelf.volume
        is_missing = False
        try:
            found = await scan(shelf, self.metadata.background, self.refused, first=first)
            if found is not None:
                self.counters.strays += found.strays
        except (OSError, TierUnavailable) as error:
            is_missing = isinstance(error, FileNotFoundError)
            logger.warning("%s could not be scanned: %s", volume.root, error)
        finally:
            if shelf.volume is volume:
                shelf.scan_found(all_of_it=True)
                self.catch_up_soon(shelf)
        if is_missing:
            await self._replace(shelf, volume)
        else:
            await self._trim(shelf)

    # Making room

    async def make_room(self, shelf: Shelf, needed_bytes: int, deficit_bytes: int) -> Victims:
        """Return the chunks that a writer of `needed_bytes` has to delete first, the least recently used ones that this
        instance knows, when `deficit_bytes` (if above zero) are lacking. Raises TierFull."""
        volume, index = shelf.volume, shelf.index
        if not shelf.scanned:
            # What is known is not all that lies there yet, which says nothing against the count.
            await shelf.knows(give_up_bytes(deficit_bytes, needed_bytes), _FIRST_FOUND_S)
        elif deficit_bytes > 0 and shelf.is_doubtful:
            if 2 * index.used_bytes > volume.cap_bytes:
                self.scan_soon(shelf)
            elif await self.scanned_soon(shelf):
                deficit_bytes = min(deficit_bytes, volume.capacity.used_bytes + needed_bytes - volume.cap_bytes)
        deficit_bytes = give_up_bytes(deficit_bytes, needed_bytes)
        if deficit_bytes > index.used_bytes and shelf.volume is volume:
            known_bytes = volume.capacity.used_bytes
            await self.metadata.submit(volume.capacity.refresh)
            deficit_bytes -= known_bytes - volume.capacity.used_bytes
        if deficit_bytes > index.used_bytes and shelf.volume is volume and await self.scanned_soon(shelf):
            deficit_bytes = min(deficit_bytes, volume.capacity.used_bytes + needed_bytes - volume.cap_bytes)
        if shelf.volume is not volume:
            return Victims()  # it was replaced meanwhile, and what is there now says what it lacks
        if deficit_bytes > index.used_bytes:
            raise TierFull(
                f"{volume.root}: {volume.capacity.used_bytes} of {volume.cap_bytes} bytes are in use and only "
                f"{index.used_bytes} of them are known chunks"
            )
        return self._evict(shelf, deficit_bytes)

    def trim_soon(self, shelf: Shelf) -> None:
        """Evict in the background what tenants have above their quotas. Other instances may have written it."""
        if not self.closed and not self._only_reads and shelf.trimming is None and shelf.index.excess_bytes > 0:
            shelf.trimming = self.begin(self._trim(shelf), f"trim-{shelf.volume.root}")
            shelf.trimming.add_done_callback(shelf.trimmed)

    async def _trim(self, shelf: Shelf) -> None:
        """Evict what is above the cap, or above a quota, in steps, so that writes get their turn."""
        volume = shelf.volume
        while shelf.volume is volume and not self._only_reads:
            excess_bytes = max(volume.capacity.used_bytes - volume.cap_bytes, shelf.index.excess_bytes)
            victims = self._evict(shelf, excess_bytes, _TRIM_STEP)
            if not victims:
                return
            with shelf.leaving(victims):
                done = await self.metadata.background.submit(volume.delete_all, victims)
            self.catch_up_soon(shelf)
            if done.error is not None:
                logger.warning("%s: chunks could not be evicted: %s", volume.root, done.error)
                for key, occupied_bytes in done.left:
                    shelf.index.add(key, occupied_bytes)
                return

    def _evict(self, shelf: Shelf, needed_bytes: int, most: int | None = None) -> Victims:
        victims = Victims(shelf.index.evict(needed_bytes, most))
        self.evicted += len(victims)
        return victims

    # Making up for what failed

    def catch_up_soon(self, shelf: Shelf) -> None:
        """Where something failed that the next change would make up for: it need not wait for one. Of several instances the
        others cannot use what this one has freed and could not take off the count, and this one may have nothing to do."""
        if not self.closed and shelf.catching_up is None and shelf.volume.is_behind:
            shelf.catching_up = self.begin(self._catch_up(shelf), f"catch-up-{shelf.volume.root}")

    async def _catch_up(self, shelf: Shelf) -> None:
        volume = shelf.volume
        try:
            await asyncio.sleep(_CATCH_UP_S)
            while shelf.volume is volume and volume.is_behind:
                with contextlib.suppress(TierUnavailable):  # no thread could be started
                    await self.metadata.submit(volume.catch_up)
                await asyncio.sleep(_CATCH_UP_S)
        finally:
            shelf.catching_up = None

    async def _sweep(self) -> None:
        """Close deleted files, and give back what was freed by deletions that are not waited for, from time to time: neither
        may stay allocated, or counted, while this instance is idle."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                await self.close_deleted()
            except Exception as error:  # the next sweep tries again
                logger.info("%s: could not close deleted files: %s", self.name, error)
            for shelf in self.all:
                self.catch_up_soon(shelf)

    # Beginning anew

    async def is_replaced(self, volume: Volume, error: OSError) -> bool:
        """Whether what we have open lies on a mount that died, and another one is in its place."""
        if self.mover.sees_remounts or error.errno not in _DEAD_MOUNT:
            return False
        return await self.metadata.submit(volume.answers)

    async def reopen(self, shelf: Shelf, stale: Volume) -> None:
        """The directory was emptied, deleted or replaced under us: what we knew is gone, begin anew. `stale` is the volume
        that the caller found so; others may have found it at the same time."""
        self.mover.suspect()
        async with shelf.replacing:
            if shelf.volume is stale:
                was_deleted = await self.metadata.submit(stale.identity.make_anew, stale.access)
                mounted_anew = await self.metadata.submit(stale.is_mounted_anew)
                logger.warning(_DELETED if was_deleted else _MOUNTED_ANEW if mounted_anew else _EMPTIED, stale.root)
                try:
                    fresh = await self._opened_anew(shelf)
                except ConfigError as error:
                    raise TierUnavailable(f"{self.name}: {error}") from error
                if self.closed:
                    self.metadata.later(fresh.close)
                    raise TierUnavailable(f"{self.name} is closed")
                shelf.begin_anew(fresh, self.knowledge.make_index())
                self.metadata.later(stale.close)
                self.begin_scan(shelf, first=True)
        if not shelf.volume.capacity.trusted:
            await self.scanned_soon(shelf)
            if not shelf.volume.capacity.trusted:
                raise TierUnavailable(f"{self.name}: the chunks in {stale.root} are being counted")

    async def remount(self) -> None:
        """Another mount serves the directories: what is open on the old one is of no use. Chunks are where they were."""
        for shelf in self.all:
            async with shelf.replacing:
                fresh = await self._opened_anew(shelf)
                self.metadata.later(shelf.take(fresh).close)
                # Writes that died with the mount are still counted. A scan corrects that.
                self.begin_scan(shelf, first=False)

    def replace_soon(self, shelf: Shelf) -> None:
        """Where the count is another one, also where nothing is written. A directory that was moved away may come back, and
        who only looks does not need another one."""
        if shelf.volume.capacity.missing and not shelf.replacing.locked():
            replacing = self._replace(shelf, shelf.volume, may_make=False)
            self.begin(replacing, f"replace-{shelf.volume.root}")

    async def _replace(self, shelf: Shelf, stale: Volume, *, may_make: bool = True) -> None:
        """As `reopen`, where no write finds it out: one that sees a full directory never comes to the count. `may_make`:
        also where there is no directory at all."""
        try:
            is_there = may_make or await self.metadata.submit(stale.root.is_dir)
            if is_there and await self.metadata.submit(stale.is_wiped):
                await self.reopen(shelf, stale)
        except (OSError, TierUnavailable) as error:
            logger.info("%s: %s", stale.root, error)

    # Opening

    def make_volume(self, directory: Path, cap_bytes: int) -> Volume:
        settings = self.settings
        volume = (OnlyRead if self._only_reads else Volume)(
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
        volume.on_delete = self.mover.forget
        return volume

    async def _place_of(self, directory: Path) -> Path:
        """Where the chunks of a configured directory lie."""
        try:
            if self._only_reads:
                return await self.metadata.submit(found_place, directory)
            return await self.metadata.submit(make_place, directory, ACCESS[self.settings.file_access])
        except WrongFormat as error:
            raise ConfigError(f"{self.option}: {error}") from error
        except OSError as error:
            raise ConfigError(f"{self.option}: {directory} cannot be used: {error}") from error

    async def _opened_anew(self, shelf: Shelf) -> Volume:
        """Open what has the path of a shelf's directory now, by the rule of the start: a foreign one is not used itself.
        Raises ConfigError."""
        place = await self._place_of(self.settings.directories[self.all.index(shelf)])
        fresh = self.make_volume(place, shelf.volume.cap_bytes)
        await self._open_volume(fresh)
        return fresh

    async def _open_volume(self, volume: Volume) -> None:
        try:
            await self.metadata.opened(volume.open, volume.close)
        except WrongFormat as error:
            raise ConfigError(f"{self.option}: {error}") from error
        except OSError as error:
            raise ConfigError(f"{self.option}: {volume.root} cannot be used: {error}") from error

    def _require_another(self, volume: Volume) -> None:
        """Raises ConfigError for the directory of an earlier shelf, under another name or through a link."""
        directories = self.settings.directories
        for shelf, directory in zip(self.all, directories, strict=False):
            if shelf.volume is not volume and shelf.volume.identity.is_same(volume.identity):
                raise ConfigError(
                    f"{self.option}: {directory} and {directories[len(self.all) - 1]} are one directory, which would be "
                    "filled twice; name it once"
                )

    async def _default_cap(self, places: Sequence[Path]) -> int:
        access = ACCESS[self.settings.file_access]
        try:
            return await self.metadata.submit(default_cap, places, access)
        except OSError as error:
            raise ConfigError(f"{self.option}: {error.filename} cannot be used: {error}") from error


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s ended unexpectedly", task.get_name(), exc_info=error)
