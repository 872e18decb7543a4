"""What a process has open on simulated disks, and what it can do with it."""

from __future__ import annotations

import errno
import fcntl
import heapq
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.torture.simulation.inodes import BLOCK_BYTES, File, Inode, failure

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

    from tests.torture.simulation.disk import Disk

FIRST_DESCRIPTOR = 1_000_000


@dataclass(frozen=True)
class Torn:
    """An answer to `before` a call that writes: so many bytes are written, and then it fails with EIO."""

    bytes_written: int


class Opened:
    """An open file description. `path` is the one with which it was opened.

    What reads and writes takes `ordered`, an answer of `before`: None, the most bytes to move, or Torn.
    """

    __slots__ = (
        "_append", "_direct", "_readable", "_writable", "disk", "flags", "inode", "path", "position", "severed",
    )  # fmt: skip

    def __init__(self, disk: Disk, inode: Inode, path: str, flags: int) -> None:
        self.disk = disk
        self.inode = inode
        self.path = path
        self.flags = flags
        self.position = 0
        self.severed = False
        """Whether its mount has died."""
        access = flags & os.O_ACCMODE
        self._readable = access != os.O_WRONLY
        self._writable = access != os.O_RDONLY
        self._append = bool(flags & os.O_APPEND)
        self._direct = bool(flags & os.O_DIRECT)
        inode.descriptors += 1
        disk.open_descriptors += 1

    def close(self) -> None:
        self.inode.locks.pop(self, None)
        self.inode.descriptors -= 1
        self.disk.open_descriptors -= 1
        self.disk.release(self.inode)

    def read(self, length: int, offset: int, ordered: object) -> bytes:
        file = self._to_read(offset)
        if self._direct:
            self._require_aligned(offset | length)
        return file.read(offset, _allowed(length, ordered))

    def read_into(self, buffers: Iterable[WriteableBuffer], offset: int, ordered: object) -> int:
        file = self._to_read(offset)
        views, length = self._views(buffers, offset)
        left = length if ordered is None else _allowed(length, ordered)
        done = 0
        for view in views:
            if view.nbytes > left - done:
                view = view[: left - done]
            done += file.read_into(view, offset + done)
        return done

    def write(self, buffers: Iterable[ReadableBuffer], offset: int | None, ordered: object) -> int:
        """At the position where `offset` is None, which moves it."""
        file = self.inode
        if not self._writable or not isinstance(file, File):
            raise failure(errno.EBADF)
        at = self.position if offset is None else offset
        if at < 0:
            raise failure(errno.EINVAL)
        if self._append:
            at = file.size
        views, length = self._views(buffers, at)
        written = file.write(views, at, length if ordered is None else _allowed(length, ordered))
        if isinstance(ordered, Torn):
            raise failure(errno.EIO)
        if offset is None:
            self.position = at + written
        return written

    def truncate(self, length: int) -> None:
        if length < 0 or not self._writable or not isinstance(self.inode, File):
            raise failure(errno.EINVAL)
        self.inode.truncate(length)

    def reserve(self, mode: int, offset: int, length: int) -> None:
        if offset < 0 or length <= 0:
            raise failure(errno.EINVAL)
        if mode:
            raise failure(errno.EOPNOTSUPP)
        if not self._writable or not isinstance(self.inode, File):
            raise failure(errno.EBADF)
        self.inode.reserve(offset, length)

    def lock(self, wanted: int) -> bool:
        """LOCK_SH or LOCK_EX; whether it was to be had. What was held of the other kind is lost if not, as in flock(2)."""
        holders = self.inode.locks
        if holders.get(self) == wanted:
            return True
        holders.pop(self, None)
        if fcntl.LOCK_EX in holders.values() or (wanted == fcntl.LOCK_EX and holders):
            return False
        holders[self] = wanted
        return True

    def unlock(self) -> None:
        self.inode.locks.pop(self, None)

    def _to_read(self, offset: int) -> File:
        if offset < 0:
            raise failure(errno.EINVAL)
        if not self._readable:
            raise failure(errno.EBADF)
        if not isinstance(self.inode, File):
            raise failure(errno.EISDIR)
        return self.inode

    def _views(self, buffers: Iterable[ReadableBuffer], offset: int) -> tuple[list[memoryview], int]:
        """The bytes of the buffers, and how many there are. Where they lie in memory, O_DIRECT ought to ask as well."""
        views, length, together = [], 0, offset
        for buffer in buffers:
            view = memoryview(buffer)
            if view.format != "B" or view.ndim != 1:
                view = view.cast("B")
            views.append(view)
            length += view.nbytes
            together |= view.nbytes
        if self._direct:
            self._require_aligned(together)
        return views, length

    def _require_aligned(self, together: int) -> None:
        """Offset and lengths, all their bits in one number."""
        if together & (BLOCK_BYTES - 1):
            raise failure(errno.EINVAL)


class Descriptors:
    """Of one process. The lowest free number is given next, as Linux does: a number that is used too late finds another
    file."""

    def __init__(self) -> None:
        self.opened: dict[int, Opened] = {}
        self._free: list[int] = []
        self._next = FIRST_DESCRIPTOR

    def add(self, opened: Opened) -> int:
        if self._free:
            number = heapq.heappop(self._free)
        else:
            number = self._next
            self._next += 1
        self.opened[number] = opened
        return number

    def close(self, number: int) -> None:
        self.opened.pop(number).close()
        heapq.heappush(self._free, number)

    def close_all(self) -> None:
        while self.opened:
            self.opened.popitem()[1].close()


def _allowed(length: int, ordered: object) -> int:
    if isinstance(ordered, Torn):
        return min(length, ordered.bytes_written)
    if isinstance(ordered, int):
        return min(length, ordered)
    return length
