"""Parts of one directory of chunk files: location, manifest, publication and scan.

Chunks are in a subdirectory of the configured directory, which `make_place` creates. `publish` names finished files, and
`scan_chunks` finds them. Everything is synchronous and runs in worker threads.
"""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import re
import stat
import threading
from array import array
from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tiercache.core.header import file_bytes
from tiercache.core.keys import HEX_KEY, ChunkKey
from tiercache.errors import TierFull, TierUnavailable
from tiercache.tiers.files.access import (
    ABSENT,
    UNSUPPORTED,
    Access,
    occupied_bytes,
    open_file,
    opened_directory,
    rename_new,
    warn_of_missing_mount,
)
from tiercache.tiers.files.capacity import Capacity, Freeing, counted_in
from tiercache.tiers.files.format import NO_ROOM
from tiercache.tiers.files.owners import Owner

logger = logging.getLogger("tiercache.disk")


Victims = list[tuple[ChunkKey, int]]
"""Evicted chunks to delete, with the bytes that each occupies."""


@dataclass
class PendingFile:
    """A chunk with reserved bytes and the path of its temporary file."""

    key: ChunkKey
    path: str
    reserved_bytes: int


@dataclass
class Deleted:
    """Result of `ChunkFiles.delete_all`, without chunks that were missing already."""

    freed_bytes: int = 0
    left: Victims = field(default_factory=list)
    """Chunks that could not be deleted, for the reason in `error`."""
    error: OSError | TierUnavailable | None = None


_ATTEMPTS = 8

Publish = Callable[[str, str], None]
"""Renames a temporary file without replacing. Raises FileExistsError if the name is taken, FileNotFoundError if its
directory is missing, an OSError of `UNSUPPORTED` if the file system lacks the call.
"""


def link_new(temporary: str, path: str) -> None:
    """Publish by link and unlink. After a kill in between, `Owner.remove_dead` removes the temporary name."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        # A network file system may repeat a call whose answer was lost.
        if not os.path.samefile(temporary, path):
            raise
    with suppress(OSError):
        os.unlink(temporary)


WAYS: tuple[Publish, ...] = (rename_new, link_new)
"""Ways to publish; the first that the file system supports is used."""


_DIRECTORY_BYTES = 4096
"""Counted for a new directory before its size is known."""


def publish(temporary: str, path: str, access: Access, capacity: Capacity) -> int | None:
    """Publish a finished file under its final name. Return None, or the bytes of another instance's file with that name."""
    for _ in range(_ATTEMPTS):
        try:
            _name(temporary, path, capacity)
            return None
        except FileExistsError:
            with suppress(FileNotFoundError):  # it was evicted meanwhile
                return occupied_bytes(os.lstat(path))
        except FileNotFoundError:
            if not os.path.lexists(temporary):
                raise
            # The directory is missing, or another program removed it.
            make_directory(os.path.dirname(path), access, capacity)
    raise OSError(f"{path}: the directory vanishes as often as it is made")


def _name(temporary: str, path: str, capacity: Capacity) -> None:
    for way in WAYS:
        try:
            way(temporary, path)
            return
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
    with capacity.locked():
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        os.rename(temporary, path)


def make_directory(path: str, access: Access, capacity: Capacity) -> None:
    """Make a directory of chunks that is missing. It counts before it exists, as a file does before it is published.

    Raises TierFull above the cap, OSError.
    """
    counted_bytes, made_bytes = _DIRECTORY_BYTES, 0
    if not capacity.reserve(counted_bytes):
        raise TierFull(f"{path}: no room for a directory")
    try:
        capacity.commit(counted_bytes)
    except BaseException:
        capacity.cancel(counted_bytes)
        raise
    try:
        if access.make_directory(path):
            made_bytes = occupied_bytes(os.stat(path))
            if (more_bytes := made_bytes - counted_bytes) > 0:
                capacity.resize(more_bytes)
                capacity.commit(more_bytes)
                counted_bytes = made_bytes
    finally:
        capacity.settle(min(made_bytes, counted_bytes), counted_bytes)


