"""Descriptors that rings may use.

The real library keeps a table by descriptor number and never learns that a number was closed. A file that is closed before
it is deregistered stays open through the library's duplicate, and its inode stays bound to the number, which the next `open`
gets.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from dataclasses import dataclass

from tests.hf3fs_emulator.client.mounts import is_hf3fs


@dataclass(frozen=True)
class RegisteredFile:
    duplicate: int
    inode: int
    access: int
    """O_RDONLY, O_WRONLY or O_RDWR, as it was when the descriptor was registered."""


_lock = threading.Lock()
_registered: dict[int, RegisteredFile] = {}


def register_fd(fd: int, flags: int = 0) -> None:
    """Let rings use `fd`. Raises OSError: EBADF when it is not on 3FS, EINVAL when its number is registered already."""
    if not is_hf3fs(fd):
        raise OSError(errno.EBADF, f"descriptor {fd} is not on 3FS")
    # The inode is a call of the mount, which takes its time there: as in the real library, nobody else waits for it.
    duplicate = os.dup(fd)
    try:
        _require_unregistered(fd, duplicate)
        inode = os.fstat(duplicate).st_ino
    except OSError:
        os.close(duplicate)
        raise
    access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    with _lock:
        try:
            _require_unregistered(fd, duplicate)
        except OSError:
            os.close(duplicate)
            raise
        _registered[fd] = _registered[duplicate] = RegisteredFile(duplicate, inode, access)


def _require_unregistered(fd: int, duplicate: int) -> None:
    if fd in _registered:
        raise OSError(errno.EINVAL, f"descriptor {fd} is registered already, perhaps since before it was closed")
    if duplicate in _registered:
        raise OSError(errno.EINVAL, f"descriptor {duplicate} was closed while it was registered")


def deregister_fd(fd: int) -> None:
    """Before `os.close(fd)`: afterwards this does nothing. Silent when `fd` is not registered."""
    if not is_hf3fs(fd):
        return
    with _lock:
        file = _registered.pop(fd, None)
        if file is None:
            return
        if _registered.get(file.duplicate) is file:
            del _registered[file.duplicate]
        with contextlib.suppress(OSError):  # of a dead mount; the real one does not look
            os.close(file.duplicate)


def let_go_of_dead_mounts() -> None:
    """Close files of dead mounts, which the real library keeps open until their numbers are registered again."""
    with _lock:
        dead = {fd: file for fd, file in _registered.items() if not is_hf3fs(file.duplicate)}
        for fd in dead:
            del _registered[fd]
        for duplicate in {file.duplicate for file in dead.values()}:
            os.close(duplicate)


def registered(fd: int) -> RegisteredFile | None:
    return _registered.get(abs(fd))
