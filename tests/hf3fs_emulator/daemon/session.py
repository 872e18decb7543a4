"""A FUSE mount served by one thread that reads the kernel's requests itself.

libfuse's way, a callback from one of several threads of C, costs more than all that is done in it: each callback makes a
Python thread state and fights for the GIL, each switch between threads wakes a CPU. One thread that reads, acts and
answers needs none of that: an open, a create, a stat or a rename beside transfers took 130 to 390 us through libfuse, and
takes 70 to 210.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import heapq
import itertools
import logging
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.hf3fs_emulator.daemon import fuse_protocol as fuse
from tests.hf3fs_emulator.daemon.filesystem import Filesystem
from tests.hf3fs_emulator.daemon.fuse_protocol import Opcode
from tests.hf3fs_emulator.daemon.nodes import Nodes
from tests.hf3fs_emulator.daemon.pacing import Pacing

logger = logging.getLogger("tiercache.hf3fs.emulator")

_WRITE_BYTES = 1 << 20
_VALID_S = 30
"""How long the kernel may believe names and attributes: 3FS's default. What rings change it is told of."""
_RENAME_NOREPLACE = 1
_MOUNT_S = 5.0

Handler = Callable[[int, memoryview], bytes]
"""Of a node and what follows the request's header; what follows the reply's header."""


