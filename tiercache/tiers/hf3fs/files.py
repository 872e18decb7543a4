"""Descriptors that are registered with 3FS, opened and closed by its rules. Calls block; they are made in worker threads."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import OrderedDict
from typing import Any

from tiercache.tiers.files.access import occupied_bytes, open_regular

_OPEN_FILES = 128
_STALE_NUMBERS = 2 * _OPEN_FILES
"""Upper bound of the numbers that stay registered if the kept files are closed while their mount is dead."""


class RegisteredFile:
    """An open file that rings can read and write, with the number of its users."""

    __slots__ = ("descriptor", "users")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.users = 1


class RegisteredFiles:
    """Opens and registers files. The 128 most recently used files stay open for reading, since opening takes two
    metadata calls.

    A file is deregistered before it is closed; afterwards its number would still mean the old file. That is impossible
    while its mount is dead: such a number is deregistered when the next file gets it.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._kept: OrderedDict[str, RegisteredFile] = OrderedDict()
        self._forgotten = 0
        """Incremented when files are forgotten: a file being opened meanwhile may be among them, and is not kept."""
        self._keeps = True
        self._lock = threading.Lock()

    def kept(self, path: str) -> RegisteredFile | None:
        """Return the file, with another user, if it is open already. Non-blocking."""
        with self._lock:
            file = self._kept.get(path)
            if file is not None:
                self._kept.move_to_end(path)
                file.users += 1
            return file

    def open_to_read(self, path: str) -> RegisteredFile:
        """Open a file and keep it open, unless files are forgotten in the meantime: its path may then soon be another
        file's.

        Raises OSError.
        """
        with self._lock:
            forgotten = self._forgotten
        file = self._open(path, os.O_RDONLY)
        surplus = []
        with self._lock:
            if self._forgotten == forgotten and path not in self._kept and self._keeps:
                file.users += 1
                self._kept[path] = file
                while len(self._kept) > _OPEN_FILES:
                    surplus.append(self._kept.popitem(last=False)[1])
        for each in surplus:
            self.release(each)
        return file

    def create(self, path: str) -> RegisteredFile:
        """Create and register a file. Raises FileExistsError, OSError."""
        return self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def release(self, file: RegisteredFile) -> None:
        """Remove a user. The last user closes the file."""
        if self.drop(file):
            self.close_file(file.descriptor)

    def drop(self, file: RegisteredFile) -> bool:
        """Remove a user, and return True if it was the last, so that the file has to be closed. Non-blocking."""
        with self._lock:
            file.users -= 1
            return not file.users

    def forget(self, path: str) -> None:
        """Stop keeping a file that is deleted or was replaced. The next read opens it again."""
        with self._lock:
            file = self._kept.pop(path, None)
            self._forgotten += 1
        if file is not None:
            self.release(file)

    def forget_all(self) -> None:
        with self._lock:
            files, self._kept = list(self._kept.values()), OrderedDict()
            self._forgotten += 1
        for file in files:
            self.release(file)

    def close_deleted(self) -> int:
        """Stop keeping files that other processes have deleted, and return their number.

        An open file still occupies its space, which no cap counts.
        """
        closed = 0
        with self._lock:
            kept = list(self._kept.items())
            for _, file in kept:
                file.users += 1  # so that its number is not reused
        for path, file in kept:
            if _is_deleted(file.descriptor):
                with self._lock:
                    still_kept = self._kept.get(path) is file
                if still_kept:
                    self.forget(path)
                    closed += 1
            self.release(file)
        return closed

    def refresh(self, path: str) -> None:
        """Make `stat` return the true length of a file that rings of any process wrote. Raises OSError."""
        descriptor = open_regular(path, os.O_RDONLY)
        try:
            self._library.force_fsync(descriptor)
        finally:
            os.close(descriptor)

    def settle(self, file: RegisteredFile, *, durable: bool) -> int:
        """Bring the data that rings wrote and the length into the file. Return the bytes that it occupies."""
        if durable:
            os.fsync(file.descriptor)
        else:
            self._library.force_fsync(file.descriptor)
        return occupied_bytes(os.fstat(file.descriptor))

    def close(self) -> None:
        """Close all files except those in use, which their users close."""
        self._keeps = False
        self.forget_all()

    def _open(self, path: str, flags: int) -> RegisteredFile:
        descriptor = open_regular(path, flags)
        try:
            self._register(descriptor)
        except BaseException:
            _close(descriptor)
            raise
        return RegisteredFile(descriptor)

    def _register(self, descriptor: int) -> None:
        """Register a descriptor.

        Its number may still be registered for a file of a dead mount, and so may the next number, which the library's
        duplicate gets. Both can be deregistered now that they are on a living mount.
        """
        for _ in range(_STALE_NUMBERS):
            try:
                self._library.register_fd(descriptor)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            self._library.deregister_fd(descriptor)
            spare = os.dup(descriptor)
            self._library.deregister_fd(spare)
            _close(spare)
        self._library.register_fd(descriptor)

    def close_file(self, descriptor: int) -> None:
        """Deregister and close a file without users."""
        self._library.deregister_fd(descriptor)
        _close(descriptor)


def _is_deleted(descriptor: int) -> bool:
    try:
        return not os.fstat(descriptor).st_nlink
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ESTALE)


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # its mount may be dead
        os.close(descriptor)
