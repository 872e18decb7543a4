"""Room for a file before it is written: contiguous extents, and a full device that fails here instead of half-way."""

from __future__ import annotations

import ctypes
import errno
import os

_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_CANNOT = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


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
