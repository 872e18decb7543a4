"""The disk tier: one file per chunk in one or several directories, under a physical cap.

This class is the asynchronous half: it decides (index, victims, when to rescan) and hands whole operations to worker
threads. `volume.py` is the half that blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from tiercache.core.admission import REMEMBERED_KEYS, Governor, make_admission
from tiercache.core.blame import Blame
from tiercache.core.eviction import make_order
from tiercache.core.header import file_bytes
from tiercache.core.index import CappedIndex
from tiercache.core.keys import ChunkKey
from tiercache.errors import ConfigError, CorruptChunk, TierFull, TierUnavailable
from tiercache.memory.workers import Workers, look_away, to_the_end
from tiercache.tiers.access import ACCESS, NotAFile
from tiercache.tiers.base import Tier, TierStatistics, Traits
from tiercache.tiers.manifest import NO_ROOM, WrongFormat
from tiercache.tiers.scanning import Shelf, scan
from tiercache.tiers.space import default_cap
from tiercache.tiers.volume import NameTaken, Victims, Volume

logger = logging.getLogger("tiercache.disk")

_ATTEMPTS = 4
_SCAN_WAIT_S = 2.0
"""How long a write waits for a scan that may find room."""
_TRIM_STEP = 256
"""Chunks that are evicted in one hand-over where a cap was lowered."""
_OVER_THE_CAP = 8
"""So many chunks more than the cap: it was lowered. Writes then make room for themselves, and the rest goes in the
background."""
_FILES_OWN_FAULT = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODATA})
_DEAD_MOUNT = frozenset({errno.ENOTCONN, errno.ESTALE, errno.ESHUTDOWN})
_DELETED = "%s was deleted by somebody else; it was made anew"
_EMPTIED = "%s was emptied or replaced by somebody else; starting it anew"
_MOUNTED_ANEW = "another mount is at %s now; what lies on it is being looked for"
_REFUSED_KEPT = 4096
_CLOSE_S = 5.0
_CATCH_UP_S, _LONGEST_CATCH_UP_S = 1.0, 4.0
"""Until what failed is tried again; doubled each time. It costs a call or two, and may be room that others lack."""
_PROBED = 1024
"""Keys that are looked for in one hand-over."""


@dataclass(frozen=True)
class DiskSettings:
    directories: tuple[Path, ...]
    cap_bytes: int
    """Of all directories together; each gets an equal share. 0 takes nine tenths of what is free (or ours already) when the
    tier opens."""
    threads: int = 4
    """For reads; as many again for writes. 1: one chunk after the other, in the order in which they were asked for."""
    direct: bool | None = None
    """O_DIRECT: True, False, or None to use it where it works."""
    durable: bool = True
    """fdatasync each file before it gets its name. Its name follows with the file system's next commit (seconds): a power
    cut can lose the newest chunks but never show half of one. Without, all that was written lately may be lost, and what is
    torn is found by verification. Neither matters for kill -9."""
    policy: str = "LRU"
    admission: str = "all"
    """Which chunks are worth writing, see tiercache.core.admission."""
    bytes_per_day: float = 0.0
    """The most that is written a day; 0: no limit."""
    file_access: str = "owner"
    """Who may read what is stored: "owner" (0600, directories 0700) or "group" (0660, 2770). Directories that exist already
    keep their modes, except those below them that are ours."""


class DiskTier(Tier):
    name = "disk"
    option = "local_disk"
    """The configuration key that names the directories, for messages."""
    perhaps_files = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EREMOTEIO})
    """Errors of a read that are the file's fault, or the device's."""

    def __init__(self, settings: DiskSettings, fingerprint: bytes) -> None:
        self.settings = settings
        self.fingerprint = fingerprint
        # Two more than there are threads: a thread that is done finds its next job waiting, without a round by the loop.
        places = settings.threads + 2 if settings.threads > 1 else 1
        self.traits = Traits(durable=True, shared=True, read_concurrency=places, write_concurrency=places)
        self._readers = Workers(f"{self.name}-read", settings.threads)
        self._writers = Workers(f"{self.name}-write", settings.threads)
        self._metadata = Workers(f"{self.name}-metadata", 1)
        self._shelves: list[Shelf] = []
        self._scans: set[asyncio.Task[None]] = set()
        self._blame = Blame()
        self._closing: set[asyncio.Future[None]] = set()
        """Volumes, and what a subclass has, that are being closed."""
        self._refused: dict[ChunkKey, None] = {}
        self.admission = make_admission(settings.admission, REMEMBERED_KEYS)
        self.governor = Governor(settings.bytes_per_day)
        self._statistics = TierStatistics()
        self._closed = False

    async def open(self) -> None:
        try:
            if not self.settings.cap_bytes:
                self.settings = replace(self.settings, cap_bytes=await self._default_cap())
            share_bytes = self.settings.cap_bytes // len(self.settings.directories)
            for directory in self.settings.directories:
                volume = self._make_volume(directory, share_bytes)
                await self._open_volume(volume)
                self._shelves.append(Shelf(volume, self._make_index()))
                self._require_another(volume)
        except BaseException:
            await self.close()
            raise
        for shelf in self._shelves:
            self._begin_scan(shelf, first=True)

    async def close(self) -> None:
        closed, self._closed = self._closed, True
        tasks = [*self._scans, *(shelf.catching_up for shelf in self._shelves if shelf.catching_up is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for shelf in [] if closed else self._shelves:
            self._close_volume(shelf.volume)
        self._readers.close()
        self._writers.close()
        until_s = asyncio.get_running_loop().time() + _CLOSE_S
        try:
            while self._closing and (left_s := until_s - asyncio.get_running_loop().time()) > 0:
                await asyncio.wait(self._closing, timeout=left_s)
        finally:
            self._metadata.close()

    def describe(self) -> str:
        places = ", ".join(str(directory) for directory in self.settings.directories)
        return f"{self.name} ({places}, at most {self.settings.cap_bytes / 2**30:.2f} GB)"

    def contains(self, key: ChunkKey) -> bool:
        return any(key in shelf.index for shelf in self._shelves)

    def prefix(self, keys: Sequence[ChunkKey]) -> int:
        if len(self._shelves) == 1:
            return self._shelves[0].index.prefix(keys)
        return super().prefix(keys)

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        position = self.prefix(keys)
        while position < len(keys):
            part = keys[position : position + _PROBED]
            unknown = [(self._places(key), key) for key in part if key not in self._refused]
            with contextlib.ExitStack() as looking:
                gone = {shelf: looking.enter_context(shelf.looking_around()) for shelf in self._shelves}
                found = await self._metadata.submit(_existing, unknown)
            for (_, key), (shelf, occupied_bytes) in zip(unknown, found, strict=False):
                if key not in shelf.index and key not in gone[shelf]:
                    shelf.add(key, occupied_bytes)
            there = self.prefix(part)
            position += there
            if there < len(part):
                break
        return position

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        return await self._read(key, lambda volume: self._readers.submit(volume.read, key, into))

    async def _read(self, key: ChunkKey, read: Callable[[Volume], asyncio.Future[int | None]]) -> int | None:
        """`read` begins what does as `Volume.read`."""
        length = None
        for shelf in self._places(key):
            length = await self._read_from(shelf, key, read)
            if length is not None:
                break
        if length is None:
            self._statistics.read_misses += 1
            return None
        self._statistics.reads += 1
        self._statistics.read_bytes += length
        return length

    async def _read_from(
        self, shelf: Shelf, key: ChunkKey, read: Callable[[Volume], asyncio.Future[int | None]]
    ) -> int | None:
        began = shelf.look_for(key)
        try:
            length = await to_the_end(read(shelf.volume))
        except CorruptChunk as error:
            shelf.index.remove(key)
            self._refuse(key)
            self._statistics.corrupt += 1
            logger.warning("a chunk failed verification and was quarantined: %s", error)
            raise
        except OSError as error:
            if not await self._is_files_fault(shelf.volume, key, error):
                raise
            shelf.index.remove(key)
            self._refuse(key)
            self._statistics.corrupt += 1
            logger.warning("a chunk cannot be read and was put aside: %s", error)
            await self._metadata.submit(shelf.volume.set_aside, key)
            raise CorruptChunk(f"{shelf.volume.path(key)}: cannot be read: {error}") from error
        finally:
            is_latest = shelf.looked(key, began)
            self._catch_up_soon(shelf)
        self._blame.succeeded()
        if length is None:
            if is_latest:  # else it was stored after we had looked
                shelf.index.remove(key)
            return None
        if key in shelf.index:
            shelf.index.touch(key)
        elif is_latest and shelf.scanning is not None:
            shelf.index.add(key, file_bytes(length))  # the scan leaves alone what was noted
        shelf.note(key)
        return length

    async def _is_files_fault(self, volume: Volume, key: ChunkKey, error: OSError) -> bool:
        """An unreadable file costs itself, however many lie together; a device that reads nothing at all has failed."""
        if isinstance(error, NotAFile) or error.errno in _FILES_OWN_FAULT:
            return True
        if error.errno not in self.perhaps_files:
            return False
        if self._blame.casts_doubt(key):
            if not await self._metadata.submit(volume.reads_back):
                return False
            self._blame.succeeded()
        return True

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        return await self._write(
            key,
            payload_bytes,
            lambda volume, victims: self._writers.submit(volume.write, key, payload, payload_bytes, victims),
        )

    async def _write(
        self, key: ChunkKey, payload_bytes: int, write: Callable[[Volume, Victims], asyncio.Future[int]]
    ) -> bool:
        """`write` begins what does as `Volume.write`, perhaps several times."""
        shelf = self._shelf(key)
        await shelf.left(key)
        if key in shelf.index:
            shelf.index.touch(key)
            return True
        self.admission.used(key)
        needed_bytes = file_bytes(payload_bytes)
        if needed_bytes > shelf.volume.cap_bytes:
            return False
        if not shelf.volume.ledger.trusted:
            # Files without a count: the cap cannot be kept before they are counted.
            self._scan_soon(shelf)
            return False
        now_s = asyncio.get_running_loop().time()
        if not self.admission.admits(key) or not self.governor.allows(needed_bytes, now_s):
            return False
        began, is_latest = shelf.look_for(key), False
        try:
            occupied_bytes = await self._write_evicting(shelf, needed_bytes, write)
        except BaseException as error:
            self.governor.give_back(needed_bytes)
            self._statistics.write_failures += 1
            if not isinstance(error, NameTaken):
                raise
            logger.warning("a chunk cannot be stored: %s", error)
            return False
        finally:
            is_latest = shelf.looked(key, began)
            self._catch_up_soon(shelf)
        self._refused.pop(key, None)
        if is_latest or key in shelf.index:  # else it was seen before we heard of it, and evicted
            shelf.add(key, occupied_bytes)
        shelf.note(key)
        self._statistics.writes += 1
        self._statistics.written_bytes += payload_bytes
        return True

    def used(self, keys: Sequence[ChunkKey]) -> Sequence[ChunkKey]:
        # Also what was hot: a chunk that leaves the hot cache after a hundred uses should not have left here long before.
        for shelf in self._shelves:
            shelf.index.touch_prefix(keys)
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

    async def remove(self, key: ChunkKey) -> bool:
        # From every directory: it may lie, too, where it was stored before others were added. What we do not know of may be
        # somebody else's. Whoever stops waiting leaves it to the thread.
        places = []
        for shelf in self._shelves:
            places.append((shelf.volume, shelf.index.remove(key)))
            shelf.note(key)
        try:
            return await self._metadata.submit(_remove, places, key)
        finally:
            # Who looked at the directory meanwhile may have seen it still.
            for shelf in self._shelves:
                shelf.removed(key)
                self._catch_up_soon(shelf)

    def statistics(self) -> TierStatistics:
        counters = TierStatistics(**vars(self._statistics))
        counters.resident = sum(len(shelf.index) for shelf in self._shelves)
        counters.occupied_bytes = sum(shelf.volume.ledger.used_bytes for shelf in self._shelves)
        return counters

    async def scanned(self) -> None:
        """Wait until the index is complete (for tests and tools; the tier serves before that)."""
        await asyncio.gather(*self._scans)

    def path(self, key: ChunkKey) -> str:
        """The file that holds `key`, or would."""
        return self._shelf(key).volume.path(key)

    def _shelf(self, key: ChunkKey) -> Shelf:
        """Where a chunk is, or is to be."""
        return self._places(key)[0]

    def _places(self, key: ChunkKey) -> list[Shelf]:
        """Where a chunk is known to be, else where it may be, the likeliest first.

        Directories are ranked by rendezvous hashing (Thaler and Ravishankar): each gets an equal share, and one that is
        added takes its own from all alike. What lies elsewhere since before is still found.
        """
        if len(self._shelves) == 1:
            return self._shelves
        for shelf in self._shelves:
            if key in shelf.index:
                return [shelf]
        return sorted(self._shelves, key=lambda shelf: xxhash.xxh3_64_intdigest(key, shelf.seed), reverse=True)

    def _refuse(self, key: ChunkKey) -> None:
        """Remember a bad chunk that may still lie there (read-only directory), so that a probe does not find it again."""
        self._refused[key] = None
        if len(self._refused) > _REFUSED_KEPT:
            del self._refused[next(iter(self._refused))]

    def _make_volume(self, directory: Path, cap_bytes: int) -> Volume:
        settings = self.settings
        return Volume(
            directory,
            cap_bytes,
            self.fingerprint,
            direct=settings.direct,
            durable=settings.durable,
            access=ACCESS[settings.file_access],
        )

    def _make_index(self) -> CappedIndex:
        return CappedIndex(make_order(self.settings.policy))

    async def _default_cap(self) -> int:
        try:
            return await self._metadata.submit(
                default_cap, self.settings.directories, ACCESS[self.settings.file_access]
            )
        except OSError as error:
            raise ConfigError(f"{self.option}: {error.filename} cannot be used: {error}") from error

    def _close_volume(self, volume: Volume) -> None:
        self._close_in_thread(volume.close)

    def _close_in_thread(self, close: Callable[[], None]) -> None:
        """The mount may hang, and the loop must not; `close` waits for it, but not for long."""
        try:
            closing = self._metadata.submit(close)
        except RuntimeError:  # the tier was closed meanwhile
            threading.Thread(target=close, name=f"tiercache-{self.name}-late", daemon=True).start()
            return
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _require_another(self, volume: Volume) -> None:
        """Raises ConfigError for the directory of an earlier shelf, under another name or through a link."""
        for shelf in self._shelves:
            if shelf.volume is not volume and shelf.volume.is_same(volume):
                raise ConfigError(
                    f"{self.option}: {shelf.volume.root} and {volume.root} are one directory, which would be filled twice; "
                    "name it once"
                )

    async def _open_volume(self, volume: Volume) -> None:
        unwanted = threading.Event()

        def open_it() -> None:
            try:
                volume.open()
            finally:
                if unwanted.is_set():  # here, too: by now there may be no loop that would close it
                    volume.close()

        opening = self._metadata.submit(open_it)
        try:
            await asyncio.shield(opening)
        except BaseException as error:
            # Cancelled, it may still be at work in its thread.
            unwanted.set()
            self._closing.add(opening)
            opening.add_done_callback(look_away)
            opening.add_done_callback(lambda _: self._close_volume(volume))
            opening.add_done_callback(self._closing.discard)
            if isinstance(error, WrongFormat):
                raise ConfigError(f"{self.option}: {error}") from error
            if isinstance(error, OSError):
                raise ConfigError(f"{self.option}: {volume.root} cannot be used: {error}") from error
            raise

    async def _write_evicting(
        self, shelf: Shelf, needed_bytes: int, write: Callable[[Volume, Victims], asyncio.Future[int]]
    ) -> int:
        deficit_bytes = shelf.volume.ledger.used_bytes + needed_bytes - shelf.volume.cap_bytes
        attempt = 0
        while attempt < _ATTEMPTS:
            victims = await self._make_room(shelf, needed_bytes, deficit_bytes)
            volume, index = shelf.volume, shelf.index
            try:
                with shelf.leaving(victims):
                    return await to_the_end(write(volume, victims))
            except TierFull:
                # Victims that somebody else had deleted were no attempt, and are out of the index now.
                attempt += not victims.were_gone
                deficit_bytes = max(needed_bytes, volume.ledger.used_bytes + needed_bytes - volume.cap_bytes)
            except FileNotFoundError:
                await self._reopen(shelf, volume)
                deficit_bytes = 0
                attempt += 1
            except OSError as error:
                if await self._is_replaced(volume, error):
                    await self._reopen(shelf, volume)
                    attempt += 1
                    continue
                if error.errno not in NO_ROOM:
                    raise
                # The device is fuller than our cap allows for: make room at our own expense, then say so.
                attempt += not victims.were_gone
                if await self._close_deleted():
                    deficit_bytes = 0
                    continue
                deficit_bytes = needed_bytes << max(0, attempt - 1)
                if not index.used_bytes:
                    raise TierFull(f"{volume.root}: {error.strerror}, and nothing of ours is left to evict") from error
                deficit_bytes = min(deficit_bytes, index.used_bytes)
        raise TierFull(f"{shelf.volume.root}: no room after {_ATTEMPTS} attempts")

    async def _close_deleted(self) -> int:
        """The device is full: deleted files that we keep open take its space. Closes them; how many there were."""
        return 0  # this tier keeps none open

    async def _make_room(self, shelf: Shelf, needed_bytes: int, deficit_bytes: int) -> Victims:
        """What the writer of `needed_bytes` has to delete first, when `deficit_bytes` (if above zero) are lacking.

        Raises TierFull.
        """
        volume, index = shelf.volume, shelf.index
        if deficit_bytes > 0 and shelf.is_doubtful:
            if 2 * index.used_bytes > volume.cap_bytes:
                self._scan_soon(shelf)
            elif await self._scanned_soon(shelf):
                deficit_bytes = min(deficit_bytes, volume.ledger.used_bytes + needed_bytes - volume.cap_bytes)
        if deficit_bytes > _OVER_THE_CAP * needed_bytes:
            deficit_bytes = 2 * needed_bytes
        if deficit_bytes > index.used_bytes and shelf.volume is volume:
            known_bytes = volume.ledger.used_bytes
            await self._metadata.submit(volume.ledger.refresh)
            deficit_bytes -= known_bytes - volume.ledger.used_bytes
        if deficit_bytes > index.used_bytes and shelf.volume is volume and await self._scanned_soon(shelf):
            deficit_bytes = min(deficit_bytes, volume.ledger.used_bytes + needed_bytes - volume.cap_bytes)
        if shelf.volume is not volume:
            return Victims()  # it was replaced meanwhile, and what is there now says what it lacks
        if deficit_bytes > index.used_bytes:
            raise TierFull(
                f"{volume.root}: {volume.ledger.used_bytes} of {volume.cap_bytes} bytes are in use and only "
                f"{index.used_bytes} of them are known chunks"
            )
        return self._evict(shelf, deficit_bytes)

    def _evict(self, shelf: Shelf, needed_bytes: int, most: int | None = None) -> Victims:
        victims = Victims(shelf.index.evict(needed_bytes, most))
        self._statistics.evicted += len(victims)
        return victims

    async def _is_replaced(self, volume: Volume, error: OSError) -> bool:
        """Whether what we have open lies on a mount that died, and another one is in its place."""
        return error.errno in _DEAD_MOUNT and await self._metadata.submit(volume.answers)

    async def _reopen(self, shelf: Shelf, stale: Volume) -> None:
        """The directory was emptied, deleted or replaced under us: what we knew is gone, begin anew. `stale` is the volume
        that the caller found so; others may have found it at the same time."""
        async with shelf.replacing:
            if shelf.volume is stale:
                was_deleted = await self._metadata.submit(stale.make_anew)
                mounted_anew = await self._metadata.submit(stale.is_mounted_anew)
                logger.warning(_DELETED if was_deleted else _MOUNTED_ANEW if mounted_anew else _EMPTIED, stale.root)
                fresh = self._make_volume(stale.root, stale.cap_bytes)
                try:
                    await self._open_volume(fresh)
                except ConfigError as error:
                    raise TierUnavailable(str(error)) from error
                if self._closed:
                    self._close_volume(fresh)
                    raise TierUnavailable(f"{self.name} is closed")
                shelf.volume, shelf.index, shelf.scanned = fresh, self._make_index(), False
                shelf.explained_bytes = 0
                self._close_volume(stale)
                self._begin_scan(shelf, first=True)
        if not shelf.volume.ledger.trusted:
            await self._scanned_soon(shelf)
            if not shelf.volume.ledger.trusted:
                raise TierUnavailable(f"{stale.root}: what lies there is being counted")

    def _scan_soon(self, shelf: Shelf) -> None:
        """Look again what is there, but not all the time."""
        if not self._closed and shelf.scanning is None and asyncio.get_running_loop().time() >= shelf.next_scan_s:
            self._begin_scan(shelf, first=False)

    async def _scanned_soon(self, shelf: Shelf) -> bool:
        """As `_scan_soon`, and wait for it, but not for long; whether one ended."""
        self._scan_soon(shelf)
        scanning = shelf.scanning
        if scanning is None:
            return False
        return bool((await asyncio.wait([scanning], timeout=_SCAN_WAIT_S))[0])

    def _begin_scan(self, shelf: Shelf, *, first: bool) -> None:
        task = asyncio.create_task(self._scan(shelf, first), name=f"tiercache-scan-{shelf.volume.root}")
        shelf.scanning = task
        self._scans.add(task)
        task.add_done_callback(self._scans.discard)

    async def _scan(self, shelf: Shelf, first: bool) -> None:
        volume = shelf.volume
        is_missing = False
        try:
            found = await scan(shelf, self._metadata, self._refused, first=first)
            if found is not None:
                self._statistics.strays += found.strays
        except (OSError, TierUnavailable) as error:
            is_missing = isinstance(error, FileNotFoundError)
            logger.warning("%s could not be scanned: %s", volume.root, error)
        finally:
            if shelf.volume is volume:
                shelf.scanned, shelf.scanning = True, None
                shelf.noted_while_scanning.clear()
                self._catch_up_soon(shelf)
        if is_missing:
            await self._replace(shelf, volume)
        else:
            await self._trim(shelf)

    def _catch_up_soon(self, shelf: Shelf) -> None:
        """Where something failed that the next change would make up for: it need not wait for one. Of several instances the
        others cannot use what this one has freed and could not take off the count, and this one may have nothing to do."""
        if self._closed or shelf.catching_up is not None or not shelf.volume.is_behind:
            return
        name = f"tiercache-catch-up-{shelf.volume.root}"
        shelf.catching_up = asyncio.create_task(self._catch_up(shelf), name=name)

    async def _catch_up(self, shelf: Shelf) -> None:
        volume, pause_s = shelf.volume, _CATCH_UP_S
        try:
            await asyncio.sleep(pause_s)
            while shelf.volume is volume and volume.is_behind:
                with contextlib.suppress(TierUnavailable):  # no thread could be started
                    await self._metadata.submit(volume.catch_up)
                if volume.is_behind:
                    pause_s = min(2 * pause_s, _LONGEST_CATCH_UP_S)
                    await asyncio.sleep(pause_s)
        finally:
            shelf.catching_up = None

    async def _replace(self, shelf: Shelf, stale: Volume, *, may_make: bool = True) -> None:
        """As `_reopen`, where no write finds it out: one that sees a full directory never comes to the count. `may_make`:
        also where there is no directory at all."""
        try:
            is_there = may_make or await self._metadata.submit(stale.root.is_dir)
            if is_there and await self._metadata.submit(stale.is_wiped):
                await self._reopen(shelf, stale)
        except (OSError, TierUnavailable) as error:
            logger.info("%s: %s", stale.root, error)

    async def _trim(self, shelf: Shelf) -> None:
        """Below the cap, where it was lowered since; a step at a time, so that writes get their turn."""
        volume = shelf.volume
        while shelf.volume is volume and (excess_bytes := volume.ledger.used_bytes - volume.cap_bytes) > 0:
            victims = self._evict(shelf, excess_bytes, _TRIM_STEP)
            if not victims:
                return
            with shelf.leaving(victims):
                done = await self._metadata.submit(volume.delete_all, victims)
            self._catch_up_soon(shelf)
            if done.error is not None:
                logger.warning("%s: chunks could not be evicted: %s", volume.root, done.error)
                for key, occupied_bytes in done.left:
                    shelf.index.add(key, occupied_bytes)
                return


def _remove(places: list[tuple[Volume, int | None]], key: ChunkKey) -> bool:
    """Whether the chunk was anywhere. A directory that fails keeps it in no other; its error is raised at the end."""
    gone, failure = False, None
    for volume, occupied_bytes in places:
        try:
            gone = volume.remove(key, occupied_bytes) or gone
        except (OSError, TierUnavailable) as error:
            failure = error
    if failure is not None:
        raise failure
    return gone


def _existing(unknown: list[tuple[list[Shelf], ChunkKey]]) -> list[tuple[Shelf, int]]:
    """Where chunks are and the bytes they occupy, up to the first that is nowhere. For a worker thread."""
    found: list[tuple[Shelf, int]] = []
    for shelves, key in unknown:
        for shelf in shelves:
            if occupied := shelf.volume.exists([key]):
                found.append((shelf, occupied[0]))
                break
        else:
            break
    return found
