"""Which of the instances on a shared directory does what only one of them should. Synchronous; for worker threads."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import uuid
from pathlib import Path

from tiercache.tiers.files.access import OWNER, Access, open_regular, require_directory
from tiercache.tiers.files.allocation import NO_ROOM

_BEAT_BYTES = 16


class Election:
    """Whoever has `path` locked is elected; a process that dies is not any more, its locks being gone.

    One that hangs keeps its lock, so the elected one also writes something new into the file now and then. An instance that
    sees no `heartbeat` for long enough may `take_over`: it puts a file of its own in the place of the hung one's, which
    finds that out at its next `beat`. For a moment both may act; what is done under this lock must bear that.
    """

    def __init__(self, path: Path, access: Access = OWNER) -> None:
        self.path = path
        self._access = access
        self._descriptor: int | None = None
        self._lock = threading.Lock()

    def campaign(self) -> bool:
        """Be elected if nobody is. Never waits for another instance. Raises NotADirectoryError where a link, or something
        else, is in the place of the directory."""
        require_directory(self.path.parent)
        descriptor = open_regular(self.path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return False
            raise
        return self._begin(descriptor)

    def take_over(self) -> bool:
        """Be elected whoever was. False when somebody else was quicker."""
        unnamed = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}")
        descriptor = open_regular(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(unnamed, self.path)
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(unnamed)
            raise
        return self._begin(descriptor)

    def beat(self) -> bool:
        """Show that we live; whether we are still elected."""
        with self._lock:
            if self._descriptor is None:
                return False
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._descriptor), os.stat(self.path)):
                    self._write_beat(self._descriptor)
                    return True
        self.resign()
        return False

    @staticmethod
    def _write_beat(descriptor: int) -> None:
        """Of all times, eviction must not fail when the device is full: a first beat that finds no room is left out."""
        try:
            os.pwrite(descriptor, os.urandom(_BEAT_BYTES), 0)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise

    def heartbeat(self) -> bytes:
        """What the elected one wrote last. Opened anew each time: a network file system then asks its server."""
        try:
            descriptor = open_regular(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(descriptor, _BEAT_BYTES, 0)
        finally:
            os.close(descriptor)

    def resign(self) -> None:
        """Leave it to others. Idempotent."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _begin(self, descriptor: int) -> bool:
        with self._lock:
            self._descriptor = descriptor
        try:
            self._access.enforce(self.path)
            return self.beat()
        except BaseException:
            self.resign()  # or nobody would be elected: who failed asks anew, and finds the lock taken by himself
            raise
