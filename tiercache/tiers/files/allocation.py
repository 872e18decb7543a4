"""Where files get their room: before they are written, so that extents are contiguous and a full device fails here instead
of half-way; and not all of them side by side."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import sys
from pathlib import Path

from tiercache.tiers.files.mounts import file_system_of

_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_CANNOT = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_GET_FLAGS = 0x80086601
_SET_FLAGS = 0x40086602
"""FS_IOC_GETFLAGS and FS_IOC_SETFLAGS; other numbers on some processors, where nothing comes of it."""
_TOP = 0x20000
"""FS_TOPDIR_FL, `chattr +T`."""
_HINTED = ("ext2", "ext3", "ext4")


def reserve(descriptor: int, length_bytes: int) -> None:
    """fallocate(2) of the first `length_bytes`, nothing where the file system has no such call. Raises OSError (ENOSPC).

    Not posix_fallocate: where the call is missing (NFS before 4.2, CephFS) glibc's writes a byte into every block instead,
    which is as many requests as the file has blocks.
    """
    if _fallocate is None:
        return
    while _fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(length_bytes)):
        code = ctypes.get_errno()
        if code in _CANNOT:
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def spread(directory: Path) -> None:
    """Have the directories that are made in `directory` lie apart on its device, each with its files. Nothing where the file
    system has no such hint. Does not raise.

    ext4 passes over the inodes that were freed in the last minutes, one by one, each time it makes a file. Where all
    directories share one group of inodes, that is every chunk that was lately evicted, and whoever makes one waits for it.
    """
    with contextlib.suppress(OSError):
        if file_system_of(directory) not in _HINTED:
            return
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            flags = int.from_bytes(fcntl.ioctl(descriptor, _GET_FLAGS, bytes(8))[:4], sys.byteorder)
            fcntl.ioctl(descriptor, _SET_FLAGS, (flags | _TOP).to_bytes(8, sys.byteorder))
        finally:
            os.close(descriptor)
