"""What lies in a volume's directories: found, counted, and cleared of what can be of no use. For worker threads."""

from __future__ import annotations

import os
import re
import stat
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tiercache.core.header import PACKED_BYTES, Header, HeaderError, file_bytes
from tiercache.core.keys import HEX_KEY, ChunkKey
from tiercache.tiers.files.access import Access, occupied_bytes, open_regular
from tiercache.tiers.files.count_file import Count
from tiercache.tiers.files.owners import PENDING_NAME, Owner

CHUNK_NAME = re.compile(HEX_KEY)
_HEX_NAME = re.compile(r"(?:[0-9a-f]{2})+")
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


@dataclass(frozen=True)
class Reckoning:
    """How the count stood before the first directory was scanned, and what was not there yet."""

    marked: Count
    own_bytes: int
    others_bytes: int
    tops: list[str]
    """The top-level directories of after that, which are to be scanned: what one has that is made later is in the count."""

    @property
    def outstanding_bytes(self) -> int:
        return self.own_bytes + self.others_bytes


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

    def scan(self, top: str) -> Scanned:
        """Find the chunks below `<root>/<top>`. Torn files and wrong names of our own shape are removed and counted.

        Files that are not of our naming are never touched.
        """
        found = Scanned()
        directory = self._root / top
        if directory.is_dir():
            found.counted_bytes += occupied_bytes(directory.stat())
            with os.scandir(directory) as entries:
                for entry in entries:
                    try:
                        self._examine(entry, top, found)
                    except FileNotFoundError:
                        continue
        return found

    def _examine(self, entry: os.DirEntry[str], top: str, found: Scanned) -> None:
        status = entry.stat(follow_symlinks=False)
        is_file = stat.S_ISREG(status.st_mode)
        if is_file and _is_chunk(entry, top):
            if status.st_size >= file_bytes(1) and not status.st_size % 4096:
                self._has_modes = self._has_modes and self._access.enforce_found(entry.path, status)
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
        if self._changes:
            os.unlink(entry.path)
            found.strays += 1


def _is_chunk(entry: os.DirEntry[str], top: str) -> bool:
    """By its name; where its key is not as long as ours are, also by its header. It takes room, whoever can ask for it."""
    if CHUNK_NAME.fullmatch(entry.name):
        return True
    return bool(_HEX_NAME.fullmatch(entry.name)) and entry.name.startswith(top) and _has_our_header(entry.path)


def _has_our_header(path: str) -> bool:
    try:
        descriptor = open_regular(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        Header.unpack(os.pread(descriptor, PACKED_BYTES, 0))
    except (HeaderError, OSError):
        return False
    finally:
        os.close(descriptor)
    return True