class Session:
    def __init__(self, filesystem: Filesystem, mount: Path, pacing: Pacing, on_mounted: Callable[[], None]) -> None:
        self._filesystem = filesystem
        self._mount = mount
        self._on_mounted = on_mounted
        self._nodes = Nodes()
        self._process = 0
        """Thread that made the request which is being handled."""
        self._pacing = pacing
        self._late: list[tuple[float, int, Callable[[], None]]] = []
        """Answers that are to be given later, as a heap: (when, number, how)."""
        self._numbers = itertools.count()
        self._handlers: dict[int, Handler] = {
            code: getattr(self, f"_{code.name.lower()}")
            for code in Opcode
            if code not in (Opcode.INIT, Opcode.DESTROY, Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT)
        }
        self._device = _mount_device(mount)

    def serve(self) -> None:
        """Until the file system is unmounted."""
        buffer = bytearray(_WRITE_BYTES + (64 << 10))
        view = memoryview(buffer)
        device, header = self._device, fuse.REQUEST
        while True:
            while self._late:
                # In this thread and not another one, which would have to be woken and to fight for the GIL.
                wait_s = self._late[0][0] - time.monotonic()
                if wait_s > 0 and select.select([device], [], [], wait_s)[0]:
                    break
                if wait_s <= 0:
                    heapq.heappop(self._late)[2]()
            try:
                length = os.readv(device, [buffer])
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue  # taken back before we had it
                raise
            _, opcode, unique, node, _, _, self._process, _ = header.unpack_from(buffer)
            self._handle(opcode, unique, node, view[header.size : length])

    def unmount(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):  # the process that started this one unmounts as well
            subprocess.run(["fusermount3", "-u", "-q", "-z", str(self._mount)], check=False, timeout=_MOUNT_S)

    def changed(self, inode: int) -> None:
        """What rings did to a file is to be seen: the kernel asks for its attributes anew. Any thread may call it."""
        node = self._nodes.of_inode(inode)
        if node is not None:
            # Only attributes: to drop pages the kernel may wait for a read that waits for us. It drops them when it finds
            # another modification time.
            body = fuse.INVALID_INODE.pack(node, -1, 0)
            self._send(fuse.REPLY.pack(fuse.REPLY.size + len(body), fuse.NOTIFY_INVALID_INODE, 0) + body)

    def _handle(self, opcode: int, unique: int, node: int, body: memoryview) -> None:
        handler = self._handlers.get(opcode)
        if handler is None:
            self._handle_other(opcode, unique, node, body)
            return
        answer, code = b"", 0
        try:
            answer = handler(node, body)
        except OSError as error:
            code = error.errno or errno.EIO
        except Exception:
            logger.exception("FUSE request %d failed", opcode)
            code = errno.EIO
        delay_s = self._pacing.call_s(opcode)
        if delay_s:
            answer_now: Callable[[], None] = functools.partial(self._reply, unique, code, answer)
            heapq.heappush(self._late, (time.monotonic() + delay_s, next(self._numbers), answer_now))
        else:
            self._reply(unique, code, answer)

    def _handle_other(self, opcode: int, unique: int, node: int, body: memoryview) -> None:
        if opcode == Opcode.FORGET:
            self._nodes.forget(node, fuse.NODE_IN.unpack_from(body)[0])
        elif opcode == Opcode.BATCH_FORGET:
            count, _ = fuse.FORGET_BATCH_IN.unpack_from(body)
            for number in range(count):
                self._nodes.forget(*fuse.FORGET_ONE.unpack_from(body, fuse.FORGET_BATCH_IN.size + number * 16))
        elif opcode == Opcode.INIT:
            _, _, read_ahead, flags = fuse.INIT_IN.unpack_from(body)
            wanted = (
                fuse.ASYNC_READ | fuse.ATOMIC_TRUNCATE | fuse.BIG_WRITES | fuse.AUTO_INVALID_DATA
                | fuse.PARALLEL_DIRECTORIES | fuse.MAX_PAGES
            )  # fmt: skip
            pages = _WRITE_BYTES // 4096
            self._reply(
                unique, 0,
                fuse.INIT_OUT.pack(*fuse.PROTOCOL, read_ahead, flags & wanted, 64, 48, _WRITE_BYTES, 1, pages, 0, 0),
            )  # fmt: skip
            self._on_mounted()
        elif opcode == Opcode.DESTROY:
            self._reply(unique, 0)
        elif opcode != Opcode.INTERRUPT:
            self._reply(unique, errno.ENOSYS)

    def _reply(self, unique: int, code: int, answer: bytes = b"") -> None:
        if code:
            answer = b""
        self._send(fuse.REPLY.pack(fuse.REPLY.size + len(answer), -code, unique) + answer)

    def _send(self, message: bytes) -> None:
        try:
            os.write(self._device, message)
        except OSError as error:
            # ENOENT: nobody waits any more, or nobody has that node. ENODEV: unmounted.
            if error.errno not in (errno.ENOENT, errno.ENODEV, errno.ENOTCONN):
                raise

    def _path(self, node: int) -> str:
        path = self._nodes.path(node)
        if path is None:
            raise OSError(errno.ENOENT, "the file has no name any more")
        return path

    def _below(self, directory: int, name: str) -> str:
        path = self._path(directory)
        return f"/{name}" if path == "/" else f"{path}/{name}"

    def _entry(self, directory: int, name: str) -> bytes:
        path = self._below(directory, name)
        inode, _, packed = self._filesystem.attributes(path)
        node = self._nodes.found(directory, name, inode)
        # Registrations come and go by themselves.
        valid_s = 0 if self._filesystem.is_virtual(path) else _VALID_S
        return fuse.ENTRY_OUT.pack(node.number, 0, valid_s, valid_s, 0, 0) + packed

    def _attributes(self, path: str | None, handle: int | None) -> bytes:
        _, _, packed = self._filesystem.attributes(path, handle)
        valid_s = 0 if path is not None and self._filesystem.is_virtual(path) else _VALID_S
        return fuse.ATTRIBUTES_OUT.pack(valid_s, 0, 0) + packed

    def _lookup(self, node: int, body: memoryview) -> bytes:
        return self._entry(node, _name(body))

    def _getattr(self, node: int, body: memoryview) -> bytes:
        flags, _, handle = fuse.GETATTR_IN.unpack_from(body)
        return self._attributes(self._nodes.path(node), handle if flags & fuse.GETATTR_HANDLE else None)

    def _setattr(self, node: int, body: memoryview) -> bytes:
        which, _, handle, size, _, *times, mode, _, uid, gid, _ = fuse.SETATTR_IN.unpack_from(body)
        path, open_handle = self._nodes.path(node), handle if which & fuse.SET_HANDLE else None
        if which & fuse.SET_MODE:
            self._filesystem.chmod(path, mode)
        if which & (fuse.SET_UID | fuse.SET_GID):
            self._filesystem.chown(path, uid if which & fuse.SET_UID else -1, gid if which & fuse.SET_GID else -1)
        if which & fuse.SET_SIZE:
            self._filesystem.truncate(path, size, open_handle)
        if which & (fuse.SET_ATIME | fuse.SET_MTIME):
            status = self._filesystem.times(path, open_handle)
            now_ns = time.time_ns()
            wanted = []
            for place, (set_it, set_now) in enumerate(
                ((fuse.SET_ATIME, fuse.SET_ATIME_NOW), (fuse.SET_MTIME, fuse.SET_MTIME_NOW))
            ):
                given_ns = now_ns if which & set_now else times[place] * 10**9 + times[place + 3]
                wanted.append(given_ns if which & set_it else status[place])
            self._filesystem.utimens(path, (wanted[0], wanted[1]), open_handle)
        return self._attributes(path, open_handle)

    def _readlink(self, node: int, _: memoryview) -> bytes:
        return os.fsencode(self._filesystem.readlink(self._path(node)))

    def _symlink(self, node: int, body: memoryview) -> bytes:
        name, target = (os.fsdecode(part) for part in bytes(body).split(b"\0")[:2])
        self._filesystem.symlink(self._below(node, name), target, self._process)
        return self._entry(node, name)

    def _mkdir(self, node: int, body: memoryview) -> bytes:
        mode, _ = fuse.MKDIR_IN.unpack_from(body)
        name = _name(body[fuse.MKDIR_IN.size :])
        self._filesystem.mkdir(self._below(node, name), mode)
        return self._entry(node, name)

    def _unlink(self, node: int, body: memoryview) -> bytes:
        name = _name(body)
        self._filesystem.unlink(self._below(node, name))
        self._nodes.removed(node, name)
        return b""

    def _rmdir(self, node: int, body: memoryview) -> bytes:
        name = _name(body)
        self._filesystem.rmdir(self._below(node, name))
        self._nodes.removed(node, name)
        return b""

    def _rename(self, node: int, body: memoryview) -> bytes:
        (to_node,) = fuse.NODE_IN.unpack_from(body)
        return self._rename_to(node, to_node, body[fuse.NODE_IN.size :])

    def _rename2(self, node: int, body: memoryview) -> bytes:
        to_node, flags, _ = fuse.RENAME2_IN.unpack_from(body)
        # The kernel has looked: with NOREPLACE it comes here only when the new name was free.
        if flags & ~_RENAME_NOREPLACE:
            raise OSError(errno.EINVAL, f"rename flags {flags:#x}")
        return self._rename_to(node, to_node, body[fuse.RENAME2_IN.size :])

    def _rename_to(self, node: int, to_node: int, names: memoryview) -> bytes:
        name, to_name = (os.fsdecode(part) for part in bytes(names).split(b"\0")[:2])
        self._filesystem.rename(self._below(node, name), self._below(to_node, to_name))
        self._nodes.renamed(node, name, to_node, to_name)
        return b""

    def _link(self, node: int, body: memoryview) -> bytes:
        (old,) = fuse.NODE_IN.unpack_from(body)
        name = _name(body[fuse.NODE_IN.size :])
        self._filesystem.link(self._below(node, name), self._path(old))
        return self._entry(node, name)

    def _open(self, node: int, body: memoryview) -> bytes:
        flags, _ = fuse.OPEN_IN.unpack_from(body)
        return fuse.OPEN_OUT.pack(self._filesystem.open(self._path(node), flags), 0, 0)

    def _create(self, node: int, body: memoryview) -> bytes:
        flags, mode, _, _ = fuse.CREATE_IN.unpack_from(body)
        name = _name(body[fuse.CREATE_IN.size :])
        handle, inode, packed = self._filesystem.create(self._below(node, name), mode, flags)
        entry = fuse.ENTRY_OUT.pack(self._nodes.found(node, name, inode).number, 0, _VALID_S, _VALID_S, 0, 0)
        return entry + packed + fuse.OPEN_OUT.pack(handle, 0, 0)

    def _read(self, _: int, body: memoryview) -> bytes:
        handle, offset, size, *_rest = fuse.READ_IN.unpack_from(body)
        return self._filesystem.read(size, offset, handle)

    def _write(self, _: int, body: memoryview) -> bytes:
        handle, offset, size, *_rest = fuse.READ_IN.unpack_from(body)
        data = body[fuse.READ_IN.size : fuse.READ_IN.size + size]
        return fuse.WRITE_OUT.pack(self._filesystem.write(data, offset, handle), 0)

    def _statfs(self, _: int, __: memoryview) -> bytes:
        found = self._filesystem.statfs()
        return fuse.STATFS_OUT.pack(
            found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree,
            found.f_bsize, found.f_namemax, found.f_frsize, 0,
        )  # fmt: skip

    def _release(self, _: int, body: memoryview) -> bytes:
        self._filesystem.release(*fuse.HANDLE_IN.unpack_from(body))
        return b""

    def _fsync(self, _: int, body: memoryview) -> bytes:
        self._filesystem.fsync(*fuse.HANDLE_IN.unpack_from(body))
        return b""

    def _opendir(self, node: int, _: memoryview) -> bytes:
        return fuse.OPEN_OUT.pack(self._filesystem.opendir(self._path(node)), 0, 0)

    def _readdir(self, _: int, body: memoryview) -> bytes:
        handle, offset, size, *_rest = fuse.READ_IN.unpack_from(body)
        return fuse.directory_entries(self._filesystem.readdir(handle, anew=offset == 0), offset, size)

    def _releasedir(self, _: int, body: memoryview) -> bytes:
        self._filesystem.releasedir(*fuse.HANDLE_IN.unpack_from(body))
        return b""

    def _ioctl(self, _: int, body: memoryview) -> bytes:
        handle, _, command, _, _, out_bytes = fuse.IOCTL_IN.unpack_from(body)
        data = self._filesystem.ioctl(command, handle).to_bytes(4, "little")[:out_bytes]
        return fuse.IOCTL_OUT.pack(0, 0, 0, 0) + data


def _name(body: memoryview) -> str:
    return os.fsdecode(bytes(body).partition(b"\0")[0])


def _mount_device(mount: Path) -> int:
    """Have fusermount3 mount, which needs no root; the descriptor by which the kernel asks. Raises OSError."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run(
            ["fusermount3", "-o", "fsname=hf3fs.emulator,subtype=hf3fs", "--", str(mount)],
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            check=False,
            timeout=_MOUNT_S,
        )
        if done.returncode:
            raise OSError(errno.EIO, f"fusermount3: {done.stderr.strip()}", str(mount))
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]
