"""Descriptors that are registered with 3FS, opened and closed by its rules. Calls block; they are made in worker threads."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Any

from tiercache.tiers.files.access import occupied_bytes, open_file

_STALE_NUMBERS = 256
"""Upper bound of the numbers that stay registered if files are closed while their mount is dead."""


class RegisteredFiles:
    """Opens files and registers them for rings. A registered file is its descriptor.

    A file is deregistered before it is closed; afterwards its number would still mean the old file. That is impossible
    while its mount is dead: such a number is deregistered when the next file gets it.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def open_to_read(self, path: str) -> int:
        """Open and register a file. Raises OSError."""
        return self._open(path, os.O_RDONLY)

    def create(self, path: str) -> int:
        """Create and register a file. Raises FileExistsError, OSError."""
        return self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def close(self, descriptor: int) -> None:
        """Deregister and close a file."""
        self._library.deregister_fd(descriptor)
        _close(descriptor)

    def refresh(self, path: str) -> None:
        """Make `stat` return the true length of a file that rings of any process wrote. Raises OSError."""
        descriptor = open_file(path, os.O_RDONLY)
        try:
            self._library.force_fsync(descriptor)
        finally:
            os.close(descriptor)

    def settle(self, descriptor: int, *, durable: bool) -> int:
        """Bring the data that rings wrote and the length into the file. Return the bytes that it occupies."""
        if durable:
            os.fsync(descriptor)
        else:
            self._library.force_fsync(descriptor)
        return occupied_bytes(os.fstat(descriptor))

    def _open(self, path: str, flags: int) -> int:
        descriptor = open_file(path, flags)
        try:
            self._register(descriptor)
        except BaseException:
            _close(descriptor)
            raise
        return descriptor

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


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # its mount may be dead
        os.close(descriptor)
