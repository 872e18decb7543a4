"""What lies in a volume's directories: found, counted, and cleared of what can be of no use. For worker threads."""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
import re
import stat
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tiercache.core.header import KEY_AT, MAGIC, PACKED_BYTES, Header, HeaderError, file_bytes
from tiercache.core.keys import HEX_KEY, ChunkKey
from tiercache.tiers.files.access import ABSENT, Access, NotAFile, occupied_bytes, open_regular, opened_directory
from tiercache.tiers.files.owners import PENDING_NAME, Owner

logger = logging.getLogger("tiercache.disk")

CHUNK_NAME = re.compile(HEX_KEY)
_HEX_NAME = re.compile(r"(?:[0-9a-f]{2})+")
_OUR_NAME = re.compile(rf"(?:{HEX_KEY})(?:\.\d{{15,}})?|{PENDING_NAME.pattern}")
"""Of a chunk, of one in quarantine, and of one that is being written."""
_LOOKED_INTO = 16
TOP_LEVELS = [f"{number:02x}" for number in range(256)]


@dataclass
class Scanned:
    """What was found below one top-level directory, or several. Sizes are what the file system really allocates.

    Three columns, and not an object a chunk: a hundred thousand objects take milliseconds to free, in one go.
    """

    keys: list[ChunkKey] = field(default_factory=list)
    times_s: array[float] = field(default_factory=lambda: array("d"))
    """When each was modified."""
    sizes: array[int] = field(default_factory=lambda: array("q"))
    """Bytes that each occupies."""
    counted_bytes: int = 0
    """Of chunks and directories."""
    strays: int = 0
    foreign: int = 0

    def add(self, other: Scanned) -> None:
        self.keys += other.keys
        self.times_s += other.times_s
        self.sizes += other.sizes
        self.counted_bytes += other.counted_bytes
        self.strays += other.strays
        self.foreign += other.foreign

    def newest_first(self) -> np.ndarray:
        """The positions of the chunks, int64. For a worker thread: NumPy sorts without Python's lock."""
        return np.argsort(-np.asarray(self.times_s), kind="stable")


class Surveyor:
    """Scans the directories below `root` on behalf of `owner`. Chunks of this user get the mode that `access` says."""

    def __init__(self, root: Path, owner: Owner, access: Access, *, changes: bool = True) -> None:
        """`changes`: without, nothing is given a mode or removed."""
        self._root = root
        self._changes = changes
        self._owner = owner
        self._access = access
        self._has_modes = changes
        """Until the mount is seen to have none: then scans open no files for that any more."""
        self._trusts_names = True
        """Until a file with a chunk's name is found not to be one: from then on only a header makes a chunk."""

    def trusts(self, status: os.stat_result) -> bool:
        """Return True if a file with a chunk's name is taken for one unread. It is looked into before it is removed."""
        has_our_mode = not self._has_modes or stat.S_IMODE(status.st_mode) == self._access.file_mode
        return self._trusts_names and has_our_mode

    def remove(self, name: str, directory: int) -> bool:
        """Unlink a chunk in an open directory; False where the file of that name is somebody else's, which stays.

        Raises FileNotFoundError, OSError.
        """
        if not _is_removable(name, directory):
            if self._trusts_names:
                logger.warning("%s: files of others have the names of chunks, such as %s; they stay", self._root, name)
            self._trusts_names = False
            return False
        os.unlink(name, dir_fd=directory)
        return True

    def scan(self, top: str) -> Scanned:
        """Find the chunks below `<root>/<top>`. Torn files and wrong names of our own shape are removed and counted.

        Files that are not of our naming, or whose headers are not ours, are never touched. Nor is what a link leads to.
        """
        found = Scanned()
        try:
            with opened_directory(self._root / top, to_list=True) as directory:
                own_bytes = occupied_bytes(os.stat(directory))
                with os.scandir(directory) as entries:
                    for entry in entries:
                        try:
                            self._examine(entry, top, directory, found)
                        except FileNotFoundError:
                            continue
                if found.keys or not found.foreign:  # else it is not of our making
                    found.counted_bytes += own_bytes
        except ABSENT:
            return found
        return found

    def _examine(self, entry: os.DirEntry[str], top: str, directory: int, found: Scanned) -> None:
        status = entry.stat(follow_symlinks=False)
        is_file = stat.S_ISREG(status.st_mode)
        header = _Unread(entry.name, directory)
        if is_file and _is_chunk(entry.name, top, header):
            if status.st_size >= file_bytes(1) and not status.st_size % 4096:
                if not self.trusts(status) and not header.is_ours:
                    found.foreign += 1
                    if not header.is_readable:  # it may be ours: the cap holds in any case
                        found.counted_bytes += occupied_bytes(status)
                    return
                self._has_modes = self._has_modes and self._access.enforce_found(entry.name, status, directory)
                size_bytes = occupied_bytes(status)
                found.counted_bytes += size_bytes
                found.keys.append(bytes.fromhex(entry.name))
                found.times_s.append(status.st_mtime)
                found.sizes.append(size_bytes)
                return
            # Published whole, so it was torn by the device or cut by somebody: it can never be a hit.
        elif not is_file or not self._owner.is_stray(entry.name):
            found.foreign += not PENDING_NAME.fullmatch(entry.name)
            return
        if not header.is_ours:
            found.foreign += 1
        elif self._changes:
            os.unlink(entry.name, dir_fd=directory)
            found.strays += 1


