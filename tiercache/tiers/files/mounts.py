"""What is mounted where, and how."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

NFS = ("nfs", "nfs4")


@dataclass(frozen=True)
class Mount:
    point: str
    kind: str
    source: str = ""
    options: tuple[str, ...] = ()
    """Of the mount and of its file system, as the kernel names them; each once."""

    def option(self, name: str) -> str | None:
        """The value of `name=value`, an empty text for a mere `name`, None where it is not set."""
        for option in self.options:
            key, _, value = option.partition("=")
            if key == name:
                return value
        return None


def mounts(table: Path = Path("/proc/self/mountinfo")) -> list[Mount]:
    """All mounts that this process sees; none where the system does not say."""
    try:
        return parse_mountinfo(table.read_text())
    except OSError:
        return []


def parse_mountinfo(text: str) -> list[Mount]:
    """The mounts in a table as proc(5) describes it: `36 35 98:0 /root /point options tags... - kind source options`."""
    found = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        before, after = left.split(" "), right.split(" ")
        if not separator or len(before) < 6 or len(after) < 2:
            continue
        options = [option for each in (before[5], *after[2:3]) for option in each.split(",") if option]
        found.append(Mount(_plain(before[4]), after[0], _plain(after[1]), tuple(dict.fromkeys(options))))
    return found


def mount_of(path: Path, mounted: list[Mount] | None = None) -> Mount:
    """The mount that holds `path`: the longest mount point above it, the last one where two share a point."""
    place = Path(os.path.realpath(path))
    best = Mount("", "unknown file system")
    for mount in mounts() if mounted is None else mounted:
        if place.is_relative_to(mount.point) and len(mount.point) >= len(best.point):
            best = mount
    return best


def file_system_of(path: Path, mounted: list[Mount] | None = None) -> str:
    """The type of the file system that holds `path`."""
    return mount_of(path, mounted).kind


def local_locks(mount: Mount) -> tuple[str, str]:
    """The mount option that keeps file locks on this host, and what to do about it. Both empty where locks reach the other
    hosts, as far as the mount table says: the cap of a directory holds among those that see one another's locks."""
    if mount.kind in NFS:
        if mount.option("nolock") is not None:
            return "nolock", "Mount it without nolock"
        if (value := mount.option("local_lock")) in ("all", "flock"):
            return f"local_lock={value}", "Mount it with local_lock=none"
    elif mount.kind == "lustre" and mount.option("flock") is None:
        return "localflock" if mount.option("localflock") is not None else "noflock", "Mount it with -o flock"
    elif mount.kind in ("cifs", "smb3") and mount.option("nobrl") is not None:
        return "nobrl", "Mount it without nobrl"
    return "", ""


def _plain(escaped: str) -> str:
    """The kernel writes a space as backslash 040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), escaped)
