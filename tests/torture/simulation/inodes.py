"""What lies on a simulated disk: files, directories and symbolic links, by whatever names."""

from __future__ import annotations

import errno
import functools
import os
import random
import stat
from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.torture.simulation.descriptors import Opened
    from tests.torture.simulation.disk import Disk

BLOCK_BYTES = 4096
SECTOR_BYTES = 512
"""What a device writes whole or not at all. A block that was being written has both contents, cut at a multiple of this."""


def failure(code: int, *paths: str) -> OSError:
    """The OSError that `os` raises for `code`: FileNotFoundError for ENOENT, and so on."""
    if len(paths) == 2:
        return OSError(code, _meaning(code), paths[0], None, paths[1])
    return OSError(code, _meaning(code), *paths)


_meaning = functools.cache(os.strerror)


class Inode:
    """What all kinds have. `links` is st_nlink; with no link and no descriptor left, an inode gives its blocks back."""

    __slots__ = (
        "atime_ns", "born", "ctime_ns", "descriptors", "disk", "gid", "links", "locks", "logged", "mode", "mtime_ns",
        "number", "shown", "uid",
    )  # fmt: skip

    def __init__(self, disk: Disk, mode: int) -> None:
        self.disk = disk
        self.number = disk.new_number()
        self.mode = mode
        self.links = 0
        self.uid = os.geteuid()
        self.gid = os.getegid()
        self.atime_ns = self.mtime_ns = self.ctime_ns = disk.now_ns()
        self.descriptors = 0
        self.locks: dict[Opened, int] = {}
        """LOCK_SH or LOCK_EX, by who holds it."""
        self.born = self.logged = -1
        """Where the journal has its first name, and its last change of a name."""
        self.shown: os.stat_result | None = None
        """The last answer to stat, until something in it changes."""

    @property
    @abstractmethod
    def size(self) -> int: ...

    @property
    @abstractmethod
    def block_count(self) -> int: ...

    def status(self) -> os.stat_result:
        if self.shown is None:
            atime_ns, mtime_ns, ctime_ns = self.atime_ns, self.mtime_ns, self.ctime_ns
            self.shown = os.stat_result(
                (
                    self.mode, self.number, self.disk.device, self.links, self.uid, self.gid, self.size,
                    atime_ns // 1_000_000_000, mtime_ns // 1_000_000_000, ctime_ns // 1_000_000_000,
                    atime_ns / 1e9, mtime_ns / 1e9, ctime_ns / 1e9, atime_ns, mtime_ns, ctime_ns,
                    BLOCK_BYTES, self.block_count * BLOCK_BYTES // 512, 0,
                )
            )  # fmt: skip
        return self.shown

    def changed(self) -> None:
        """Something about it, but not what is in it."""
        self.ctime_ns = self.disk.now_ns()
        self.shown = None
        self.disk.changes += 1

    def modified(self) -> None:
        """What is in it."""
        disk = self.disk
        self.mtime_ns = self.ctime_ns = int(disk.now() * 1e9)
        self.shown = None
        disk.changes += 1


class Directory(Inode):
    __slots__ = ("names", "parent")

    def __init__(self, disk: Disk, mode: int, parent: Directory | None) -> None:
        super().__init__(disk, stat.S_IFDIR | mode)
        self.parent = parent or self
        self.names: dict[str, Inode] = {}

    @property
    def size(self) -> int:
        return BLOCK_BYTES

    @property
    def block_count(self) -> int:
        return 1


class Link(Inode):
    __slots__ = ("target",)

    def __init__(self, disk: Disk, target: str) -> None:
        super().__init__(disk, stat.S_IFLNK | 0o777)
        self.target = target

    @property
    def size(self) -> int:
        return len(os.fsencode(self.target))

    @property
    def block_count(self) -> int:
        return 0


class Image(NamedTuple):
    """A file as the device has it for certain: as it was when it was last synced."""

    data: bytes
    size: int
    blocks: int
    rewritable: int
    """Those of its blocks that have been the file's ever since, so that a write to them lands where the old content is."""


