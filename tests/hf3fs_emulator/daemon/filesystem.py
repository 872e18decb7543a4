"""A FUSE file system of type `fuse.hf3fs`: a plain directory, and `3fs-virt` beside what is in it."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import zlib
from collections.abc import Callable

from tests.hf3fs_emulator.daemon.buffers import Buffers
from tests.hf3fs_emulator.daemon.faults import Faults
from tests.hf3fs_emulator.daemon.files import KnownFile, KnownFiles
from tests.hf3fs_emulator.daemon.fuse_protocol import attributes, virtual_attributes
from tests.hf3fs_emulator.wire import IOCTL_FSYNC, IOCTL_GET_MAGIC, MAGIC, SEMAPHORE_LINKS, VIRTUAL_DIRECTORY

_VIRTUAL = f"/{VIRTUAL_DIRECTORY}"
_IOVS = f"{_VIRTUAL}/iovs"
_VIRTUAL_INODES = 1 << 63


class Filesystem:
    """What can be done with the mount. Paths start there; OSError becomes the answer. One thread's.

    An operation on an open file comes with its handle, and without a path where the file has none any more.
    """

    def __init__(
        self,
        backing: str,
        files: KnownFiles,
        buffers: Buffers,
        faults: Faults,
        semaphore_targets: list[str],
        on_client: Callable[[int], None],
    ) -> None:
        self._backing = backing
        self._files = files
        self._buffers = buffers
        self._faults = faults
        self._semaphores = dict(zip(SEMAPHORE_LINKS, semaphore_targets, strict=True))
        self._on_client = on_client
        self._open: dict[int, tuple[int, KnownFile]] = {}
        """Open descriptor of a client's file -> inode, file."""
        self._writing: set[int] = set()
        self._directories: dict[int, tuple[str, list[tuple[str, int, int]]]] = {}
        """Handle -> path, and what was listed when it was last read from the beginning."""
        self._handles = itertools.count(1)

    def attributes(self, path: str | None, handle: int | None = None) -> tuple[int, int, bytes]:
        """Inode, mode, and all as the kernel wants them."""
        if path is not None and self.is_virtual(path):
            return self._virtual_attributes(path)
        status = os.fstat(handle) if handle is not None else os.lstat(self._real(path))
        size_bytes = status.st_size
        if stat.S_ISREG(status.st_mode):
            size_bytes = self._files.visible_bytes(status.st_ino, size_bytes)
        return status.st_ino, status.st_mode, attributes(status, size_bytes)

    def opendir(self, path: str) -> int:
        handle = next(self._handles)
        self._directories[handle] = path, []
        return handle

    def releasedir(self, handle: int) -> None:
        del self._directories[handle]

    def readdir(self, handle: int, *, anew: bool) -> list[tuple[str, int, int]]:
        """(name, inode, mode) of everything that was there when it was last asked for `anew`."""
        path, found = self._directories[handle]
        if not anew:
            return found
        names = [".", ".."]
        if path == _VIRTUAL:
            names.append("iovs")
        elif path == _IOVS:
            names += [*self._semaphores, *self._buffers.names()]
        else:
            names += os.listdir(self._real(path)) + [VIRTUAL_DIRECTORY] * (path == "/")
        found = []
        for name in names:
            try:
                inode, mode, _ = self.attributes(path if name == "." else os.path.normpath(os.path.join(path, name)))
            except OSError:
                continue  # gone meanwhile
            found.append((name, inode, mode))  # readers skip entries whose inode number is 0
        self._directories[handle] = path, found
        return found

    def readlink(self, path: str) -> str:
        if self.is_virtual(path):
            name = os.path.basename(path)
            target = self._semaphores.get(name) or self._buffers.target(name)
            if target is None:
                raise OSError(errno.EINVAL, path)
            return target
        return os.readlink(self._real(path))

    def symlink(self, path: str, target: str, thread: int) -> None:
        if os.path.dirname(path) == _IOVS:
            pid = _process_of(thread)
            self._buffers.register(os.path.basename(path), target, pid)
            self._on_client(pid)
        else:
            os.symlink(target, self._real(path))

    def unlink(self, path: str) -> None:
        if os.path.dirname(path) == _IOVS:
            self._buffers.unregister(os.path.basename(path))
        else:
            self._faults.check_call("unlink")
            os.unlink(self._real(path))

    def open(self, path: str, flags: int) -> int:
        self._faults.check_call("open")
        return self._opened(self._real(path), flags, 0)[0]

    def create(self, path: str, mode: int, flags: int) -> tuple[int, int, bytes]:
        """Handle, inode, attributes."""
        self._faults.check_call("open")
        handle, status = self._opened(self._real(path), flags | os.O_CREAT, mode)
        size_bytes = self._files.visible_bytes(status.st_ino, status.st_size)
        return handle, status.st_ino, attributes(status, size_bytes)

    def _opened(self, real: str, flags: int, mode: int) -> tuple[int, os.stat_result]:
        # O_DIRECT asks for alignment that FUSE's own buffers do not have; append is the kernel's business.
        given = flags & ~(os.O_DIRECT | os.O_APPEND) | os.O_CLOEXEC
        writable = True
        try:
            # For both directions where its permissions let us: rings of either kind may use it.
            descriptor = os.open(real, given & ~os.O_ACCMODE | os.O_RDWR, mode)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ETXTBSY):
                raise
            descriptor, writable = os.open(real, given, mode), flags & os.O_ACCMODE == os.O_RDWR
        status = os.fstat(descriptor)
        self._open[descriptor] = status.st_ino, self._files.hold(descriptor, status.st_ino, writable=writable)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            self._writing.add(descriptor)
        return descriptor, status

    def release(self, handle: int) -> None:
        inode, known = self._open.pop(handle)
        if handle in self._writing:
            self._writing.remove(handle)
            self._files.make_visible(inode)
        self._files.release(inode)
        if known.descriptor != handle:
            os.close(handle)

    def read(self, size: int, offset: int, handle: int) -> bytes:
        return os.pread(handle, size, offset)

    def write(self, data: memoryview, offset: int, handle: int) -> int:
        written = os.pwrite(handle, data, offset)
        self._files.make_visible(self._open[handle][0])
        return written

    def fsync(self, handle: int) -> None:
        self._faults.check_call("fsync")
        os.fsync(handle)
        self._files.make_visible(self._open[handle][0])

    def ioctl(self, command: int, handle: int) -> int:
        if command == IOCTL_GET_MAGIC:
            return MAGIC
        if command == IOCTL_FSYNC:
            self._files.make_visible(self._open[handle][0])
            return 0
        raise OSError(errno.EINVAL, f"ioctl {command:#x}")

    def truncate(self, path: str | None, length: int, handle: int | None = None) -> None:
        os.truncate(handle if handle is not None else self._real(path), length)
        if handle is not None:
            self._files.make_visible(self._open[handle][0])
        else:
            self._files.make_visible(os.lstat(self._real(path)).st_ino)

    def rename(self, old: str, new: str) -> None:
        self._faults.check_call("rename")
        os.rename(self._real(old), self._real(new))

    def link(self, path: str, target: str) -> None:
        os.link(self._real(target), self._real(path))

    def mkdir(self, path: str, mode: int) -> None:
        self._faults.check_call("mkdir")
        os.mkdir(self._real(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._real(path))

    def chmod(self, path: str | None, mode: int) -> None:
        os.chmod(self._real(path), mode)

    def chown(self, path: str | None, uid: int, gid: int) -> None:
        os.chown(self._real(path), uid, gid)

    def times(self, path: str | None, handle: int | None) -> tuple[int, int]:
        """When it was last read and written, in ns."""
        status = os.stat(handle if handle is not None else self._real(path))
        return status.st_atime_ns, status.st_mtime_ns

    def utimens(self, path: str | None, times_ns: tuple[int, int], handle: int | None) -> None:
        os.utime(handle if handle is not None else self._real(path), ns=times_ns)

    def statfs(self) -> os.statvfs_result:
        return os.statvfs(self._backing)

    @staticmethod
    def is_virtual(path: str) -> bool:
        return path == _VIRTUAL or path.startswith(f"{_VIRTUAL}/")

    def _real(self, path: str | None) -> str:
        """Where `path` is in the backing directory. Raises OSError for what has no place there."""
        if path is None:
            raise OSError(errno.ENOENT, "the file has no name any more")
        if self.is_virtual(path):
            raise OSError(errno.EPERM, path)
        return self._backing + path

    def _virtual_attributes(self, path: str) -> tuple[int, int, bytes]:
        if path in (_VIRTUAL, _IOVS):
            number, mode, size = (1 if path == _VIRTUAL else 2), stat.S_IFDIR | 0o777, 0
        else:
            name = os.path.basename(path)
            target = self._semaphores.get(name) or self._buffers.target(name)
            if target is None or os.path.dirname(path) != _IOVS:
                raise OSError(errno.ENOENT, path)
            number, mode, size = zlib.crc32(name.encode()) | 1 << 40, stat.S_IFLNK | 0o777, len(target)
        inode = _VIRTUAL_INODES | number
        return inode, mode, virtual_attributes(inode, mode, size)


def _process_of(thread: int) -> int:
    """FUSE names the thread that made a call; what is to be watched is its process."""
    try:
        with open(f"/proc/{thread}/status") as status:
            return next((int(line.split()[1]) for line in status if line.startswith("Tgid:")), thread)
    except OSError:
        return thread