class _Unread:
    """The beginning of a file, which is read when it is asked for."""

    def __init__(self, name: str, directory: int) -> None:
        self._name = name
        self._directory = directory
        self.error: OSError | None = None

    @functools.cached_property
    def _raw(self) -> bytes | None:
        """None where it cannot be read, for the reason in `error`."""
        try:
            descriptor = open_regular(self._name, os.O_RDONLY, self._directory)
        except OSError as error:
            self.error = error
            return None
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no more than is asked for
            found = b""
            while len(found) < PACKED_BYTES and (more := os.pread(descriptor, PACKED_BYTES - len(found), len(found))):
                found += more
            if len(found) < min(PACKED_BYTES, os.fstat(descriptor).st_size):
                raise OSError(errno.EIO, "short read", self._name)
            return found
        except OSError as error:
            self.error = error
            return None
        finally:
            os.close(descriptor)

    @property
    def is_ours(self) -> bool:
        """True if the header has our magic or the key of its name, either of which may be damaged, or is blank: a power cut,
        or a kill, leaves files whose header was not written."""
        raw = self._raw
        if raw is None:
            return False
        key = self._name.partition(".")[0]  # in quarantine a number follows
        names_itself = _HEX_NAME.fullmatch(key) and raw[KEY_AT:].startswith(bytes.fromhex(key))
        return raw.startswith(MAGIC) or bool(names_itself) or not raw.strip(b"\0")

    @property
    def verifies(self) -> bool:
        """True if the header is whole, and has the key of the name."""
        try:
            return self._raw is not None and Header.unpack(self._raw).key.hex() == self._name
        except HeaderError:
            return False

    @property
    def is_readable(self) -> bool:
        """Whether all of a header could be read, be it ours or not."""
        return self._raw is not None and len(self._raw) == PACKED_BYTES


def _is_removable(name: str, directory: int) -> bool:
    """Return True for what is ours, and for what the device cannot read any more. Raises FileNotFoundError, OSError."""
    file = _Unread(name, directory)
    if file.is_ours:
        return True
    if file.error is None or isinstance(file.error, NotAFile | PermissionError):
        return False
    if file.error.errno != errno.EIO:
        raise file.error
    return True


def has_our_header(path: str) -> bool:
    """Return True if a file is a chunk by its header, be it damaged or blank."""
    above, name = os.path.split(path)
    try:
        with opened_directory(above) as directory:
            return _Unread(name, directory).is_ours
    except ABSENT:
        return False


def is_ours(root: Path, name: str, *, private: bool) -> bool:
    """Return True if a directory below `root`, which has no manifest, is one in which chunks lie: its first files are chunks
    whose headers verify. With `private`, a `.tiercache` of ours lies beside it: then damaged chunks, chunks in quarantine
    and files that are being written are taken for ours as well. Also where it vanishes meanwhile. Raises OSError."""
    if name not in TOP_LEVELS and not (private and name == "quarantine"):
        return False
    try:
        with opened_directory(root / name, to_list=True) as directory, os.scandir(directory) as entries:
            first = [entry.name for entry in itertools.islice(entries, _LOOKED_INTO)]
            if not first and not private:
                status = os.stat(directory)
                return status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) in (0o700, 0o2770)
            return all(_has_our_content(each, directory, private) for each in first)
    except FileNotFoundError:
        return True
    except (NotADirectoryError, PermissionError):
        return False


def _has_our_content(name: str, directory: int, private: bool) -> bool:
    file = _Unread(name, directory)
    if file.verifies or isinstance(file.error, FileNotFoundError):
        return True
    return private and bool(_OUR_NAME.fullmatch(name)) and file.is_ours


def _is_chunk(name: str, top: str, header: _Unread) -> bool:
    """Return True for the name of a chunk; where the key is not as long as ours are, also the header has to verify."""
    if CHUNK_NAME.fullmatch(name):
        return True
    return bool(_HEX_NAME.fullmatch(name)) and name.startswith(top) and header.verifies