class File(Inode):
    """`data` reaches to the last byte that was written, `_size` to the end of the file; in between are zeroes.

    `blocks` has a bit for each block that is allocated.
    """

    __slots__ = ("_size", "blocks", "data", "synced")

    def __init__(self, disk: Disk, mode: int) -> None:
        super().__init__(disk, stat.S_IFREG | mode)
        self.data = bytearray()
        self.blocks = 0
        self.synced: Image | None = None
        """None while the device has all of it, and where nobody will ask."""
        self._size = 0

    @property
    def size(self) -> int:
        return self._size

    @property
    def block_count(self) -> int:
        return self.blocks.bit_count()

    def read(self, offset: int, length: int) -> bytes:
        end = min(offset + length, self._size)
        found = bytes(memoryview(self.data)[offset:end])
        return found if len(found) >= end - offset else found.ljust(end - offset, b"\0")

    def whole(self) -> bytearray:
        """All bytes. Who keeps a view of them sees what is written there later; the file does not grow meanwhile."""
        self.data.extend(bytes(self._size - len(self.data)))
        return self.data

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fills as much of `view` as there is."""
        end = offset + view.nbytes
        if end <= len(self.data):
            view[:] = memoryview(self.data)[offset:end]
            return view.nbytes
        found = self.read(offset, view.nbytes)
        view[: len(found)] = found
        return len(found)

    def write(self, views: list[memoryview], offset: int, length: int) -> int:
        """The first `length` bytes of `views`. Returns how many found room; raises OSError (ENOSPC) when none did."""
        if not length:
            return 0
        self.before_change()
        written = self._allocate(offset, length)
        if not written:
            raise failure(errno.ENOSPC)
        end = offset + written
        at = offset
        for view in views:
            part = view if view.nbytes <= end - at else view[: end - at]
            self._put(part, at)
            at += part.nbytes
        if end > self._size:
            self._size = end
        self.modified()
        return written

    def reserve(self, offset: int, length: int) -> None:
        """fallocate(2): all of it, or OSError (ENOSPC)."""
        self.before_change()
        if self.disk.free_blocks < (self._span(offset, length) & ~self.blocks).bit_count():
            raise failure(errno.ENOSPC)
        self._allocate(offset, length)
        self._size = max(self._size, offset + length)
        self.modified()

    def truncate(self, size: int) -> None:
        self.before_change()
        if size < self._size:
            del self.data[size:]
            left = self._span(0, size) if size else 0
            self.disk.used_blocks -= (self.blocks & ~left).bit_count()
            self.blocks &= left
            if self.synced is not None:
                self.synced = self.synced._replace(rewritable=self.synced.rewritable & left)
        self._size = size
        self.modified()

    def before_change(self) -> None:
        if self.synced is None and self.disk.can_lose_power:
            self.synced = Image(bytes(self.data), self._size, self.blocks, self.blocks)

    def lose_power(self, chance: random.Random) -> None:
        """As `Disk.cut_power` says."""
        before, self.synced = self.synced, None
        if before is None:
            return
        size = chance.choice((before.size, self._size))
        data, blocks = bytearray(), 0
        for number in range((size + BLOCK_BYTES - 1) // BLOCK_BYTES):
            start, bit = number * BLOCK_BYTES, 1 << number
            if not (before.blocks | self.blocks) & bit:
                data += bytes(BLOCK_BYTES)
                continue
            old = before.data[start : start + BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0")
            new = bytes(self.data[start : start + BLOCK_BYTES]).ljust(BLOCK_BYTES, b"\0")
            cut = SECTOR_BYTES * chance.randrange(1, BLOCK_BYTES // SECTOR_BYTES)
            outcomes = [new, old, new[:cut] + old[cut:]]
            if not before.rewritable & bit:
                outcomes += [bytes(BLOCK_BYTES), new[:cut].ljust(BLOCK_BYTES, b"\0")]
            data += chance.choice(outcomes)
            blocks |= bit
        self.data, self._size, self.blocks = data[:size], size, blocks
        self.shown = None

    def _span(self, offset: int, length: int) -> int:
        first = offset // BLOCK_BYTES
        last = (offset + length - 1) // BLOCK_BYTES
        return ((2 << (last - first)) - 1) << first

    def _allocate(self, offset: int, length: int) -> int:
        """So much of `length` as there is room for."""
        wanted = self._span(offset, length) & ~self.blocks
        if wanted:
            disk = self.disk
            if wanted.bit_count() > disk.free_blocks:
                wanted, length = self._what_fits(wanted, offset, length)
            self.blocks |= wanted
            disk.used_blocks += wanted.bit_count()
        return length

    def _what_fits(self, wanted: int, offset: int, length: int) -> tuple[int, int]:
        rest, fits = wanted, 0
        for _ in range(self.disk.free_blocks):
            lowest = rest & -rest
            fits |= lowest
            rest ^= lowest
        first_missing = (rest & -rest).bit_length() - 1
        return fits, max(0, min(length, first_missing * BLOCK_BYTES - offset))

    def _put(self, view: memoryview, offset: int) -> None:
        data = self.data
        if offset > len(data):
            data.extend(bytes(offset - len(data)))
        inside = min(view.nbytes, len(data) - offset)
        if not inside:
            data += view
            return
        with memoryview(data) as room:
            room[offset : offset + inside] = view[:inside]
        if inside < view.nbytes:
            data += view[inside:]
