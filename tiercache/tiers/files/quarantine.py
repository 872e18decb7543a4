"""Where chunks that failed verification lie until somebody has looked into them. Synchronous; for worker threads."""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiercache.core.keys import ChunkKey
from tiercache.tiers.files.access import ABSENT, Access, occupied_bytes, opened_directory
from tiercache.tiers.files.capacity import Capacity

QUARANTINED_NAME = re.compile(r"(?:[0-9a-f]{2})+\.\d{15,}")
"""A key, and the time in nanoseconds. Files with other names are not ours."""
_KEEPS = 8
_SHARE = 4
"""The part of the cap that these may take."""


class Quarantine:
    """What lies here is counted, and stays bounded."""

    def __init__(self, directory: Path, access: Access) -> None:
        self.directory = directory
        self._access = access

    def take(self, path: str) -> None:
        """Move a bad chunk here. Raises OSError (FileNotFoundError: another instance was quicker)."""
        self._access.make_directory(self.directory)
        above, name = os.path.split(path)
        with opened_directory(above) as source, opened_directory(self.directory) as target:
            os.rename(name, f"{name}.{time.time_ns()}", src_dir_fd=source, dst_dir_fd=target)

    def trim(self, capacity: Capacity, cap_bytes: int) -> None:
        """Keep the last few, and no more than a part of a small cap: chunks need it. What cannot be removed, or is no file,
        is no reason to keep others. `cap_bytes` 0: nobody knows it here."""
        kept = []
        with self._opened() as (directory, names):
            for name in names:
                with contextlib.suppress(OSError):
                    status = os.lstat(name, dir_fd=directory)
                    if stat.S_ISREG(status.st_mode):
                        kept.append((status.st_mtime_ns, name, occupied_bytes(status)))
                    elif not stat.S_ISDIR(status.st_mode):
                        os.unlink(name, dir_fd=directory)
            kept.sort(reverse=True)
            left_bytes = cap_bytes / _SHARE if cap_bytes else math.inf
            for place, (_, name, occupied) in enumerate(kept):
                left_bytes -= occupied
                if place >= _KEEPS or left_bytes < 0:
                    _remove(name, directory, occupied, capacity)

    def forget(self, key: ChunkKey, capacity: Capacity) -> None:
        """Remove what is kept of a chunk. Raises OSError, TierUnavailable."""
        with self._opened() as (directory, names):
            for name in names:
                if name.startswith(f"{key.hex()}."):
                    status = os.lstat(name, dir_fd=directory)
                    if stat.S_ISREG(status.st_mode):
                        _remove(name, directory, occupied_bytes(status), capacity)

    def occupied_bytes(self) -> int:
        total_bytes = 0
        with self._opened() as (directory, names):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total_bytes += occupied_bytes(os.lstat(name, dir_fd=directory))
        return total_bytes

    @contextmanager
    def _opened(self) -> Iterator[tuple[int, list[str]]]:
        """The directory, for calls with `dir_fd`, and the names in it that are ours; none where it is not there."""
        with contextlib.ExitStack() as stack:
            try:
                directory = stack.enter_context(opened_directory(self.directory, to_list=True))
            except ABSENT:
                yield -1, []
                return
            yield directory, [name for name in os.listdir(directory) if QUARANTINED_NAME.fullmatch(name)]


def _remove(name: str, directory: int, occupied: int, capacity: Capacity) -> None:
    """Remove a file and take it off the count. A file that cannot be removed stays counted."""
    capacity.announce(occupied)
    gone = False
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=directory)
        gone = True
    capacity.release(occupied if gone else 0, occupied)
