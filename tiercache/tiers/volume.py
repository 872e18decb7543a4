"""A directory of chunk files. Synchronous; everything here may block and runs in worker threads.

```
<root>/tiercache.json            manifest: the format of this directory
<root>/<2 hex>/<key>             chunks
<root>/quarantine/<key>.<n>      the last few that failed verification
<root>/.tiercache/ledger         bytes in use, shared by all processes
<root>/.tiercache/owners         locked (shared) by every living process
<root>/.tiercache/tmp/<owner>.*  files being written; <owner>.lock is held by their writer
<root>/<2 hex>/<owner>.<n>       files being written, with `beside`
```

256 directories and no second level below them: making two directories for each chunk cost a third of the durable write speed
at 2 MiB, since every fdatasync had their blocks to commit as well.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from tiercache.core.header import Header, file_bytes, payload_checksum
from tiercache.core.keys import KEY_BYTES, ChunkKey
from tiercache.errors import CorruptChunk, TierFull
from tiercache.tiers.chunk_file import read_chunk_file, supports_direct_io, write_chunk_file
from tiercache.tiers.ledger import Ledger, pledged_bytes
from tiercache.tiers.naming import UNSUPPORTED, WAYS

logger = logging.getLogger("tiercache.disk")

T = TypeVar("T")

CHUNK_NAME = re.compile(rf"[0-9a-f]{{{KEY_BYTES * 2}}}")
UNBORN_NAME = re.compile(r"[0-9a-f]{32}\.\d+")
TOP_LEVELS = [f"{number:02x}" for number in range(256)]
_QUARANTINE_KEEPS = 8
_PUBLISH_ATTEMPTS = 8


@dataclass
class Scanned:
    """What `Volume.scan` found below one top-level directory. Sizes are what the file system really allocates."""

    chunks: list[tuple[float, ChunkKey, int]] = field(default_factory=list)
    """(modification time in s, key, occupied bytes)"""
    counted_bytes: int = 0
    """Of files and directories that were there before this process began to count."""
    strays: int = 0
    foreign: int = 0


@dataclass
class Unborn:
    """A chunk that is charged for, and a path at which its file may be made."""

    key: ChunkKey
    path: str
    charged_bytes: int


@dataclass
class Deleted:
    """What `Volume.delete_all` did. Chunks that were gone already are in none of these."""

    chunks: int = 0
    freed_bytes: int = 0
    left: list[tuple[ChunkKey, int]] = field(default_factory=list)
    """Could not be deleted, for the reason in `error`."""
    error: OSError | None = None


class NothingFreed(TierFull):
    """There is no room, and all victims were gone already: somebody else deleted them."""


class Volume:
    def __init__(
        self,
        root: Path,
        cap_bytes: int,
        fingerprint: bytes,
        *,
        direct: bool | None,
        durable: bool,
        allowance_bytes: int = 0,
        beside: bool = False,
    ) -> None:
        """`beside`: a file is made in the directory in which it will have its name. Linux changes one name of a directory
        at a time, and moves one file at a time between directories of a mount; where each such call is a round trip to
        another machine, all writes would wait for one another."""
        self.root = root
        self.cap_bytes = cap_bytes
        self.fingerprint = fingerprint
        self.wants_direct = direct
        self.direct = False
        self.durable = durable
        self._allowance_bytes = allowance_bytes
        self._beside = beside
        self._private = root / ".tiercache"
        self._temporary = self._private / "tmp"
        self._quarantine = root / "quarantine"
        self._owner = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._locks: list[int] = []
        self._scan_lock = threading.Lock()
        self._unscanned = set(TOP_LEVELS)
        self._ours: set[ChunkKey] = set()
        self._deleted_unscanned_bytes = 0
        self._relinked: set[int] = set()
        self.on_delete: Callable[[str], None] = lambda path: None
        """Called with the path of each chunk that was deleted, by us or by others: where its file is kept open, it takes
        its space until it is closed."""
        self.ways = WAYS
        """How a finished file gets its name; the first that the file system can do."""

    def open(self) -> None:
        """Make the directory ready. Raises OSError when it cannot be written, TierFull when nothing fits below the cap."""
        self._temporary.mkdir(parents=True, exist_ok=True)
        owners = os.open(self._private / "owners", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._locks.append(owners)
        try:
            fcntl.flock(owners, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.alone = True
        except BlockingIOError:
            self.alone = False
        fcntl.flock(owners, fcntl.LOCK_SH)
        # The file grows with everybody who comes: so one who has gone again is known to have been here.
        os.lseek(owners, 0, os.SEEK_END)
        os.write(owners, b".")
        self._owners = owners
        self._visits = os.fstat(owners).st_size
        # Locked before it has its name: nobody may find it unlocked and take us for dead.
        unnamed = self._temporary / f"{self._owner}.new"
        mine = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._locks.append(mine)
        fcntl.flock(mine, fcntl.LOCK_EX)
        unnamed.rename(self._temporary / f"{self._owner}.lock")
        self.ledger = Ledger(self._private / "ledger", self.cap_bytes, self._allowance_bytes, pledge=mine)
        self.strays_removed = 0
        self.bury_the_dead()
        self.direct = self.wants_direct is not False and supports_direct_io(self._temporary)
        if self.wants_direct and not self.direct:
            logger.warning("%s: O_DIRECT does not work here; using the page cache", self.root)
        places = [self.root / top for top in TOP_LEVELS]
        self._directories_at_open = {place.name: place.stat().st_blocks * 512 for place in places if place.is_dir()}
        if not self._directories_at_open:
            self.ledger.trusted = True  # nothing there that could be uncounted
        # The file system's own clock, which runs up to a tick behind ours: it is compared with times of files.
        self.opened_at_s = os.fstat(mine).st_ctime
        self.count_at_open_bytes = self.ledger.used_bytes

    def close(self) -> None:
        """Give back everything, locks last. May wait for other instances' locks."""
        if hasattr(self, "ledger"):
            with contextlib.suppress(OSError):  # the pledge is given back by whoever finds it, then
                self.ledger.close()
        with contextlib.suppress(OSError):  # the directory may be gone, or never have been one
            (self._temporary / f"{self._owner}.lock").unlink()
        while self._locks:
            with contextlib.suppress(OSError):  # of a mount that is dead
                os.close(self._locks.pop())

    def path(self, key: ChunkKey) -> str:
        name = key.hex()
        return f"{self.root}/{name[:2]}/{name}"

    def exists(self, keys: list[ChunkKey]) -> list[int]:
        """Occupied bytes of `keys`, from the first on, up to the first that is not here."""
        found = []
        for key in keys:
            try:
                found.append(os.stat(self.path(key)).st_blocks * 512)
            except OSError:
                break
        return found

    def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        """Verified read; None when the file is not here. A corrupt file is in quarantine when CorruptChunk is raised."""
        return self.read_by(key, lambda path: read_chunk_file(path, key, self.fingerprint, into, direct=self.direct))

    def read_by(self, key: ChunkKey, reader: Callable[[str], int]) -> int | None:
        """As `read`, with a `reader` that gets the path and returns the payload's length, or raises as `read_chunk_file`."""
        try:
            return reader(self.path(key))
        except FileNotFoundError:
            if not self.root.is_dir():
                raise
            return None
        except CorruptChunk:
            self.quarantine(key)
            raise

    def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int, victims: list[tuple[ChunkKey, int]]) -> int:
        """Delete `victims`, then publish the chunk atomically. Returns the bytes it occupies.

        Raises TierFull when it does not fit under the cap, OSError (ENOSPC among others) when the device says no; the
        victims are gone all the same.
        """

        def create(path: str) -> int:
            header = Header(key, self.fingerprint, payload_bytes, payload_checksum(payload[:payload_bytes]))
            return write_chunk_file(path, header, payload, direct=self.direct, durable=self.durable)

        return self.write_by(key, payload_bytes, victims, create)

    def write_by(
        self, key: ChunkKey, payload_bytes: int, victims: list[tuple[ChunkKey, int]], create: Callable[[str], int]
    ) -> int:
        """As `write`, with a `create` that makes the whole file at a path (which does not exist yet) and returns the bytes
        that it occupies; when it raises, the file is gone. Where another instance published the chunk meanwhile, ours is
        discarded and theirs counts."""
        unborn = self.begin_write(key, payload_bytes, victims)
        try:
            occupied_bytes = self.make(unborn, create)
        except BaseException:
            self.abandon_write(unborn)
            raise
        return self.finish_write(unborn, occupied_bytes)

    def make(self, unborn: Unborn, create: Callable[[str], T]) -> T:
        """`create` the file at its path, in a directory that may have to be made first."""
        try:
            return create(unborn.path)
        except FileNotFoundError:
            if not self._beside:
                raise
            self._make_directory(os.path.dirname(unborn.path))
            return create(unborn.path)

    def begin_write(self, key: ChunkKey, payload_bytes: int, victims: list[tuple[ChunkKey, int]]) -> Unborn:
        """The beginning of `write_by`. Next, the file is made, and then comes `finish_write` or `abandon_write`."""
        freed = sum(self.delete(victim, occupied_bytes) for victim, occupied_bytes in victims)
        charged_bytes = file_bytes(payload_bytes)
        if not self.ledger.charge(charged_bytes):
            full = TierFull if freed else NothingFreed
            raise full(f"{self.root}: {self.ledger.used_bytes} of {self.cap_bytes} bytes are in use")
        directory = os.path.dirname(self.path(key)) if self._beside else self._temporary
        return Unborn(key, f"{directory}/{self._owner}.{next(self._numbers)}", charged_bytes)

    def finish_write(self, unborn: Unborn, occupied_bytes: int) -> int:
        """Give the file its name. Returns the bytes that the chunk occupies; when it raises, the file is gone."""
        try:
            # Settled before the file has its name: a crash may leave the count too high, never too low.
            self.ledger.correct(occupied_bytes - unborn.charged_bytes)
            unborn.charged_bytes = occupied_bytes
            others_bytes = self._publish(unborn.path, self.path(unborn.key))
        except BaseException:
            self.abandon_write(unborn)
            raise
        if others_bytes is None:
            if self._unscanned:
                with self._scan_lock:
                    self._ours.add(unborn.key)
            return occupied_bytes
        self.abandon_write(unborn)
        return others_bytes

    def abandon_write(self, unborn: Unborn) -> None:
        """Remove a file that will not be published, if it is there, and only then give back what it was charged."""
        try:
            self._unlink(unborn.path)
        except OSError:
            try:
                os.lstat(unborn.path)
                return  # it stays, and stays counted
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError:
                return  # nobody knows: the mount is dead
        self.ledger.correct(-unborn.charged_bytes)

    def correct_count(self, counted_bytes: int) -> None:
        """After the first scan: what it found of before we opened is what there was, with what was deleted meanwhile. Only
        if nobody else was here, whose deletions we do not know; the count is too high then, never too low."""
        with self._scan_lock:
            self._unscanned.clear()
            self._ours.clear()
            there_bytes = counted_bytes + self._deleted_unscanned_bytes
        if self.alone and self._locks and os.fstat(self._owners).st_size == self._visits:
            self.ledger.correct(there_bytes - self.count_at_open_bytes)

    def _note_deleted(self, key: ChunkKey, occupied_bytes: int) -> None:
        """A file that the first scan has not come to and will not find."""
        if self._unscanned:
            with self._scan_lock:
                if key.hex()[:2] in self._unscanned and key not in self._ours:
                    self._deleted_unscanned_bytes += occupied_bytes

    def delete(self, key: ChunkKey, occupied_bytes: int) -> bool:
        """Unlink a chunk; whether it was there. Only the process whose unlink succeeds credits the ledger."""
        path = self.path(key)
        try:
            if not self._unlink(path):
                return False
        finally:
            self.on_delete(path)
        self._note_deleted(key, occupied_bytes)
        self.ledger.correct(-occupied_bytes)
        return True

    def delete_all(self, victims: list[tuple[ChunkKey, int]]) -> Deleted:
        """Unlink many chunks and credit them together, to everybody at once."""
        done = Deleted()
        for victim in victims:
            path = self.path(victim[0])
            try:
                if self._unlink(path):
                    self._note_deleted(*victim)
                    done.chunks += 1
                    done.freed_bytes += victim[1]
            except OSError as error:
                done.left.append(victim)
                done.error = error
            self.on_delete(path)
        if done.freed_bytes:
            self.ledger.release(done.freed_bytes)
        return done

    def quarantine(self, key: ChunkKey) -> None:
        """Move a bad chunk where nobody reads it; only the last few are kept, for whoever looks into it."""
        try:
            self._quarantine.mkdir(exist_ok=True)
            place = self._quarantine / f"{key.hex()}.{time.time_ns()}"
            os.rename(self.path(key), place)
            self._note_deleted(key, place.stat().st_blocks * 512)
        except FileNotFoundError:
            return  # another instance was quicker
        except OSError as error:
            logger.warning("%s: chunk %s could not be quarantined: %s", self.root, key.hex()[:12], error)
            self._discard(key)
            return
        with contextlib.suppress(FileNotFoundError):
            kept = sorted(self._quarantine.iterdir(), key=lambda path: path.stat().st_mtime_ns)
            for path in kept[:-_QUARANTINE_KEEPS]:
                status = path.stat()
                if self._unlink(path):
                    if self._unscanned and status.st_ctime < self.opened_at_s:
                        with self._scan_lock:
                            self._deleted_unscanned_bytes += status.st_blocks * 512
                    self.ledger.correct(-status.st_blocks * 512)

    def _discard(self, key: ChunkKey) -> None:
        """Delete a bad chunk that cannot be moved: publishing never replaces a file, so it would stay for ever."""
        with contextlib.suppress(OSError):
            self.delete(key, os.stat(self.path(key)).st_blocks * 512)

    def scan(self, top: str) -> Scanned:
        """Find the chunks below `<root>/<top>`. Torn files and wrong names of our own shape are removed and counted.

        Files that are not of our naming are never touched.
        """
        found = Scanned()
        directory = self.root / top
        if directory.is_dir():
            found.counted_bytes += self._directories_at_open.get(top, 0)
            with os.scandir(directory) as entries:
                for entry in entries:
                    self._examine(entry, found, self.opened_at_s)
        # After and not before: what is deleted while its directory is read may be counted twice, never not at all.
        with self._scan_lock:
            self._unscanned.discard(top)
        return found

    def scan_quarantine(self) -> int:
        """Bytes that lay in quarantine before this process began to count."""
        found = Scanned()
        if self._quarantine.is_dir():
            for path in self._quarantine.iterdir():
                self._count(found, path.stat(), self.opened_at_s)
        return found.counted_bytes

    def _examine(self, entry: os.DirEntry[str], found: Scanned, since_s: float) -> None:
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return
        if not CHUNK_NAME.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
            found.foreign += not UNBORN_NAME.fullmatch(entry.name)
            return
        if status.st_size < file_bytes(1) or status.st_size % 4096:
            # Published whole, so it was torn by the device or cut by somebody: it can never be a hit.
            if self._unlink(entry.path):
                found.strays += 1
            return
        self._count(found, status, since_s)
        found.chunks.append((status.st_mtime, bytes.fromhex(entry.name), status.st_blocks * 512))

    def _count(self, found: Scanned, status: os.stat_result, since_s: float) -> None:
        if status.st_ctime < since_s or status.st_ino in self._relinked:
            found.counted_bytes += status.st_blocks * 512

    def _publish(self, temporary: str, path: str) -> int | None:
        """Give the finished file its name. None, or the bytes of another instance's file that has it already."""
        for _ in range(_PUBLISH_ATTEMPTS):
            try:
                self._name(temporary, path)
                return None
            except FileExistsError:
                with contextlib.suppress(FileNotFoundError):  # then it was evicted since, and the name is free again
                    return os.stat(path).st_blocks * 512
            except FileNotFoundError:
                # The directory is not there yet, or somebody tidied it away.
                self._make_directory(os.path.dirname(path))
        raise OSError(f"{path}: the directory vanishes as often as it is made")

    def _name(self, temporary: str, path: str) -> None:
        for way in self.ways:
            try:
                way(temporary, path)
                return
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
        with self.ledger.locked():
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            os.rename(temporary, path)

    def _make_directory(self, path: str) -> None:
        try:
            os.mkdir(path)
        except FileExistsError:
            return
        self.ledger.correct(os.stat(path).st_blocks * 512)

    def bury_the_dead(self) -> None:
        """Remove what writers that no longer live (nobody holds their lock) left half-written, and give back what they had
        charged for it."""
        for lock in self._temporary.glob("*.lock"):
            if lock.stem == self._owner:
                continue
            try:
                descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                unspent_bytes = pledged_bytes(descriptor)
            except BlockingIOError:
                continue
            finally:
                os.close(descriptor)
            for place in (self._temporary, *(self.root / top for top in TOP_LEVELS)):
                for path in place.glob(f"{lock.stem}.*[0-9]"):
                    self._remove_stray(path)
            # Last, for it is how the others are found. Whoever removes it gives back; who dies in between gives too little.
            if self._unlink(lock):
                self.ledger.correct(-unspent_bytes)

    def _remove_stray(self, path: Path) -> None:
        try:
            status = path.stat()
        except FileNotFoundError:
            return
        published = status.st_nlink > 1  # by `link_new`; taking one name away changes the time of the chunk
        if published:
            self._relinked.add(status.st_ino)
        if self._unlink(path):
            self.strays_removed += 1
            if not published:
                self.ledger.correct(-status.st_blocks * 512)

    @staticmethod
    def _unlink(path: Path | str) -> bool:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        return True