CHUNK_NAME = re.compile(HEX_KEY)
"""A regular file with this name, in a directory of chunks, is a chunk."""
TOP_LEVELS = [f"{number:02x}" for number in range(256)]


@dataclass
class Scanned:
    """Result of scanning one or more top-level directories. Sizes are allocated bytes.

    It has a column per attribute, since freeing an object per chunk would block for milliseconds.
    """

    keys: list[ChunkKey] = field(default_factory=list)
    times_s: array[float] = field(default_factory=lambda: array("d"))
    """Modification times."""
    sizes: array[int] = field(default_factory=lambda: array("q"))
    """Bytes that each chunk occupies."""
    kept: list[ChunkKey] = field(default_factory=list)
    """Known chunks that still exist."""
    counted_bytes: int = 0
    """Bytes of chunks and directories."""
    strays: int = 0
    chunks: int = 0
    """Number of chunks in the results that were given to `count`."""

    def add_chunk(self, name: str, status: os.stat_result) -> None:
        """Append a chunk."""
        size_bytes = occupied_bytes(status)
        self.counted_bytes += size_bytes
        self.keys.append(bytes.fromhex(name))
        self.times_s.append(status.st_mtime)
        self.sizes.append(size_bytes)

    def add(self, other: Scanned) -> None:
        """Append the chunks of another result, without their sizes."""
        self.keys += other.keys
        self.times_s += other.times_s

    def count(self, other: Scanned) -> None:
        """Add the numbers of another result."""
        self.chunks += len(other.keys)
        self.counted_bytes += other.counted_bytes
        self.strays += other.strays

    def newest_first(self) -> np.ndarray:
        """Return the positions of the chunks, int64. For worker threads: NumPy sorts without Python's lock."""
        return np.argsort(-np.asarray(self.times_s), kind="stable")


def remove_chunk(path: str, freeing: Freeing = lambda _: nullcontext()) -> int:
    """Unlink a chunk within `freeing`, see `Capacity.deleting`. Return the bytes that it occupied.

    Raises FileNotFoundError, also for anything that is no regular file, and OSError.
    """
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "is not a file, and stays", path)
    freed_bytes = occupied_bytes(status)
    with freeing(freed_bytes):
        os.unlink(path)
    return freed_bytes


def scan_chunks(path: Path, owner: Owner, access: Access | None, known: Container[ChunkKey] | None = None) -> Scanned:
    """Find the chunks in a directory of chunks, and give them the mode of `access`. Torn chunks, and temporary files of
    dead owners, are removed as strays. `access` None: change nothing.

    With `known` keys, only new names are examined, and no file is removed. Files with other names are left alone, and
    links are not followed.
    """
    found = Scanned()
    try:
        with opened_directory(path) as directory:
            found.counted_bytes = occupied_bytes(os.stat(directory))
            with os.scandir(directory) as entries:
                for entry in entries:
                    is_chunk = CHUNK_NAME.fullmatch(entry.name) is not None
                    if known is not None:
                        if not is_chunk:
                            continue
                        if (key := bytes.fromhex(entry.name)) in known:
                            found.kept.append(key)
                            continue
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if not stat.S_ISREG(status.st_mode):
                            continue
                        # Files are published whole, so one of another length was torn or cut.
                        if is_chunk and status.st_size >= file_bytes(1) and not status.st_size % 4096:
                            found.add_chunk(entry.name, status)
                            if access is not None:
                                access.enforce(entry.name, status, directory)
                        elif access is not None and known is None and (is_chunk or owner.is_stray(entry.name)):
                            os.unlink(entry.name, dir_fd=directory)
                            found.strays += 1
    except ABSENT:
        pass
    return found


FORMAT = 1
MANIFEST = "tiercache.json"
_CONTENT = json.dumps({"format": FORMAT, "what": "tiercache chunks"}).encode() + b"\n"
_LARGEST_BYTES = 4096


