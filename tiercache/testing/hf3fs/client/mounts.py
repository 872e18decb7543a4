"""Which mount a path or descriptor belongs to, and the calls that go to its daemon.

On a mount these are system calls. Where there is no FUSE and HF3FS_USRBIO_DONT_CHECKFS_FOR_MP is "yes", the mount is a plain
directory with a socket in it, and they go there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from pathlib import Path

from tiercache.testing.hf3fs.channel import Channel
from tiercache.testing.hf3fs.wire import IOCTL_FSYNC, IOCTL_GET_MAGIC, MAGIC, SOCKET_NAME, VIRTUAL_DIRECTORY


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
    if channel := _channel_of_link(link):
        channel.ask("symlink", name=os.path.basename(link), target=target)
    else:
        os.symlink(target, link)


def remove_link(link: str) -> None:
    """`os.unlink` of what `add_link` made. Raises OSError."""
    if channel := _channel_of_link(link):
        channel.ask("unlink", name=os.path.basename(link))
    else:
        os.unlink(link)


def hold_inode(descriptor: int) -> int:
    """The inode number by which rings know the file. On a mount, the daemon knows it while it is open."""
    mount = _plain_mount_of(descriptor)
    if mount is None:
        return os.fstat(descriptor).st_ino
    return int(_channel(mount).ask("hold", [descriptor]))


def release_inode(descriptor: int, inode: int) -> None:
    mount = _plain_mount_of(descriptor)
    if mount is not None:
        _channel(mount).ask("release", inode=inode)


def hold_mount(mount_point: str) -> None:
    """Keep `iovs` open, as the real library does for each mount as long as the process lives. Raises OSError."""
    if not mount_point:
        raise OSError(errno.EINVAL, "expected a mount point")
    with _lock:
        known = _held.get(mount_point)
        if known is not None:
            return
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        _held[mount_point] = os.open(f"{mount_point}/{VIRTUAL_DIRECTORY}/iovs", flags)


_lock = threading.Lock()
_held: dict[str, int] = {}
_channels: dict[Path, Channel] = {}


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


def _channel(mount: Path) -> Channel:
    with _lock:
        channel = _channels.get(mount)
        if channel is None:
            channel = _channels[mount] = Channel(mount / VIRTUAL_DIRECTORY / SOCKET_NAME)
        return channel


def _channel_of_link(link: str) -> Channel | None:
    mount = _plain_mount(Path(link).parent)
    return None if mount is None else _channel(mount)
