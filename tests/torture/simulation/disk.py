"""A simulated disk: its names, its room, and what becomes of both when the power is cut."""

from __future__ import annotations

import errno
import random
import zlib
from collections.abc import Callable, Iterator

from tests.torture.simulation.inodes import BLOCK_BYTES, Directory, File, Inode, Link, failure
from tests.torture.simulation.journal import Journal, Naming

_MOST_LINKS = 40
"""That the kernel follows in one path."""


class Disk:
    """A file system in memory, mounted at `root`: an absolute path that does not exist for real.

    Everything is as for the superuser, on a mount with noatime. Names are listed in the order in which they were made.
    It takes O_DIRECT. A directory takes one block, and a file one for each that was written or reserved.
    `now` tells the time in seconds. Nothing here calls `before`: these are the effects of system calls, not the calls.

    Set `can_lose_power` before anything is written if there is to be a `cut_power`: it costs a copy of what was synced.
    """

    def __init__(
        self,
        root: str,
        capacity_bytes: int,
        now: Callable[[], float] = lambda: 0.0,
        *,
        can_lose_power: bool = False,
    ) -> None:
        self.root = root.rstrip("/")
        self.now = now
        self.block_count = capacity_bytes // BLOCK_BYTES
        self.can_lose_power = can_lose_power
        self.device = 1 << 24 | zlib.crc32(self.root.encode()) & 0xFFFFFF
        self.used_blocks = 0
        self.foreign_blocks = 0
        """Blocks of another program's invisible files; see `occupy`."""
        self.open_descriptors = 0
        self.below = self.root + "/"
        """What the paths of all that lies on it begin with."""
        self.changes = 0
        """Of whatever lies on it: what was seen at a count still holds at the same."""
        self._last_number = 1
        self._journal = Journal()
        self.top = Directory(self, 0o755, None)
        self.top.links = 2
        self.used_blocks = 1
        self._found: dict[str, Directory] = {}
        """Directories by the paths with which they were found, as long as none was moved or removed."""

    def owns(self, path: str) -> bool:
        return path.startswith(self.below) or path == self.root

    @property
    def free_blocks(self) -> int:
        return max(0, self.block_count - self.used_blocks - self.foreign_blocks)

    def occupy(self, length_bytes: int) -> None:
        """Let files of another program take this much space from now on, or all that is free."""
        self.foreign_blocks = 0
        self.foreign_blocks = min(length_bytes // BLOCK_BYTES, self.free_blocks)

    def remove_all(self, path: str) -> None:
        """rm -rf of what is in that directory, if it is there."""
        try:
            directory = self.find_directory(path)
        except OSError:
            return
        for name, inode in list(directory.names.items()):
            if isinstance(inode, Directory):
                self.remove_all(f"{path}/{name}")
            self.remove(directory, name, inode)

    def now_ns(self) -> int:
        return int(self.now() * 1e9)

    def new_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def find(self, path: str, *, follow: bool = True, at: Directory | None = None) -> Inode:
        """What has the path, which begins at `root`, or at the directory `at`. Raises OSError."""
        inode = self.place(path, follow=follow, at=at)[2]
        if inode is None:
            raise failure(errno.ENOENT, path)
        return inode

    def find_directory(self, path: str, at: Directory | None = None) -> Directory:
        found = self.find(path, at=at)
        if not isinstance(found, Directory):
            raise failure(errno.ENOTDIR, path)
        return found

    def place(
        self, path: str, *, follow: bool = False, at: Directory | None = None
    ) -> tuple[Directory, str, Inode | None]:
        """The directory in which the path has its last name, that name, and what has it. The name is empty where it is
        none that can be given or taken away: the root, `.` and `..`. Raises OSError."""
        if at is None:
            above, _, name = path.rpartition("/")
            directory = self._found.get(above) or self._found_anew(above)
            if directory is not None:
                inode = directory.names.get(name)
                if inode is None:
                    if name not in ("", ".", ".."):
                        return directory, name, None
                elif not follow or type(inode) is not Link:
                    return directory, name, inode
        return self._walk(path, follow, at)

    def create(self, directory: Directory, name: str, mode: int) -> File:
        file = File(self, mode)
        self._name(directory, name, file)
        return file

    def make_directory(self, directory: Directory, name: str, mode: int) -> None:
        made = Directory(self, mode, directory)
        made.links = 1
        self.used_blocks += 1
        directory.links += 1
        self._name(directory, name, made)

    def make_link(self, directory: Directory, name: str, target: str) -> None:
        self._name(directory, name, Link(self, target))

    def add_name(self, directory: Directory, name: str, inode: Inode) -> None:
        inode.changed()
        self._name(directory, name, inode)

    def remove(self, directory: Directory, name: str, inode: Inode) -> None:
        """unlink(2) and rmdir(2) of what may be removed."""
        if self.can_lose_power:
            self._journal.note(self.now_ns(), (Naming(directory, name, inode),), directory, inode)
        del directory.names[name]
        directory.modified()
        self._drop(directory, inode)

    def rename(
        self, old: tuple[Directory, str, Inode], new: tuple[Directory, str, Inode | None], *, spare: bool = False
    ) -> None:
        """renameat2(2); `spare`: with RENAME_NOREPLACE. Raises OSError without the paths."""
        directory, name, inode = old
        to_directory, to_name, replaced = new
        if replaced is not None and spare:
            raise failure(errno.EEXIST)
        if isinstance(inode, Directory) and _is_below(to_directory, inode):
            raise failure(errno.EINVAL)
        if isinstance(replaced, Directory) and _is_below(directory, replaced):
            raise failure(errno.ENOTEMPTY)
        if replaced is inode:
            return
        if replaced is not None:
            if isinstance(replaced, Directory) != isinstance(inode, Directory):
                raise failure(errno.EISDIR if isinstance(replaced, Directory) else errno.ENOTDIR)
            if isinstance(replaced, Directory) and replaced.names:
                raise failure(errno.ENOTEMPTY)
        if self.can_lose_power:
            concerned = (
                (directory, to_directory, inode) if replaced is None else (directory, to_directory, inode, replaced)
            )
            namings = (Naming(directory, name, inode), Naming(to_directory, to_name, replaced))
            self._journal.note(self.now_ns(), namings, *concerned)
        del directory.names[name]
        if replaced is not None:
            del to_directory.names[to_name]
            self._drop(to_directory, replaced)
        to_directory.names[to_name] = inode
        if isinstance(inode, Directory):
            inode.parent = to_directory
            directory.links -= 1
            to_directory.links += 1
        if not isinstance(inode, File):
            self._found.clear()
        inode.changed()
        directory.modified()
        to_directory.modified()

    def release(self, inode: Inode) -> None:
        """Its last link or descriptor may have gone."""
        if not inode.links and not inode.descriptors:
            self.used_blocks -= inode.block_count

    def sync(self, inode: Inode, *, only_data: bool) -> None:
        """fsync(2), or fdatasync(2)."""
        if isinstance(inode, File):
            inode.synced = None
            if only_data:
                self._journal.commit(inode.born)
                return
        self._journal.commit(inode.logged)

    def cut_power(self, chance: random.Random) -> None:
        """Lose what was not synced, whole or in parts. All processes that have files open here must have died before.

        Names: ext4 and XFS write every change of a name to one journal, in order, and recover a beginning of it. So of all
        creations, links, renames, removals and new directories the first ones survive, as many as chance says, but at least
        those up to the last that concerned a file or a directory which was synced after it, and those older than 30 s. In
        practice fsync of a new file makes its name durable as well, since the inode and the name are in one transaction
        (ext4: `ext4_sync_file` commits up to `i_sync_tid`; XFS: `xfs_file_fsync` forces the log up to `ili_commit_seq`), and
        here it does; POSIX does not promise it. fdatasync does the same for the creation alone: a later rename changes
        nothing that it would have to write.

        Data of a file since its last fsync or fdatasync: each block is by chance new, old, or new in its first sectors and
        old in the rest (a device writes a sector whole: NVMe's AWUPF, and what file systems themselves rely on). One that
        got its place on the device since then may be zero as well, as an extent that was reserved and never marked as
        written; one that had its place is written over and cannot. The size is the old or the new one, and with either any
        of the blocks.

        Modes, owners and times survive as they were last set.
        """
        if not self.can_lose_power:
            raise RuntimeError(
                f"{self.root}: set can_lose_power before anything is written; what was synced is not known"
            )
        if self.open_descriptors:
            raise RuntimeError(
                f"{self.root}: {self.open_descriptors} descriptors are open; with the power, their processes die first"
            )
        self._journal.lose_power(chance)
        self._found.clear()
        found = list(self.walk())
        for _, inode in found:
            inode.links = 0
        for _, inode in found:
            inode.links += 1
            inode.shown = None
            if isinstance(inode, File):
                inode.lose_power(chance)
            elif isinstance(inode, Directory):
                inode.links += 1
                for below in inode.names.values():
                    if isinstance(below, Directory):
                        below.parent = inode
                        inode.links += 1
        self.changes += 1
        self.used_blocks = sum(inode.block_count for inode in {inode.number: inode for _, inode in found}.values())

    def walk(self) -> Iterator[tuple[str, Inode]]:
        """All paths, the root first, and what has them."""
        waiting: list[tuple[str, Inode]] = [(self.root, self.top)]
        while waiting:
            path, inode = waiting.pop()
            yield path, inode
            if isinstance(inode, Directory):
                waiting += [(f"{path}/{name}", below) for name, below in reversed(inode.names.items())]

    def _walk(self, path: str, follow: bool, at: Directory | None) -> tuple[Directory, str, Inode | None]:
        """As `place`, one name after the other."""
        inode: Inode = self.top if at is None else at
        above_it, name = self.top if at is None else at, ""
        rest = (path[len(self.root) :] if at is None else path).split("/")[::-1]
        followed = 0
        while rest:
            part = rest.pop()
            if not isinstance(inode, Directory):
                raise failure(errno.ENOTDIR, path)
            if part in ("", "."):
                name = "" if part else name
                continue
            if part == "..":
                inode, name = inode.parent, ""
                continue
            found = inode.names.get(part)
            if found is None:
                if any(rest) or not inode.links:
                    raise failure(errno.ENOENT, path)
                return inode, part, None
            if isinstance(found, Link) and (follow or rest):
                followed += 1
                if followed > _MOST_LINKS:
                    raise failure(errno.ELOOP, path)
                target = found.target
                if target.startswith("/"):
                    if not self.owns(target):
                        raise failure(errno.ENOENT, path)
                    inode, target = self.top, target[len(self.root) :]
                rest += target.split("/")[::-1]
                continue
            above_it, name, inode = inode, part, found
        return above_it, name, inode

    def _found_anew(self, path: str) -> Directory | None:
        """None where there is no such directory on this disk; why, is for others to say."""
        if not self.owns(path):
            return None
        try:
            inode = self._walk(path, True, None)[2]
        except OSError:
            return None
        if not isinstance(inode, Directory):
            return None
        self._found[path] = inode
        return inode

    def _name(self, directory: Directory, name: str, inode: Inode) -> None:
        if self.can_lose_power:
            self._journal.note(self.now_ns(), (Naming(directory, name, None),), directory, inode)
        directory.names[name] = inode
        inode.links += 1
        directory.modified()

    def _drop(self, directory: Directory, inode: Inode) -> None:
        """A name of `inode` in `directory` is gone."""
        inode.links -= 1
        if isinstance(inode, Directory):
            inode.links = 0
            directory.links -= 1
        if not isinstance(inode, File):
            self._found.clear()
        inode.changed()
        self.release(inode)


def _is_below(directory: Directory, above: Directory) -> bool:
    """Whether it is `above`, or lies in it."""
    while directory is not above:
        if directory.parent is directory:
            return False
        directory = directory.parent
    return True
