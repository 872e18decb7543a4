"""How many bytes a directory holds, counted across the processes that share it.

The count lies in a small file and changes under a file lock, so a cap is the directory's and not each process's. It is
charged before a write and credited after a deletion: what a crash leaves is an over-count, which the next process that has
the directory to itself corrects when it has scanned.

The file is read and written, not mapped: the pages of a mapping on a network file system may be older than the lock. What
`used_bytes` says is what we last saw there.

Where many instances share a mount, one locked change a chunk would be what they all wait for. With an *allowance* an
instance charges the file in large steps and spends them alone; what it does not spend, it gives back. How much of it is
certainly unspent stands in a file of its own (the *pledge*), so that whoever finds the instance dead gives that back: where
hosts come and go, nobody may ever have the directory to itself.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_COUNT = struct.Struct("<8sQ")
_MAGIC = b"TIERLEDG"
_PLEDGE_MAGIC = b"TIERPLDG"
_PLEDGE_STEPS = 16
"""A pledge is renewed, and synced, each time that so small a part of an allowance was spent."""
_SMALLEST_SHARE = 8
"""A step takes at most one part in so many of the room that is left: instances that do not write must not hold it all."""


class Ledger:
    """Thread-safe. `trusted` says whether the file held a count when it was opened."""

    def __init__(self, path: Path, cap_bytes: int, allowance_bytes: int = 0, pledge: int = -1) -> None:
        """`pledge` is the descriptor of a file that nobody else writes; needed with an allowance, and not closed here."""
        self.cap_bytes = cap_bytes
        self.allowance_bytes = allowance_bytes
        """How much of the count may be charged and not used, at most; 0: every change goes to the file."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()
        self._closed = False
        self._counted_bytes = 0
        self._spare_bytes = 0
        self._spent = False
        self._pledge = pledge
        self._pledged_bytes = 0
        try:
            with self._file_lock():
                counted_bytes = self._load()
                self.trusted = counted_bytes is not None
                self._store(counted_bytes or 0)
        except BaseException:
            with suppress(OSError):
                os.close(self._descriptor)
            raise

    @property
    def counted_bytes(self) -> int:
        """What the file said when we last looked, our own unspent allowance and that of others included."""
        return self._counted_bytes

    @property
    def used_bytes(self) -> int:
        """As `counted_bytes`, without our own unspent allowance. From memory, at once."""
        return max(0, self._counted_bytes - self._spare_bytes)

    def charge(self, amount_bytes: int) -> bool:
        """Count `amount_bytes` if they fit under the cap; whether they did."""
        with self._open_lock():
            missing_bytes = amount_bytes - self._spare_bytes
            if missing_bytes > 0:
                with self._file_lock():
                    counted_bytes = self._current()
                    room_bytes = self.cap_bytes - counted_bytes
                    if missing_bytes > room_bytes:
                        self._counted_bytes = counted_bytes
                        return False
                    step_bytes = max(missing_bytes, min(self.allowance_bytes, room_bytes // _SMALLEST_SHARE))
                    self._store(counted_bytes + step_bytes)
                    self._spare_bytes += step_bytes
            self._set_spare(self._spare_bytes - amount_bytes)
            self._spent = True
            return True

    def correct(self, difference_bytes: int) -> None:
        """Add a difference, positive or negative, cap or no cap: the bytes are there, or gone, already."""
        if not difference_bytes:
            return
        with self._open_lock():
            spare_bytes = self._spare_bytes - difference_bytes
            if not 0 <= spare_bytes <= self.allowance_bytes:
                kept_bytes = self.allowance_bytes if spare_bytes > 0 else 0
                self._set_spare(min(self._spare_bytes, kept_bytes))
                self._add(kept_bytes - spare_bytes)
                spare_bytes = kept_bytes
            self._set_spare(spare_bytes)

    def release(self, amount_bytes: int) -> None:
        """Credit `amount_bytes` to everybody at once: they were freed to make room."""
        with self._open_lock():
            self._add(-amount_bytes)

    def refresh(self) -> bool:
        """See what others did, and give back an allowance that was not touched since the last time.

        False when somebody changes the count at this moment: nothing here waits for the file's lock.
        """
        with self._open_lock():
            idle_bytes = 0 if self._spent else self._spare_bytes
            self._spent = False
            try:
                fcntl.flock(self._descriptor, (fcntl.LOCK_EX if idle_bytes else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            try:
                self._counted_bytes = self._current()
                if idle_bytes:
                    self._set_spare(0)
                    self._store(max(0, self._counted_bytes - idle_bytes))
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            return True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock that all processes take to change the count."""
        with self._open_lock(), self._file_lock():
            yield

    def close(self) -> None:
        """Give back what is not spent. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                if spare_bytes := self._spare_bytes:
                    self._set_spare(0)
                    self._add(-spare_bytes)
            finally:
                os.close(self._descriptor)

    def _set_spare(self, spare_bytes: int) -> None:
        """Before any of it is spent or given back: the pledge on stable storage never exceeds what is really unspent."""
        step_bytes = max(1, self.allowance_bytes // _PLEDGE_STEPS)
        if spare_bytes < self._pledged_bytes or spare_bytes >= self._pledged_bytes + 2 * step_bytes:
            pledged_bytes = max(0, spare_bytes - step_bytes)
            if pledged_bytes != self._pledged_bytes:
                os.pwrite(self._pledge, _COUNT.pack(_PLEDGE_MAGIC, pledged_bytes), 0)
                os.fdatasync(self._pledge)
                self._pledged_bytes = pledged_bytes
        self._spare_bytes = spare_bytes

    def _add(self, difference_bytes: int) -> None:
        with self._file_lock():
            self._store(max(0, self._current() + difference_bytes))

    def _current(self) -> int:
        counted_bytes = self._load()
        return self._counted_bytes if counted_bytes is None else counted_bytes

    def _load(self) -> int | None:
        raw = os.pread(self._descriptor, _COUNT.size, 0)
        if len(raw) < _COUNT.size:
            return None
        magic, counted_bytes = _COUNT.unpack(raw)
        return int(counted_bytes) if magic == _MAGIC else None

    def _store(self, counted_bytes: int) -> None:
        os.pwrite(self._descriptor, _COUNT.pack(_MAGIC, counted_bytes), 0)
        self._counted_bytes = counted_bytes

    @contextmanager
    def _open_lock(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise OSError("the ledger is closed")
            yield

    @contextmanager
    def _file_lock(self) -> Iterator[None]:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def pledged_bytes(descriptor: int) -> int:
    """What stands in a dead instance's pledge."""
    raw = os.pread(descriptor, _COUNT.size, 0)
    magic, amount_bytes = _COUNT.unpack(raw) if len(raw) == _COUNT.size else (b"", 0)
    return int(amount_bytes) if magic == _PLEDGE_MAGIC else 0


def counted_in(path: Path) -> int:
    """What a ledger says that nobody here has open; 0 where there is none."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return 0
    magic, counted_bytes = _COUNT.unpack_from(raw) if len(raw) >= _COUNT.size else (b"", 0)
    return int(counted_bytes) if magic == _MAGIC else 0