class WrongFormat(ValueError):
    """The directory has another format. The message says which."""


def require_manifest(root: Path, temporary: str, access: Access) -> None:
    """Create the manifest of `root`, or check its format. A full device is no error.

    `temporary` is a unique name. A damaged manifest is replaced, as a power cut leaves it. A manifest that another process
    has just made may be replaced too, by the same content. Raises WrongFormat, OSError.
    """
    if check_manifest(root):
        return
    try:
        _write(temporary, _CONTENT)
        access.grant(temporary)
        os.replace(temporary, root / MANIFEST)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        if error.errno not in NO_ROOM:
            raise


def check_manifest(root: Path) -> bool:
    """Return True if the manifest is ours, False if it is missing or damaged. Raises WrongFormat, OSError."""
    try:
        found = json.loads(read_small(root / MANIFEST) or b"")["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    if found != FORMAT:
        raise WrongFormat(f"{root} has format {found!r}, this version writes {FORMAT}; use another directory")
    return True


def reads_directly(root: Path) -> bool:
    """Return True if the manifest can be opened with O_DIRECT. Does not raise."""
    try:
        os.close(open_file(root / MANIFEST, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def reads_back(root: Path) -> bool:
    """Return True if the device can read the manifest, bypassing the page cache. Does not raise."""
    try:
        try:
            descriptor = open_file(root / MANIFEST, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                return False
            descriptor = open_file(root / MANIFEST, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(-1, _LARGEST_BYTES) as page:  # O_DIRECT needs alignment
                return os.preadv(descriptor, [page], 0) > 0
        finally:
            os.close(descriptor)
    except OSError:
        return False


def read_small(path: Path, most_bytes: int = _LARGEST_BYTES) -> bytes | None:
    """Return the first bytes of a file of ours; None if it is missing. Raises OSError."""
    try:
        descriptor = open_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        found = b""
        while len(found) < most_bytes and (more := os.pread(descriptor, most_bytes - len(found), len(found))):
            found += more
        return found
    finally:
        os.close(descriptor)


def _write(unnamed: str, content: bytes) -> None:
    descriptor = open_file(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        if os.write(descriptor, content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), unnamed)
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


_SHARE_OF_FREE = 0.9


def default_cap(directories: Sequence[Path], access: Access) -> int:
    """Return 90% of the free and the counted bytes of all directories: stable across instances and restarts."""
    free_bytes: dict[int, int] = {}
    counted_bytes = 0
    for directory in directories:
        access.make_root(directory)
        space = os.statvfs(directory)
        # Directories on one file system share its free space.
        free_bytes[os.stat(directory).st_dev] = space.f_bavail * space.f_frsize
        counted_bytes += counted_in(directory / ".tiercache" / "ledger") or 0
    return int(_SHARE_OF_FREE * (sum(free_bytes.values()) + counted_bytes))


SUBDIRECTORY = "tiercache-chunks"


def place_of(directory: Path) -> Path:
    """Return the directory of the chunks of a configured directory: other programs may use that one too.

    Resolves links in the path. Raises OSError.
    """
    return Path(os.path.realpath(directory)) / SUBDIRECTORY


def make_place(directory: Path, access: Access) -> Path:
    """Create the directory of the chunks of a configured directory, and return it.

    Raises PermissionError if it is another user's, OSError.
    """
    warn_of_missing_mount(directory)
    access.make_root(directory)
    place = place_of(directory)
    access.make_directory(place)
    status = os.lstat(place)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
    access.enforce(place, status)
    if not access.owns(status) and status.st_uid != _own_user(place):
        raise PermissionError(errno.EPERM, f"it belongs to user {status.st_uid}", str(place))
    return place


def _own_user(directory: Path) -> int:
    """Return the user id of our new files on this mount; servers and mount options may map it."""
    probe = directory / f"probe.{os.getpid()}.{threading.get_ident()}"
    descriptor = open_file(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        probe.unlink(missing_ok=True)
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
