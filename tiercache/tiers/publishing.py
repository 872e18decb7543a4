"""Give a finished file its name, unless another file has it already: atomically, without a lock.

Instances on a shared mount publish the same chunks at the same time. A lock around "is it there" and "rename" would make all
of them wait for one another at each chunk; the file system can decide it alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable

UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
"""What file systems answer to a way that they do not have: NFS to RENAME_NOREPLACE, FAT to links."""
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)

Publish = Callable[[str, str], None]
"""From a temporary name to the final one. Raises FileExistsError when that is taken, FileNotFoundError when its directory
is not there, and an OSError of `UNSUPPORTED` when the file system cannot do it this way."""


def rename_new(temporary: str, path: str) -> None:
    """renameat2(RENAME_NOREPLACE)."""
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, "this C library has no renameat2", path)
    if _renameat2(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(path), _RENAME_NOREPLACE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)


def link_new(temporary: str, path: str) -> None:
    """A second name, then the first one goes. Killed in between, the file has both until its writer is found dead."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        # A network file system may have done it, lost the answer, and been asked again.
        if not os.path.samefile(temporary, path):
            raise
    with contextlib.suppress(OSError):
        os.unlink(temporary)


WAYS: tuple[Publish, ...] = (rename_new, link_new)
"""In the order in which they are tried."""
