"""The chunk files of one directory: read, write, delete and count them.

`ChunkFiles` is synchronous, may block, and runs in worker threads. A write deletes its victims, reserves bytes with
`Capacity`, writes a temporary file and publishes it under the name of its key. A read verifies the file and deletes a bad
one. `OnlyRead` changes nothing in the directory and counts nothing.

```
<root>/tiercache.json            manifest: the format of this directory
<root>/<2 hex>/<key>             chunks
<root>/.tiercache/ledger         the capacity counter: bytes in use, shared by all processes
<root>/.tiercache/recent-*       lists of what was hot at a close: `scheduler/warm_start.py`
<root>/<2 hex>/<owner>.<n>       temporary files with `beside`
<root>/.tiercache/tmp/<owner>.*  <owner>.lock, held while its process lives; temporary files without `beside`
```

The 256 directories have no second level: it would slow down durable writes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Container
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tiercache.core.header import PACKED_BYTES, Header, HeaderError, file_bytes
from tiercache.core.keys import ChunkKey
from tiercache.errors import CorruptChunk, TierFull, TierUnavailable
from tiercache.tiers.compression import Compression, unpacked
from tiercache.tiers.files.access import (
    ABSENT,
    OWNER,
    Access,
    occupied_bytes,
    open_file,
    opened_directory,
)
from tiercache.tiers.files.capacity import Capacity, CounterLost, Mark
from tiercache.tiers.files.directory import (
    CHUNK_NAME,
    TOP_LEVELS,
    Deleted,
    PendingFile,
    Scanned,
    Victims,
    check_manifest,
    make_directory,
    publish,
    reads_directly,
    remove_chunk,
    require_manifest,
    scan_chunks,
)
from tiercache.tiers.files.format import (
    NO_ROOM,
    DeviceTurns,
    read_chunk_file,
    spread,
    supports_direct_io,
    write_chunk_file,
)
from tiercache.tiers.files.owners import TEMPORARY, Owner

logger = logging.getLogger("tiercache.disk")

T = TypeVar("T")

_MOST_UNDELETED = 1024
_TRIES = 4
"""Attempts to create our own files on a full device. Each failure deletes a chunk."""


class ChunkFiles:
    def __init__(
        self,
        root: Path,
        cap_bytes: int,
        fingerprint: bytes,
        *,
        direct: bool | None,
        durable: bool,
        step_bytes: int = 0,
        many_hosts: bool = False,
        beside: bool = False,
        access: Access = OWNER,
        compression: Compression | None = None,
    ) -> None:
        """Describe the directory; nothing is opened. `Capacity` defines `step_bytes`. `many_hosts`: see `FileSettings`.

        `beside`: write temporary files in the directory of the chunk instead of `.tiercache/tmp`. Linux serialises
        renames between directories of a mount, and changes within one directory.
        """
        self.root = root
        self.cap_bytes = cap_bytes
        self.fingerprint = fingerprint
        self.wants_direct = direct
        self.direct = False
        self.durable = durable
        self.access = access
        self.compression = compression or Compression()
        self._step_bytes = step_bytes
        self._many_hosts = many_hosts
        self._beside = beside
        self._private = root / ".tiercache"
        self._temporary = root / TEMPORARY
        self._owner = Owner(root, TOP_LEVELS)
        self._undeleted: deque[PendingFile] = deque()
        """Temporary files of failed writes that could not be deleted, or may exist. They stay counted."""
        self._is_closed = False
        self._opening = threading.Lock()
        """Held by `open`, so that `close` waits for it."""
        self.strays_removed = 0
        self._device = -1
        """Device of the directory when it was opened."""
        self._is_mount_point = False
        """True if the configured directory was a mount point then."""

    def limit(self, cap_bytes: int, step_bytes: int) -> None:
        """Change the cap; what exceeds it stays until it is evicted."""
        self.cap_bytes, self._step_bytes = cap_bytes, step_bytes
        if hasattr(self, "capacity"):
            self.capacity.cap_bytes, self.capacity.step_bytes = cap_bytes, step_bytes

    def open(self) -> None:
        """Make the directory ready. A full device is no error.

        Raises OSError if it cannot be used, WrongFormat if it has another format, TierUnavailable if another process
        holds its lock.
        """
        with self._opening:
            if self._is_closed:
                raise TierUnavailable(f"{self.root} is closed")
            self._open()

    def _open(self) -> None:
        self.access.make_root(self.root)
        self._note_device()
        self._with_room(self._keep_books)
        self.strays_removed = self._owner.remove_dead()
        self.direct = self.wants_direct is not False and supports_direct_io(self._temporary, self._owner.new_name())
        if self.wants_direct and not self.direct:
            logger.warning("%s: O_DIRECT does not work here; using the page cache", self.root)
        there = frozenset(os.listdir(self.root))
        tops = [top for top in TOP_LEVELS if top in there]
        for name in tops:
            self.access.enforce(self.root / name)
        if not tops:
            if self._beside:
                spread(self.root)
            self.capacity.trust()

    def _keep_books(self) -> None:
        """Create our directories, lock file, counter and manifest where they are missing."""
        for directory in (self._private, self._temporary):
            self.access.make_directory(directory)
            self.access.enforce(directory)
        self._owner.settle(self.access)
        if not hasattr(self, "capacity"):
            self.capacity = Capacity(
                self._private / "ledger",
                self.cap_bytes,
                self._step_bytes,
                self._owner,
                self.access,
                synced=self._many_hosts,
            )
        self.require_manifest()

    def _with_room(self, make: Callable[[], None]) -> None:
        """Call `make` until it finds room; delete a chunk after each failure. A device can be too full to evict normally."""
        for left in reversed(range(_TRIES)):
            try:
                return make()
            except OSError as error:
                if error.errno not in NO_ROOM or not left or not self._delete_any():
                    raise

    def _delete_any(self) -> bool:
        """Delete any chunk without counting it. Return False if there is none."""
        for top in TOP_LEVELS:
            with suppress(*ABSENT):
                for name in filter(CHUNK_NAME.fullmatch, os.listdir(self.root / top)):
                    with suppress(FileNotFoundError):
                        remove_chunk(f"{self.root}/{top}/{name}")
                        logger.warning("%s: the device is full; chunk %s made room for our files", self.root, name)
                        return True
        return False

    def require_manifest(self) -> None:
        """Create or check the manifest. It disappears when another program empties the directory."""
        require_manifest(self.root, f"{self._temporary}/{self._owner.name}.00", self.access)

    def answers(self) -> bool:
        """Return True if the path leads to a working directory. Lists it, since the kernel caches names of a dead mount."""
        try:
            with opened_directory(self._private) as directory:
                os.stat("ledger", dir_fd=directory)
        except OSError:
            return False
        return True

    def is_wiped(self) -> bool:
        """Return True if our lock file or the counter was deleted or replaced. Raises OSError if the device fails."""
        return self._owner.lost or self.capacity.is_lost()

    def is_mounted_anew(self) -> bool:
        """Return True if the path now leads to another mount than our open files."""
        try:
            return os.fstat(self._owner.descriptor).st_dev != os.stat(self.root).st_dev
        except OSError:
            return True  # our mount is dead

    def is_away(self) -> bool:
        """Return True if the mount is missing, so that the directory may come back: a missing file then proves nothing.

        A directory without its mount is gone together with its parent or with the recorded file system; a deleted one
        is not. Raises OSError if the device fails.
        """
        configured = self.root.parent
        try:
            here, above = (os.stat(path).st_dev for path in (configured, f"{configured}/.."))
        except ABSENT:
            try:
                return os.stat(configured.parent).st_dev != self._device
            except ABSENT:
                return True
        return self._is_mount_point and here == above != self._device

    def _note_device(self) -> None:
        self._device = os.stat(self.root).st_dev
        self._is_mount_point = os.stat(f"{self.root.parent}/..").st_dev != self._device

    def close(self) -> None:
        """Release everything, locks last. Waits for `open`, else briefly; an operation that is still running releases them
        when it ends.
        """
        with self._opening:
            self._is_closed = True
        while self._undeleted:
            self._keep(self._undeleted.popleft())
        if hasattr(self, "capacity"):
            self.capacity.close()
        else:
            self._owner.leave()

    def path(self, key: ChunkKey) -> str:
        name = key.hex()
        return f"{self.root}/{name[:2]}/{name}"

    def occupied_by(self, key: ChunkKey) -> int:
        """Return the bytes that a chunk occupies; 0 if it is missing."""
        try:
            status = os.lstat(self.path(key))
        except OSError:
            return 0
        return occupied_bytes(status) if stat.S_ISREG(status.st_mode) else 0

    def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        """Read and verify a chunk. Return its length; None if the file is missing or the directory was deleted.

        Raises CorruptChunk (the file is deleted then), FileNotFoundError if the directory is temporarily missing.
        """

        def reader(path: str) -> int:
            began_s = time.monotonic()
            header = read_chunk_file(path, key, self.fingerprint, into, direct=self.direct)
            self.compression.received(header.payload_bytes, time.monotonic() - began_s)
            return unpacked(header, into)

        return self.read_by(key, reader)

    def read_by(self, key: ChunkKey, reader: Callable[[str], int]) -> int | None:
        """Read like `read`, by `reader(path)`, which returns the payload's length or raises like `read`."""
        path = self.path(key)
        try:
            try:
                return reader(path)
            except CorruptChunk:
                if not self._many_hosts:
                    raise
                return reader(path)  # the network may have flipped a bit
        except ABSENT:
            if self.is_away():
                raise
            return None
        except CorruptChunk:
            self.delete_bad(key)
            raise

    def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int, turns: DeviceTurns | None = None) -> int:
        """Write and publish the chunk atomically within `turns`. Return the bytes that it occupies.

        Raises TierFull above the cap, OSError (ENOSPC among others).
        """
        with self.compression.pack(key, self.fingerprint, payload, payload_bytes) as stored:
            stored_bytes = stored.header.payload_bytes

            def create(path: str) -> int:
                began_s = time.monotonic()
                occupied_bytes = write_chunk_file(
                    path, stored.header, stored.padded, direct=self.direct, durable=self.durable, turns=turns
                )
                self.compression.sent(stored_bytes, time.monotonic() - began_s)
                return occupied_bytes

            return self.write_by(key, stored_bytes, create)

    def write_by(self, key: ChunkKey, payload_bytes: int, create: Callable[[str], int]) -> int:
        """Write like `write`, by `create`, which writes the whole file at a new path and returns the bytes that it
        occupies; on error it leaves no file. If another instance published the chunk meanwhile, our file is discarded.
        """
        pending = self.begin_write(key, payload_bytes)
        try:
            occupied_bytes = self.make(pending, create)
        except BaseException:
            self.discard(pending)
            raise
        return self.finish_write(pending, occupied_bytes)

    def make(self, pending: PendingFile, create: Callable[[str], T]) -> T:
        """Call `create` with the file's path, and make its directory if it is missing."""
        try:
            return create(pending.path)
        except FileNotFoundError:
            if not self._beside:
                raise
            self._require_ours()  # else the root may be another process's, which would not count the directory
            make_directory(os.path.dirname(pending.path), self.access, self.capacity)
            return create(pending.path)

    @property
    def is_behind(self) -> bool:
        """True while failed deletions or counter updates are outstanding. Non-blocking."""
        return bool(self._undeleted) or self.capacity.is_behind

    def catch_up(self) -> None:
        """Retry failed deletions and counter updates. Does not raise."""
        for _ in range(len(self._undeleted)):
            with contextlib.suppress(IndexError):  # `close` took it
                self.discard(self._undeleted.popleft())
        self.capacity.catch_up()

    def discard(self, pending: PendingFile) -> None:
        """Delete a temporary file that will not be published, then end its write."""
        try:
            with contextlib.suppress(*ABSENT):
                os.unlink(pending.path)
        except OSError:
            try:
                os.lstat(pending.path)
                self._keep(pending)
                return
            except ABSENT:
                pass
            except OSError:
                self._keep(pending)  # the mount is dead
                return
        self.capacity.cancel(pending.reserved_bytes)

    def _keep(self, pending: PendingFile) -> None:
        """Delete the file later. After close, the next process to take over the owner lock deletes it."""
        if self._is_closed or len(self._undeleted) >= _MOST_UNDELETED:
            self.capacity.cancel(0)
        else:
            self._undeleted.append(pending)

    def begin_write(self, key: ChunkKey, payload_bytes: int) -> PendingFile:
        """Reserve bytes. Create the file next, then call `finish_write` or `discard`."""
        self._require_ours()
        reserved_bytes = file_bytes(payload_bytes)
        if not self.capacity.reserve(reserved_bytes):
            raise TierFull(f"{self.root}: {self.capacity.used_bytes} of {self.cap_bytes} bytes are in use")
        directory = os.path.dirname(self.path(key)) if self._beside else self._temporary
        return PendingFile(key, f"{directory}/{self._owner.new_name()}", reserved_bytes)

    def finish_write(self, pending: PendingFile, occupied_bytes: int) -> int:
        """Publish the file. Return the bytes that the chunk occupies. On error the file is deleted."""
        try:
            self.access.grant(pending.path)
            self.capacity.resize(occupied_bytes - pending.reserved_bytes)
            pending.reserved_bytes = occupied_bytes
            self.capacity.commit(occupied_bytes)
            try:
                self._require_ours()
                others_bytes = publish(pending.path, self.path(pending.key), self.access, self.capacity)
            except BaseException:
                self.capacity.uncommit(occupied_bytes)
                raise
        except BaseException:
            self.discard(pending)
            raise
        if others_bytes is None:
            self.capacity.settle(occupied_bytes)
            return occupied_bytes
        self.capacity.uncommit(occupied_bytes)
        self.discard(pending)
        return others_bytes

    def delete(self, key: ChunkKey) -> bool:
        """Unlink a chunk; return True if it existed. Only the process whose unlink succeeds releases the bytes, those of the
        deleted file: another process may have stored the key in another size. Raises OSError, TierUnavailable.
        """
        path = self.path(key)
        try:
            os.lstat(path)
        except ABSENT:
            return False
        with self.capacity.deleting(forced=True) as freeing:
            try:
                remove_chunk(path, freeing)
            except ABSENT:
                return False
        return True

    def remove(self, key: ChunkKey) -> bool:
        """Delete a chunk like `delete`.

        Raises TierUnavailable if the directory is unmounted or was moved: the chunk would come back with it. Nothing comes
        back from a directory whose lock file was deleted.
        """
        if self.delete(key):
            return True
        if self.is_mounted_anew() and not self.answers() and not self._owner.lost:
            raise TierUnavailable(f"{self.root} is not there")
        return self.delete(key)  # the mount may have returned meanwhile

    def delete_all(self, victims: Victims, reuse_bytes: int = 0) -> Deleted:
        """Unlink many chunks, and keep `reuse_bytes` for a write that follows. Errors of single files are in the result.

        Raises CounterLost if the directory was wiped: nothing of ours is left to delete.
        """
        self._require_ours()
        done = Deleted()
        with self.capacity.deleting(reuse_bytes=reuse_bytes) as freeing:
            for key, occupied in victims:
                try:
                    done.freed_bytes += remove_chunk(self.path(key), freeing)
                except ABSENT:
                    continue
                except OSError as error:
                    done.left.append((key, occupied))
                    done.error = error
        return done

    def delete_bad(self, key: ChunkKey) -> None:
        """Delete a chunk that failed verification. It could not be stored again otherwise, since publishing never replaces a
        file. Does not raise.
        """
        try:
            if not self.is_wiped():  # otherwise the path may lead to a foreign directory
                self.delete(key)
        except (OSError, TierUnavailable) as error:
            logger.warning("%s: the bad chunk %s could not be deleted: %s", self.root, key.hex()[:12], error)

    def own_keys(self, top: str) -> set[ChunkKey]:
        """Return the chunks in a subdirectory whose headers have our fingerprint."""
        found = set()
        with suppress(*ABSENT), opened_directory(self.root / top) as directory:
            for name in filter(CHUNK_NAME.fullmatch, os.listdir(directory)):
                try:
                    with os.fdopen(open_file(name, os.O_RDONLY, directory), "rb", buffering=0) as file:
                        if Header.unpack(file.read(PACKED_BYTES)).fingerprint == self.fingerprint:
                            found.add(bytes.fromhex(name))
                except (FileNotFoundError, HeaderError):
                    continue  # missing or damaged
        return found

    def begin_scan(self) -> tuple[Mark, list[str]]:
        """Return the counter's mark, which `Capacity.recount` needs, and the directories to scan. Call it before a scan."""
        self.strays_removed += self._owner.remove_dead()
        self.require_manifest()
        mark = self.capacity.mark()
        there = frozenset(os.listdir(self.root))
        return mark, [top for top in TOP_LEVELS if top in there]

    def scan(self, top: str, known: Container[ChunkKey] | None = None) -> Scanned:
        """Call `scan_chunks` for a subdirectory."""
        return scan_chunks(self.root / top, self._owner, self.access, known)

    def _require_ours(self) -> None:
        """Raise CounterLost if our lock file or the counter is gone: nothing would count further writes. Jobs that a hung
        device delayed until after close fail here too.
        """
        if self._owner.lost or self.capacity.missing:
            raise CounterLost(errno.ENOENT, "the lock file or the counter of this instance is gone", str(self._private))


