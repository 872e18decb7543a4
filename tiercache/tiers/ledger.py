"""How many bytes a directory holds, counted across the processes that share it.

The count lies in a small mapped file and changes under a file lock, so a cap is the directory's and not each
process's. It is charged before a write and credited after a deletion: what a crash leaves is an over-count, which the next
process that has the directory to itself corrects when it has scanned.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_COUNT = struct.Struct("<8sQ")
_MAGIC = b"TIERLEDG"


class Ledger:
    """`trusted` says whether the file held a count when it was opened."""

    def __init__(self, path: Path, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()
        self._closed = False
        with self._file_lock():
            if os.fstat(self._descriptor).st_size < mmap.PAGESIZE:
                os.ftruncate(self._descriptor, mmap.PAGESIZE)
        self._page = mmap.mmap(self._descriptor, mmap.PAGESIZE)
        magic, _ = _COUNT.unpack_from(self._page)
        self.trusted = magic == _MAGIC
        if not self.trusted:
            self._store(0)

    @property
    def used_bytes(self) -> int:
        return int(_COUNT.unpack_from(self._page)[1]) if not self._closed else 0

    def charge(self, amount_bytes: int) -> bool:
        """Count `amount_bytes` if they fit under the cap; whether they did."""
        with self._locked():
            used = self.used_bytes
            if used + amount_bytes > self.cap_bytes:
                return False
            self._store(used + amount_bytes)
            return True

    def correct(self, difference_bytes: int) -> None:
        """Add a difference, positive or negative, cap or no cap: the bytes are there, or gone, already."""
        if difference_bytes:
            with self._locked():
                self._store(max(0, self.used_bytes + difference_bytes))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock that all processes take to change the count."""
        with self._locked():
            yield

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._page.close()
                os.close(self._descriptor)

    def _store(self, value: int) -> None:
        _COUNT.pack_into(self._page, 0, _MAGIC, value)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise OSError("the ledger is closed")
            with self._file_lock():
                yield

    @contextmanager
    def _file_lock(self) -> Iterator[None]:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
