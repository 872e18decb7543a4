"""The calls for files that tiercache makes of the operating system, answered by simulated disks."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from tests.torture.simulation.descriptor_calls import Before, DescriptorCalls
from tests.torture.simulation.descriptors import Opened, Torn
from tests.torture.simulation.disk import Disk
from tests.torture.simulation.entries import FoundEntries, FoundEntry
from tests.torture.simulation.inodes import BLOCK_BYTES, Directory, File, Inode, Link, failure

__all__ = ["Disk", "FileCalls", "Torn"]

Name = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Place = tuple[Disk, str, Directory | None]
"""A path, and the directory at which it begins where that is not the root."""


class FileCalls(DescriptorCalls):
    """Several disks, and what each process has open on them. The methods are named, take and raise as those of `os`.

    `before` is called at the beginning of each call, with its name, the disk, and what it is about: a path (of a descriptor,
    that with which it was opened), or the pair of paths of a rename or a link. It may let others run, and raise OSError.
    Once it has answered, the call is atomic. What it answers counts for reads and writes alone: None for all, a number for
    so many bytes at most, and for a write Torn: so many bytes, and then EIO.

    `process` is who calls: its descriptors are looked up among its own. Descriptors are numbers from 1,000,000 on.
    """

    def __init__(self, disks: Sequence[Disk], before: Before = lambda call, disk, target: None) -> None:
        super().__init__(before)
        self.disks = list(disks)
        self.umask = os.umask(0o022)
        os.umask(self.umask)

    def open(self, path: Name, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        disk, name, at = self._enter("open", path, dir_fd)
        making = bool(flags & os.O_CREAT)
        follow = not flags & os.O_NOFOLLOW and not (making and flags & os.O_EXCL)
        inode: Inode | None
        if making:
            if flags & os.O_DIRECTORY:
                raise failure(errno.EINVAL, name)
            directory, last, inode = disk.place(name, follow=follow, at=at)
            if inode is None:
                inode = disk.create(directory, last, mode & 0o7777 & ~self.umask)
                flags &= ~os.O_TRUNC
            elif flags & os.O_EXCL:
                raise failure(errno.EEXIST, name)
        else:
            inode = disk.find(name, follow=follow, at=at)
        if isinstance(inode, Directory):
            if making or flags & os.O_TRUNC or flags & os.O_ACCMODE != os.O_RDONLY:
                raise failure(errno.EISDIR, name)
        elif flags & os.O_DIRECTORY:
            raise failure(errno.ENOTDIR, name)
        elif isinstance(inode, Link):
            raise failure(errno.ELOOP, name)
        if flags & os.O_DIRECT and not isinstance(inode, File):
            raise failure(errno.EINVAL, name)  # a file that was to be made, is made all the same, as in Linux
        if flags & os.O_TRUNC and isinstance(inode, File):
            inode.truncate(0)
        return self._table.add(Opened(disk, inode, name, flags))

    def stat(self, path: Name | int, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        if isinstance(path, int):
            return self.fstat(path)
        disk, name, at = self._enter("stat" if follow_symlinks else "lstat", path, dir_fd)
        return disk.find(name, follow=follow_symlinks, at=at).status()

    def lstat(self, path: Name, *, dir_fd: int | None = None) -> os.stat_result:
        disk, name, at = self._enter("lstat", path, dir_fd)
        return disk.find(name, follow=False, at=at).status()

    def mkdir(self, path: Name, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        disk, name, at = self._enter("mkdir", path, dir_fd)
        directory, last = _vacant(disk.place(name, at=at), name)
        if not disk.free_blocks:
            raise failure(errno.ENOSPC, name)
        disk.make_directory(directory, last, mode & 0o1777 & ~self.umask)

    def unlink(self, path: Name, *, dir_fd: int | None = None) -> None:
        disk, name, at = self._enter("unlink", path, dir_fd)
        directory, last, inode = _taken(disk.place(name, at=at), name)
        if isinstance(inode, Directory):
            raise failure(errno.EISDIR, name)
        disk.remove(directory, last, inode)

    def rename(
        self, src: Name, dst: Name, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        """With both descriptors, or with none."""
        self._rename_at("rename", src, dst, src_dir_fd, dst_dir_fd, spare=False)

    replace = rename

    def rename_new(
        self, src: Name, dst: Name, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        """renameat2(2) with RENAME_NOREPLACE. Raises OSError."""
        self._rename_at("rename_new", src, dst, src_dir_fd, dst_dir_fd, spare=True)

    def _rename_at(
        self, call: str, src: Name, dst: Name, src_dir_fd: int | None, dst_dir_fd: int | None, *, spare: bool
    ) -> None:
        if src_dir_fd is None or dst_dir_fd is None:
            self._rename(call, src, dst, spare=spare)
            return
        old, new = os.fsdecode(src), os.fsdecode(dst)
        source, target = self._opened_for(src_dir_fd, dst_dir_fd, old, new)
        self.before(call, source.disk, (os.path.join(source.path, old), os.path.join(target.path, new)))
        source, target = self._opened_for(src_dir_fd, dst_dir_fd, old, new)
        self._rename_in(source.disk, old, source.inode, target.disk, new, target.inode, spare=spare)

    def link(self, src: Name, dst: Name) -> None:
        """Of a symbolic link, as link(2) of Linux does it, which `os.link` calls: to the link itself."""
        disk, old, to_disk, new = self._enter_both("link", src, dst)
        try:
            inode = disk.find(old, follow=False)
            directory, last = _vacant(to_disk.place(new))
        except OSError as error:
            raise _with_both(error, old, new) from None
        if to_disk is not disk:
            raise failure(errno.EXDEV, old, new)
        if isinstance(inode, Directory):
            raise failure(errno.EPERM, old, new)
        disk.add_name(directory, last, inode)

    def symlink(self, src: Name, dst: Name, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        target = os.fsdecode(src)
        disk, name, at = self._enter("symlink", dst, dir_fd)
        try:
            directory, last = _vacant(disk.place(name, at=at))
        except OSError as error:
            raise _with_both(error, target, name) from None
        disk.make_link(directory, last, target)

    def readlink(self, path: Name, *, dir_fd: int | None = None) -> str:
        disk, name, at = self._enter("readlink", path, dir_fd)
        inode = disk.find(name, follow=False, at=at)
        if not isinstance(inode, Link):
            raise failure(errno.EINVAL, name)
        return inode.target

    def listdir(self, path: Name | int) -> list[str]:
        return list(self._directory("listdir", path).names)

    def scandir(self, path: Name | int) -> FoundEntries:
        """What was there when it was called; an entry may have gone when it is asked for."""
        directory = self._directory("scandir", path)
        above, fd = ("", path) if isinstance(path, int) else (os.path.join(os.fsdecode(path), ""), None)
        return FoundEntries([FoundEntry(self, above, name, fd) for name in directory.names])

    def statvfs(self, path: Name | int) -> os.statvfs_result:
        disk = self._inode("statvfs", path, None, True).disk
        free, block = disk.free_blocks, BLOCK_BYTES
        return os.statvfs_result(
            (block, block, disk.block_count, free, free, 1 << 30, 1 << 29, 1 << 29, 0, 255, disk.device)
        )

    def _opened_for(self, src_fd: int, dst_fd: int, *paths: str) -> tuple[Opened, Opened]:
        found = []
        for fd in (src_fd, dst_fd):
            opened = self._opened.get(fd)
            if opened is None:
                raise failure(errno.EBADF, *paths)
            if opened.severed:
                raise failure(errno.ENOTCONN, *paths)
            if not isinstance(opened.inode, Directory):
                raise failure(errno.ENOTDIR, *paths)
            found.append(opened)
        source, target = found
        return source, target

    def _enter(self, call: str, path: Name, dir_fd: int | None) -> Place:
        """The beginning of a call with a path."""
        name = path if type(path) is str else os.fsdecode(path)
        if dir_fd is not None and not name.startswith("/"):
            opened, _ = self._use(call, dir_fd, name)
            if not name:
                raise failure(errno.ENOENT, name)
            if not isinstance(opened.inode, Directory):
                raise failure(errno.ENOTDIR, name)
            return opened.disk, name, opened.inode
        disk = self._disk(name)
        if disk is None:
            raise failure(errno.ENOENT, name)
        self.before(call, disk, name)
        return disk, name, None

    def _enter_both(self, call: str, src: Name, dst: Name) -> tuple[Disk, str, Disk, str]:
        old, new = os.fsdecode(src), os.fsdecode(dst)
        old_disk, new_disk = self._disk(old), self._disk(new)
        if old_disk is None or new_disk is None:
            raise failure(errno.EXDEV, old, new)
        self.before(call, old_disk, (old, new))
        return old_disk, old, new_disk, new

    def _disk(self, name: str) -> Disk | None:
        for disk in self.disks:
            if name.startswith(disk.below) or name == disk.root:
                return disk
        return None

    def _inode(self, call: str, path: Name | int, dir_fd: int | None, follow: bool) -> Inode:
        if isinstance(path, int):
            return self._use(call, path)[0].inode
        disk, name, at = self._enter(call, path, dir_fd)
        return disk.find(name, follow=follow, at=at)

    def _directory(self, call: str, path: Name | int) -> Directory:
        inode = self._inode(call, path, None, True)
        if not isinstance(inode, Directory):
            raise failure(errno.ENOTDIR, *([] if isinstance(path, int) else [os.fsdecode(path)]))
        return inode

    def _rename(self, call: str, src: Name, dst: Name, *, spare: bool) -> None:
        disk, old, to_disk, new = self._enter_both(call, src, dst)
        self._rename_in(disk, old, None, to_disk, new, None, spare=spare)

    @staticmethod
    def _rename_in(
        disk: Disk, old: str, source: Inode | None, to_disk: Disk, new: str, target: Inode | None, *, spare: bool
    ) -> None:
        """`source` and `target`: the directories at which relative paths begin."""
        assert source is None or isinstance(source, Directory)
        assert target is None or isinstance(target, Directory)
        if to_disk is not disk:
            raise failure(errno.EXDEV, old, new)
        try:
            directory, name, inode = disk.place(old, at=source)
            to_place = disk.place(new, at=target)
            if not name or not to_place[1]:
                raise failure(errno.EBUSY)
            if inode is None:
                raise failure(errno.ENOENT)
            disk.rename((directory, name, inode), to_place, spare=spare)
        except OSError as error:
            raise _with_both(error, old, new) from None


def _vacant(place: tuple[Directory, str, Inode | None], *paths: str) -> tuple[Directory, str]:
    directory, last, inode = place
    if inode is not None:
        raise failure(errno.EEXIST, *paths)
    return directory, last


def _taken(place: tuple[Directory, str, Inode | None], path: str) -> tuple[Directory, str, Inode]:
    directory, last, inode = place
    if inode is None:
        raise failure(errno.ENOENT, path)
    if not last:
        raise failure(errno.EBUSY, path)
    return directory, last, inode


def _with_both(error: OSError, old: str, new: str) -> OSError:
    """What a call with two paths raises: it says both, whichever was the reason."""
    assert error.errno is not None
    return failure(error.errno, old, new)
