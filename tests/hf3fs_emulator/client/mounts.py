"""Which mount a path or descriptor belongs to, and the calls that go to its daemon.

On a mount these are system calls. Where there is no FUSE and HF3FS_USRBIO_DONT_CHECKFS_FOR_MP is "yes", the mount is a plain
directory with a socket in it, and they go there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.hf3fs_emulator.channel import Channel
from tests.hf3fs_emulator.wire import IOCTL_FSYNC, IOCTL_GET_MAGIC, MAGIC, SOCKET_NAME, VIRTUAL_DIRECTORY


def extract_mount_point(path: str) -> str | None:
    """The mount point of 3FS that `path` lies under; None when there is none. Raises when `path` does not exist."""
    candidates = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split(" ")
        if len(fields) < 10 or (not _any_type_will_do() and fields[-3] != "fuse.hf3fs"):
            continue
        mount = Path(os.path.normpath(fields[4].replace("\\040", " ")))
        if mount.name == VIRTUAL_DIRECTORY:
            candidates.add(mount.parent)
        elif os.path.exists(mount / VIRTUAL_DIRECTORY):
            candidates.add(mount)
    real = Path(path).resolve(strict=True)
    if plain := _plain_mount(real):
        candidates.add(plain)
    around = [mount for mount in candidates if real.is_relative_to(mount)]
    return str(max(around, key=lambda mount: len(mount.parts))) if around else None


def is_hf3fs(descriptor: int) -> bool:
    try:
        answer = fcntl.ioctl(descriptor, IOCTL_GET_MAGIC, bytes(4))
    except OSError:
        return _plain_mount_of(descriptor) is not None
    return bool(struct.unpack("<I", answer)[0] == MAGIC)


def force_fsync(fd: int) -> int:
    """Make `stat` say the true size from now on. Returns -1 although it works: the ioctl's answer has nowhere to go."""
    try:
        fcntl.ioctl(fd, IOCTL_FSYNC, 0)
    except OSError:
        return -1
    return 0


def add_link(target: str, link: str) -> None:
    """`os.symlink` into `3fs-virt/iovs`, which registers shared memory. Raises OSError with the daemon's errno."""
    if mount := _plain_mount(Path(link).parent):
        _ask(mount, "symlink", name=os.path.basename(link), target=target)
    else:
        os.symlink(target, link)


def remove_link(link: str) -> None:
    """`os.unlink` of what `add_link` made. Raises OSError."""
    if mount := _plain_mount(Path(link).parent):
        _ask(mount, "unlink", name=os.path.basename(link))
    else:
        os.unlink(link)


def hold_inode(descriptor: int) -> int:
    """The inode number by which rings know the file. On a mount, the daemon knows it while it is open."""
    mount = _plain_mount_of(descriptor)
    return os.fstat(descriptor).st_ino if mount is None else int(_ask(mount, "hold", [descriptor]))


def release_inode(descriptor: int, inode: int) -> None:
    mount = _plain_mount_of(descriptor)
    if mount is not None:
        with contextlib.suppress(OSError):  # the daemon that held it may be dead
            _ask(mount, "release", inode=inode)


def _any_type_will_do() -> bool:
    return os.environ.get("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP") == "yes"


def _plain_mount(path: Path) -> Path | None:
    if not _any_type_will_do():
        return None
    for directory in (path, *path.parents):
        if (directory / VIRTUAL_DIRECTORY / SOCKET_NAME).is_socket():
            return directory
    return None


def _plain_mount_of(descriptor: int) -> Path | None:
    if not _any_type_will_do():
        return None
    try:
        return _plain_mount(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
    except OSError:
        return None


def _ask(mount: Path, what: str, descriptors: Sequence[int] = (), **arguments: Any) -> Any:
    # A connection each time: no descriptor stays open, and a restarted daemon is reached as well.
    channel = Channel(mount / VIRTUAL_DIRECTORY / SOCKET_NAME)
    try:
        return channel.ask(what, descriptors, **arguments)
    finally:
        channel.close()
