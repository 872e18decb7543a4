"""The calls with a descriptor that tiercache makes of the operating system, and what each process has open."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING

from tests.torture.simulation.descriptors import Descriptors, Opened
from tests.torture.simulation.disk import Disk
from tests.torture.simulation.inodes import failure

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

Before = Callable[[str, Disk, object], object]


class DescriptorCalls:
    """What `FileCalls` answers to who has a file open."""

    def __init__(self, before: Before) -> None:
        self.before = before
        self._descriptors: dict[Hashable, Descriptors] = {}
        self.process = None

    @property
    def process(self) -> Hashable:
        return self._process

    @process.setter
    def process(self, process: Hashable) -> None:
        self._process = process
        self._table = self._descriptors.setdefault(process, Descriptors())
        self._opened = self._table.opened

    def die(self, process: Hashable) -> None:
        """Close all that a process has open, which gives its locks and its nameless files away. Nothing else happens."""
        table = self._descriptors.pop(process, None)
        if table is not None:
            table.close_all()
        if process == self._process:
            self.process = process

    def descriptors_of(self, process: Hashable) -> dict[int, str]:
        """What it has open: paths by descriptor."""
        table = self._descriptors.get(process)
        return {} if table is None else {number: opened.path for number, opened in table.opened.items()}

    def opened(self, fd: int) -> Opened:
        """What the descriptor is of. Raises OSError (EBADF)."""
        found = self._opened.get(fd)
        if found is None:
            raise failure(errno.EBADF)
        return found

    def sever(self, disk: Disk) -> None:
        """The mount of `disk` dies. All that is open on it answers ENOTCONN for good, and has no lock any more."""
        for table in self._descriptors.values():
            for opened in table.opened.values():
                if opened.disk is disk:
                    opened.unlock()
                    opened.severed = True

    def close(self, fd: int) -> None:
        self._use("close", fd)
        self._table.close(fd)

    def dup(self, fd: int, /) -> int:
        """As if the file had been opened once more: locks and the position are the copy's own."""
        opened, _ = self._use("dup", fd)
        return self._table.add(Opened(opened.disk, opened.inode, opened.path, opened.flags))

    def opened_to_map(self, fd: int) -> Opened:
        """Another one of its file, for mmap(2): it outlives the descriptor."""
        opened, _ = self._use("mmap", fd)
        return Opened(opened.disk, opened.inode, opened.path, os.O_RDONLY)

    def ioctl(self, fd: int, *arguments: object) -> bytes:
        """One that its file system answers, with zeroes."""
        self._use("ioctl", fd)
        return bytes(4)

    def write(self, fd: int, data: ReadableBuffer, /) -> int:
        opened, ordered = self._use("write", fd)
        return opened.write((data,), None, ordered)

    def pread(self, fd: int, length: int, offset: int, /) -> bytes:
        opened, ordered = self._use("pread", fd)
        return opened.read(length, offset, ordered)

    def pwrite(self, fd: int, data: ReadableBuffer, offset: int, /) -> int:
        opened, ordered = self._use("pwrite", fd)
        return opened.write((data,), offset, ordered)

    def preadv(self, fd: int, buffers: Iterable[WriteableBuffer], offset: int, flags: int = 0, /) -> int:
        opened, ordered = self._use("preadv", fd)
        return opened.read_into(buffers, offset, ordered)

    def pwritev(self, fd: int, buffers: Iterable[ReadableBuffer], offset: int, flags: int = 0, /) -> int:
        opened, ordered = self._use("pwritev", fd)
        return opened.write(buffers, offset, ordered)

    def fdatasync(self, fd: int) -> None:
        opened, _ = self._use("fdatasync", fd)
        opened.disk.sync(opened.inode, only_data=True)

    def fsync(self, fd: int) -> None:
        opened, _ = self._use("fsync", fd)
        opened.disk.sync(opened.inode, only_data=False)

    def ftruncate(self, fd: int, length: int, /) -> None:
        opened, _ = self._use("ftruncate", fd)
        opened.truncate(length)

    def fallocate(self, fd: int, mode: int, offset: int, length: int) -> None:
        """As in C, with `mode` 0. Raises OSError, and knows no other mode (EOPNOTSUPP)."""
        opened, _ = self._use("fallocate", fd)
        opened.reserve(mode, offset, length)

    def posix_fadvise(self, fd: int, offset: int, length: int, advice: int, /) -> None:
        self._use("posix_fadvise", fd)

    def flock(self, fd: int, operation: int, /) -> None:
        """flock(2). With LOCK_NB, raises BlockingIOError if another descriptor has the lock; without, calls `before` with
        "flock-wait" until the lock is free, which has to let others run, or raise."""
        opened, _ = self._use("flock", fd)
        wanted = operation & ~fcntl.LOCK_NB
        if wanted == fcntl.LOCK_UN:
            opened.unlock()
            return
        if wanted not in (fcntl.LOCK_SH, fcntl.LOCK_EX):
            raise failure(errno.EINVAL)
        while not opened.lock(wanted):
            if operation & fcntl.LOCK_NB:
                raise failure(errno.EWOULDBLOCK)
            opened, _ = self._use("flock-wait", fd)

    def fstat(self, fd: int) -> os.stat_result:
        opened, _ = self._use("fstat", fd)
        return opened.inode.status()

    def _use(self, call: str, fd: int, *below: str) -> tuple[Opened, object]:
        """The beginning of a call with a descriptor, or with a path that begins at it. Who runs meanwhile may close it."""
        opened = self._opened.get(fd)
        if opened is None:
            raise failure(errno.EBADF, *below)
        ordered = self.before(call, opened.disk, "/".join((opened.path, *below)) if below else opened.path)
        opened = self._opened.get(fd)
        if opened is None:
            raise failure(errno.EBADF, *below)
        if opened.severed and call != "close":
            raise failure(errno.ENOTCONN, *below)
        return opened, ordered
