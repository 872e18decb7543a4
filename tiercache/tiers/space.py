"""How much a tier may fill when nobody says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tiercache.tiers.ledger import counted_in

_SHARE_OF_FREE = 0.9


def default_cap(directories: Sequence[Path]) -> int:
    """Nine tenths of what is free and of what is counted there already, in all directories together: about the same in
    every instance that shares them, and after every restart."""
    total_bytes = 0
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
        space = os.statvfs(directory)
        counted_bytes = counted_in(directory / ".tiercache" / "ledger")
        total_bytes += int(_SHARE_OF_FREE * (space.f_bavail * space.f_frsize + counted_bytes))
    return total_bytes
