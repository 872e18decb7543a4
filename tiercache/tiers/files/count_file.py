"""The file in which the bytes of a directory are counted, and its lock. Synchronous; for worker threads.

It is read and written, not mapped: the pages of a mapping on a network file system may be older than the lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tiercache.tiers.files.access import ABSENT, Access, open_regular
from tiercache.tiers.files.locking import lock_within

_FILE = struct.Struct("<8sQQQ")
_OLD_FILE = struct.Struct("<8sQ")
_MAGIC = b"TIERLEDG"
_UNCOUNTED_MAGIC = b"TIERLED?"
"""What was there when the file was made has not been counted yet."""


class LedgerLost(FileNotFoundError):
    """The ledger's file is not the one at its path any more: somebody deleted it or put another in its place. Or we closed
    it: another volume is in use by now, if any."""


class Count(NamedTuple):
    """What stands in the file."""

    counted_bytes: int = 0
    charged_bytes: int = 0
    """Everything that was ever added. Never falls."""
    credited_bytes: int = 0
    """Everything that was ever taken off. Never falls."""
    trusted: bool = False
    """False until what lay there when the file was made has been counted."""

    def changed(self, charged_bytes: int = 0, credited_bytes: int = 0) -> Count:
        counted_bytes = max(0, self.counted_bytes + charged_bytes - credited_bytes)
        return Count(
            counted_bytes, self.charged_bytes + charged_bytes, self.credited_bytes + credited_bytes, self.trusted
        )


class CountFile:
    """Made where it is not there. Whatever fails raises OSError, LedgerLost where another file is at the path by now."""

    def __init__(self, path: Path, access: Access, wait_s: float) -> None:
        """`wait_s`: as for `locked`."""
        self.path = path
        self.descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            access.enforce(path)
            with self.locked(wait_s):
                found = self.load()
                if found is None:
                    self.store(Count())
        except BaseException:
            self.close()
            raise
        self.found = found or Count()
        """What stood there then."""

    def close(self) -> None:
        with suppress(OSError):  # of a mount that is dead
            os.close(self.descriptor)

    def is_lost(self) -> bool:
        """Whether somebody else's file, or none, is at our path. Asks the file system; raises OSError when it fails."""
        try:
            there = os.stat(self.path)
        except ABSENT:
            return True
        return not os.path.samestat(os.fstat(self.descriptor), there)

    @contextmanager
    def locked(self, wait_s: float) -> Iterator[None]:
        """Hold the lock that all processes take to change the count. Raises TierUnavailable after `wait_s`."""
        lock_within(self.descriptor, wait_s, self.path)
        try:
            if self.is_lost():
                message = "the ledger is not there any more, or another one is"
                raise LedgerLost(errno.ENOENT, message, str(self.path))
            yield
        finally:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    @contextmanager
    def locked_now(self, *, exclusive: bool) -> Iterator[None]:
        """As `locked`, at once or BlockingIOError, and of whatever file it is."""
        fcntl.flock(self.descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        try:
            yield
        finally:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def load(self) -> Count | None:
        """None where there is no count in it."""
        raw = os.pread(self.descriptor, _FILE.size, 0)
        if len(raw) == _FILE.size:
            magic, counted_bytes, charged_bytes, credited_bytes = _FILE.unpack(raw)
            if magic in (_MAGIC, _UNCOUNTED_MAGIC):
                return Count(counted_bytes, charged_bytes, credited_bytes, magic == _MAGIC)
        elif len(raw) >= _OLD_FILE.size:
            magic, counted_bytes = _OLD_FILE.unpack_from(raw)
            if magic == _MAGIC:
                return Count(counted_bytes, trusted=True)
        return None

    def store(self, count: Count) -> None:
        magic = _MAGIC if count.trusted else _UNCOUNTED_MAGIC
        packed = _FILE.pack(magic, count.counted_bytes, count.charged_bytes, count.credited_bytes)
        os.pwrite(self.descriptor, packed, 0)


def counted_in(path: Path) -> int | None:
    """What a ledger says that nobody here has open; None where there is no count."""
    try:
        descriptor = open_regular(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        raw = os.pread(descriptor, _FILE.size, 0)
    finally:
        os.close(descriptor)
    magic, counted_bytes = _OLD_FILE.unpack_from(raw) if len(raw) >= _OLD_FILE.size else (b"", 0)
    return int(counted_bytes) if magic == _MAGIC else None
