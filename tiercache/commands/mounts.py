"""What is mounted where."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mount:
    point: str
    kind: str


def mounts(table: Path = Path("/proc/mounts")) -> list[Mount]:
    """All mounts; none where the system does not say."""
    try:
        lines = [line.split(" ") for line in table.read_text().splitlines()]
    except OSError:
        return []
    return [Mount(_plain(line[1]), line[2]) for line in lines if len(line) > 2]


def file_system_of(path: Path, mounted: list[Mount] | None = None) -> str:
    """Type of the mount that holds `path`: the longest mount point above it, the last one where two share a point."""
    place = path.resolve()
    best = Mount("", "unknown file system")
    for mount in mounts() if mounted is None else mounted:
        if place.is_relative_to(mount.point) and len(mount.point) >= len(best.point):
            best = mount
    return best.kind


def _plain(escaped: str) -> str:
    """The kernel writes a space as backslash 040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), escaped)
