"""Which mount a path or descriptor belongs to, and the calls that go to its daemon."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from tests.hf3fs_emulator.wire import IOCTL_FSYNC, IOCTL_GET_MAGIC, MAGIC, VIRTUAL_DIRECTORY


def extract_mount_point(path: str) -> str | None:
    """The mount point of 3FS that `path` lies under; None when there is none. Raises when `path` does not exist."""
    candidates = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split(" ")
        if len(fields) < 10 or fields[-3] != "fuse.hf3fs":
            continue
        mount = Path(os.path.normpath(fields[4].replace("\\040", " ")))
        if mount.name == VIRTUAL_DIRECTORY:
            candidates.add(mount.parent)
        elif os.path.exists(mount / VIRTUAL_DIRECTORY):
            candidates.add(mount)
    real = Path(path).resolve(strict=True)
    around = [mount for mount in candidates if real.is_relative_to(mount)]
    return str(max(around, key=lambda mount: len(mount.parts))) if around else None


def is_hf3fs(descriptor: int) -> bool:
    try:
        answer = fcntl.ioctl(descriptor, IOCTL_GET_MAGIC, bytes(4))
    except OSError:
        return False
    return bool(struct.unpack("<I", answer)[0] == MAGIC)


def force_fsync(fd: int) -> int:
    """Make `stat` say the true size from now on. Returns -1 although it works: the ioctl's answer has nowhere to go."""
    try:
        fcntl.ioctl(fd, IOCTL_FSYNC, 0)
    except OSError:
        return -1
    return 0
