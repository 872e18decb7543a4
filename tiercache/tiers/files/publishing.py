"""Give a finished file its name, unless another file has it already: atomically, without a lock.

Instances on a shared mount publish the same chunks at the same time. A lock around "is it there" and "rename" would make all
of them wait for one another at each chunk; the file system can decide it alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import stat
from collections.abc import Callable

from tiercache.tiers.files.access import Access, occupied_bytes
from tiercache.tiers.files.capacity import Capacity
from tiercache.tiers.files.quarantine import Quarantine

logger = logging.getLogger("tiercache.disk")

_ATTEMPTS = 8
_NOT_OURS_TO_MOVE = frozenset({errno.EACCES, errno.EPERM, errno.EBUSY, errno.EXDEV})
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


class NameTaken(OSError):
    """Something that is no file has the name of this chunk, or of its directory, and stays there. Others can be written."""


class Publisher:
    """Gives the files of a volume their names."""

    def __init__(self, access: Access, quarantine: Quarantine, capacity: Callable[[], Capacity]) -> None:
        self.ways = WAYS
        """The first that the file system can do is taken."""
        self._access = access
        self._quarantine = quarantine
        self._capacity = capacity

    def publish(self, temporary: str, path: str) -> int | None:
        """Give the finished file its name. None, or the bytes of another instance's file that has it already."""
        for _ in range(_ATTEMPTS):
            try:
                self._name(temporary, path)
                return None
            except FileExistsError:
                with contextlib.suppress(FileNotFoundError):  # then it was evicted since, and the name is free again
                    status = os.lstat(path)
                    if stat.S_ISREG(status.st_mode):
                        return occupied_bytes(status)
                    self.make_way(path)
            except NotADirectoryError as error:
                raise NameTaken(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.path.dirname(path)) from error
            except FileNotFoundError:
                if not os.path.lexists(temporary):
                    raise
                # The directory is not there yet, or somebody tidied it away.
                self.make_directory(os.path.dirname(path))
        raise OSError(f"{path}: the directory vanishes as often as it is made")

    def make_way(self, path: str) -> None:
        """Remove what has a chunk's name and is no file. A directory in which something lies is somebody's: it goes to
        quarantine as it is, and is not counted. Raises NameTaken when it stays where it is, OSError."""
        try:
            try:
                _clear(path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                self._quarantine.take(path)
                logger.warning("%s: a directory had the name of a chunk; it was moved to quarantine", path)
        except OSError as error:
            if error.errno not in _NOT_OURS_TO_MOVE:
                raise
            raise NameTaken(error.errno, f"is no file, and stays: {error.strerror}", path) from error

    def _name(self, temporary: str, path: str) -> None:
        for way in self.ways:
            try:
                way(temporary, path)
                return
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
        with self._capacity().locked():
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            os.rename(temporary, path)

    def make_directory(self, path: str) -> None:
        try:
            if self._access.make_directory(path):
                self._capacity().add(occupied_bytes(os.stat(path)))
        except NotADirectoryError as error:
            raise NameTaken(error.errno, error.strerror, path) from error


def _clear(path: str) -> None:
    """Remove what has a chunk's name and is no file: a pipe, a link, an empty directory. Never counted. Raises OSError."""
    if stat.S_ISDIR(os.lstat(path).st_mode):
        os.rmdir(path)
    else:
        os.unlink(path)
