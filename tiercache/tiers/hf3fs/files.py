"""Descriptors registered with 3FS, opened and closed by its rules. Blocks; for worker threads."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections import OrderedDict
from typing import Any

from tiercache.tiers.files.access import occupied_bytes, open_regular

_OPEN_FILES = 128
_LEFT_BEHIND = 2 * _OPEN_FILES
"""Numbers that a tier, closed while its mount was dead, may have left registered."""
_GET_MAGIC = 0x80046802
"""3FS's ioctl that every file of its mount answers; a plain directory of the emulator says ENOTTY."""


class RegisteredFile:
    """An open file that rings know."""

    __slots__ = ("descriptor", "users")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.users = 1


class _Opening:
    """Of a file to read, while it lasts."""

    __slots__ = ("forgotten",)

    def __init__(self) -> None:
        self.forgotten = False


class RegisteredFiles:
    """Files for reading are kept open, the last used ones longest: opening one takes two calls of the metadata service.

    A file is deregistered before it is closed: afterwards its number would go on meaning the old file. Where its mount has
    died it cannot be, so it stays open until another file of a living mount has lent it its place.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._kept: OrderedDict[str, RegisteredFile] = OrderedDict()
        self._opening: dict[str, set[_Opening]] = {}
        self._orphans: list[int] = []
        self._keeps = True
        self._closed = False
        self._lock = threading.Lock()

    def kept(self, path: str) -> RegisteredFile | None:
        """The file if it is open already. Does not block."""
        with self._lock:
            file = self._kept.get(path)
            if file is not None:
                self._kept.move_to_end(path)
                file.users += 1
            return file

    def open_to_read(self, path: str) -> RegisteredFile:
        """What is forgotten meanwhile is not kept: another file may soon have the path. Raises OSError."""
        opening = _Opening()
        with self._lock:
            self._opening.setdefault(path, set()).add(opening)
        try:
            file = self._open(path, os.O_RDONLY)
        except BaseException:
            with self._lock:
                self._ended(path, opening)
            raise
        surplus = []
        with self._lock:
            self._ended(path, opening)
            if path not in self._kept and self._keeps and not opening.forgotten:
                file.users += 1  # one is ours
                self._kept[path] = file
                while len(self._kept) > _OPEN_FILES:
                    surplus.append(self._kept.popitem(last=False)[1])
        for each in surplus:
            self.release(each)
        return file

    def _ended(self, path: str, opening: _Opening) -> None:
        """With the lock held."""
        others = self._opening[path]
        others.discard(opening)
        if not others:
            del self._opening[path]

    def create(self, path: str) -> RegisteredFile:
        """Raises FileExistsError, OSError."""
        return self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def release(self, file: RegisteredFile) -> None:
        if self.drop(file):
            self.close_file(file)

    def drop(self, file: RegisteredFile) -> bool:
        """One user fewer; whether that was the last and the file is to be closed. Does not block."""
        with self._lock:
            file.users -= 1
            return not file.users

    def close_file(self, file: RegisteredFile) -> None:
        """Deregister and close a file that nobody uses."""
        self._close(file.descriptor)

    def forget(self, path: str) -> None:
        """The file is gone, or is not what it was: the next read opens it anew."""
        with self._lock:
            file = self._kept.pop(path, None)
            for opening in self._opening.get(path, ()):
                opening.forgotten = True
        if file is not None:
            self.release(file)

    def close_deleted(self) -> int:
        """Others delete chunks too: a file that stays open here takes its space, below no cap. How many there were."""
        closed = 0
        with self._lock:
            kept = list(self._kept.items())
            for _, file in kept:
                file.users += 1  # so that its number stays its own
        for path, file in kept:
            if _is_deleted(file.descriptor):
                with self._lock:
                    ours = self._kept.get(path) is file
                if ours:
                    self.forget(path)
                    closed += 1
            self.release(file)
        return closed

    def refresh(self, path: str) -> None:
        """Make `stat` say the true length of a file that somebody's rings wrote."""
        descriptor = open_regular(path, os.O_RDONLY)
        try:
            self._library.force_fsync(descriptor)
        finally:
            os.close(descriptor)

    def settle(self, file: RegisteredFile, *, durable: bool) -> int:
        """Everything that rings wrote is in the file, and in its length. Returns the bytes that it occupies."""
        if durable:
            os.fsync(file.descriptor)
        else:
            self._library.force_fsync(file.descriptor)
        return occupied_bytes(os.fstat(file.descriptor))

    def forget_all(self) -> None:
        with self._lock:
            files, self._kept = list(self._kept.values()), OrderedDict()
            for openings in self._opening.values():
                for opening in openings:
                    opening.forgotten = True
        for file in files:
            self.release(file)

    def close(self, living: str) -> None:
        """Nothing is kept open from now on. Files in use are closed by whoever releases them.

        `living` is a file of the mount, for files of one that died to be deregistered by.
        """
        self._keeps = False
        self.forget_all()
        if self._orphans:
            with contextlib.suppress(OSError):
                descriptor = os.open(living, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    self._close_orphans(descriptor)
                finally:
                    os.close(descriptor)
        self._closed = True
        with self._lock:
            orphans, self._orphans = self._orphans, []
        for descriptor in orphans:
            _close(descriptor)

    def _open(self, path: str, flags: int) -> RegisteredFile:
        descriptor = open_regular(path, flags)
        try:
            self._close_orphans(descriptor)
            self._register(descriptor)
        except BaseException:
            _close(descriptor)
            raise
        return RegisteredFile(descriptor)

    def _register(self, descriptor: int) -> None:
        for _ in range(_LEFT_BEHIND):
            try:
                self._library.register_fd(descriptor)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            # The number, or the next one, which the library's duplicate would get, belongs to a file of a dead mount that
            # somebody closed. On a living one it can be deregistered.
            self._library.deregister_fd(descriptor)
            spare = os.dup(descriptor)
            self._library.deregister_fd(spare)
            _close(spare)
        self._library.register_fd(descriptor)

    def _close(self, descriptor: int) -> None:
        self._library.deregister_fd(descriptor)
        if _mount_lives(descriptor) or self._closed:  # if it lives it did before, so the file is deregistered
            _close(descriptor)
        else:
            with self._lock:
                self._orphans.append(descriptor)

    def _close_orphans(self, living: int) -> None:
        """Deregister files of a dead mount. 3FS looks whether a number is on a living mount, so they are made to be."""
        with self._lock:
            orphans, self._orphans = self._orphans, []
        for descriptor in orphans:
            if _mount_lives(living):
                os.dup2(living, descriptor, inheritable=False)
            self._close(descriptor)


def _is_deleted(descriptor: int) -> bool:
    try:
        return not os.fstat(descriptor).st_nlink
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ESTALE)


def _mount_lives(descriptor: int) -> bool:
    try:
        fcntl.ioctl(descriptor, _GET_MAGIC, bytes(4))
    except OSError as error:
        return error.errno == errno.ENOTTY
    return True


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # of a dead mount
        os.close(descriptor)
