"""How much a tier may fill when nobody says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tiercache.tiers.files.access import Access
from tiercache.tiers.files.capacity import counted_in

_SHARE_OF_FREE = 0.9


def default_cap(directories: Sequence[Path], access: Access) -> int:
    """Nine tenths of what is free and of what is counted there already, in all directories together: about the same in
    every instance that shares them, and after every restart."""
    free_bytes: dict[int, int] = {}
    counted_bytes = 0
    for directory in directories:
        access.make_root(directory)
        space = os.statvfs(directory)
        # Directories of one file system have its free space together, not each.
        free_bytes[os.stat(directory).st_dev] = space.f_bavail * space.f_frsize
        counted_bytes += counted_in(directory / ".tiercache" / "ledger") or 0
    return int(_SHARE_OF_FREE * (sum(free_bytes.values()) + counted_bytes))
