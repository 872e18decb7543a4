"""Descriptors registered with 3FS, opened and closed by its rules. Blocks; for worker threads."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import OrderedDict
from typing import Any

_OPEN_FILES = 128


class RegisteredFile:
    """An open file that rings know. `length_bytes` is that of the time when it was opened."""

    __slots__ = ("descriptor", "length_bytes", "users")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.length_bytes = os.fstat(descriptor).st_size
        self.users = 1


class RegisteredFiles:
    """Files for reading are kept open, the last used ones longest: opening one takes two calls of the metadata service.

    A file is deregistered before it is closed: afterwards its number would go on meaning the old file.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._kept: OrderedDict[str, RegisteredFile] = OrderedDict()
        self._lock = threading.Lock()

    def open_to_read(self, path: str) -> RegisteredFile:
        """Raises FileNotFoundError, OSError."""
        with self._lock:
            file = self._kept.get(path)
            if file is not None:
                self._kept.move_to_end(path)
                file.users += 1
                return file
        file = RegisteredFile(self._open(path, os.O_RDONLY))
        surplus = []
        with self._lock:
            if path not in self._kept:
                file.users += 1  # one is ours
                self._kept[path] = file
                while len(self._kept) > _OPEN_FILES:
                    surplus.append(self._kept.popitem(last=False)[1])
        for each in surplus:
            self.release(each)
        return file

    def create(self, path: str) -> RegisteredFile:
        """Raises FileExistsError, OSError."""
        return RegisteredFile(self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))

    def release(self, file: RegisteredFile) -> None:
        with self._lock:
            file.users -= 1
            last = not file.users
        if last:
            self._library.deregister_fd(file.descriptor)
            with contextlib.suppress(OSError):  # of a dead mount
                os.close(file.descriptor)

    def forget(self, path: str) -> None:
        """The file is going, or is not what it was: the next read opens it anew."""
        with self._lock:
            file = self._kept.pop(path, None)
        if file is not None:
            self.release(file)

    def close(self) -> None:
        with self._lock:
            files, self._kept = list(self._kept.values()), OrderedDict()
        for file in files:
            self.release(file)

    def _open(self, path: str, flags: int) -> int:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
        try:
            self._register(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _register(self, descriptor: int) -> None:
        try:
            self._library.register_fd(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # The number belonged to a file of a mount that died, where it could not be deregistered.
            self._library.deregister_fd(descriptor)
            self._library.register_fd(descriptor)
