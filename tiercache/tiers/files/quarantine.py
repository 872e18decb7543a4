"""Where chunks that failed verification lie until somebody has looked into them. Synchronous; for worker threads."""

from __future__ import annotations

import contextlib
import math
import os
import stat
import time
from pathlib import Path

from tiercache.tiers.files.access import ABSENT, Access, occupied_bytes
from tiercache.tiers.files.ledger import Ledger

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
        os.rename(path, self.directory / f"{os.path.basename(path)}.{time.time_ns()}")

    def trim(self, ledger: Ledger, cap_bytes: int) -> None:
        """Keep the last few, and no more than a part of a small cap: chunks need it. What cannot be removed, or is no file,
        is no reason to keep others. `cap_bytes` 0: nobody knows it here."""
        kept = []
        for path in self._paths():
            with contextlib.suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    kept.append((status.st_mtime_ns, path, occupied_bytes(status)))
                elif not stat.S_ISDIR(status.st_mode):
                    path.unlink()
        kept.sort(reverse=True)
        left_bytes = cap_bytes / _SHARE if cap_bytes else math.inf
        for place, (_, path, occupied) in enumerate(kept):
            left_bytes -= occupied
            if place < _KEEPS and left_bytes >= 0:
                continue
            ledger.announce(occupied)
            gone = False
            with contextlib.suppress(OSError):
                path.unlink()
                gone = True
            ledger.release(occupied if gone else 0, occupied)

    def occupied_bytes(self) -> int:
        total_bytes = 0
        for path in self._paths():
            with contextlib.suppress(FileNotFoundError):
                total_bytes += occupied_bytes(path.lstat())
        return total_bytes

    def _paths(self) -> list[Path]:
        try:
            return [self.directory / name for name in os.listdir(self.directory)]
        except ABSENT:
            return []