class NoCapacity(Capacity):
    """Counts nothing, for readers."""

    used_bytes = counted_bytes = 0
    trusted = True
    missing = is_behind = False

    def __init__(self) -> None:
        pass

    def refresh(self) -> bool:
        return True

    def recount(self, mark: Mark, found_bytes: int) -> int:
        return 0


class OnlyRead(ChunkFiles):
    """A `ChunkFiles` that changes nothing in its directory."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.capacity = NoCapacity()

    def open(self) -> None:
        """Check the manifest. A missing directory is no error: a writer may create it later. Raises OSError, WrongFormat."""
        with suppress(FileNotFoundError):
            self._note_device()
            check_manifest(self.root)
        self.direct = self.wants_direct is not False and reads_directly(self.root)

    def close(self) -> None:
        """Do nothing: no file is open."""

    def is_wiped(self) -> bool:
        return False

    def delete_bad(self, key: ChunkKey) -> None:
        """Leave a bad chunk in place."""

    def begin_scan(self) -> tuple[Mark, list[str]]:
        there = frozenset(os.listdir(self.root))
        return Mark(False, 0, 0, 0), [top for top in TOP_LEVELS if top in there]

    def scan(self, top: str, known: Container[ChunkKey] | None = None) -> Scanned:
        return scan_chunks(self.root / top, self._owner, None, known)
