"""`hf3fs_fuse.io` of each simulated process: what it asks of the daemon of its 3FS mount."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from greenlet import GreenletExit

from tests.torture.simulation.hf3fs_daemon import Client, Daemon, Piece
from tests.torture.simulation.inodes import File
from tests.torture.simulation.process import Process
from tests.torture.simulation.world import Strand


def library_of(daemon: Daemon) -> Library:
    """The calling process's."""
    strand = daemon.world.current
    assert strand is not None
    return Library(daemon, strand.process, daemon.clients.setdefault(strand.process, Client()))


class Library:
    """`hf3fs_fuse.io` of one process."""

    def __init__(self, daemon: Daemon, process: Process, client: Client) -> None:
        self.daemon = daemon
        self.process = process
        self.client = client

    def extract_mount_point(self, path: str) -> str | None:
        os.stat(path)
        return self.daemon.disk.root if self.daemon.disk.owns(path) else None

    def register_fd(self, descriptor: int) -> None:
        if not self._is_ours(descriptor):
            raise OSError(errno.EBADF, f"descriptor {descriptor} is not on 3FS")
        self._require_unregistered(descriptor)
        os.fstat(descriptor)
        self._require_unregistered(descriptor)
        inode = self.daemon.calls.opened(descriptor).inode
        assert isinstance(inode, File)
        self.daemon.hold(inode)
        self.client.files[descriptor] = inode

    def deregister_fd(self, descriptor: int) -> None:
        if self._is_ours(descriptor) and (file := self.client.files.pop(descriptor, None)) is not None:
            if descriptor in self.client.stale:
                self.client.stale.discard(descriptor)
            else:
                self.daemon.let_go(file)

    def force_fsync(self, descriptor: int) -> int:
        try:
            self.daemon.calls.ioctl(descriptor)
        except OSError:
            return -1
        return 0

    def make_iovec(self, segment: Any, mount: str, block_size: int = 0, numa: int = -1) -> Iovec:
        identity = str(uuid.uuid4())
        link = f"{self.daemon.registrations}/{identity}"
        self.daemon.calls.symlink(f"{self.daemon.memory.disk.root}/{segment.name}", link)
        self.client.links.append(link)
        self.daemon.map(identity, segment.name)
        return Iovec(self, identity, link, segment.buf.nbytes)

    def make_ioring(
        self, mount: str, entries: int, for_read: bool, io_depth: int, priority: None, timeout: None, numa: int
    ) -> Ring:
        link = f"{self.daemon.registrations}/{uuid.uuid4()}.r"
        self.daemon.calls.symlink(f"{self.daemon.memory.disk.root}/hf3fs-iov-{self.process.number}", link)
        self.client.links.append(link)
        return Ring(self, link, entries, for_read)

    def _is_ours(self, descriptor: int) -> bool:
        try:
            self.daemon.calls.ioctl(descriptor)
            return self.daemon.calls.opened(descriptor).disk is self.daemon.disk
        except OSError:
            return False

    def _require_unregistered(self, descriptor: int) -> None:
        if descriptor in self.client.files:
            raise OSError(errno.EINVAL, f"descriptor {descriptor} is registered already")


class Iovec:
    def __init__(self, library: Library, identity: str, link: str, length: int) -> None:
        self.link = link
        self._library = library
        self._identity = identity
        self._length = length
        library.client.iovs += 1
        self._counted = True

    def __getitem__(self, where: slice) -> Piece:
        start, stop, _ = where.indices(self._length)
        return Piece(self._identity, start, stop - start)

    def __del__(self) -> None:
        library = self._library
        if self._counted:
            self._counted = False
            library.client.iovs -= 1
        if _is_living(library):
            with contextlib.suppress(GreenletExit):
                os.unlink(self.link)
                library.daemon.unmap(self._identity)


@dataclass(eq=False)
class Ring:
    """One direction. One thread prepares and waits."""

    library: Library
    link: str
    entries: int
    reads: bool
    generation: int = -1
    _order: deque[Piece] = field(default_factory=deque)
    _in_flight: set[Piece] = field(default_factory=set)
    _done: list[Piece] = field(default_factory=list)
    _waiting: Strand | None = None

    def __post_init__(self) -> None:
        self.generation = self.library.daemon.generation
        client = self.library.client
        client.rings += 1
        if client.behind:
            client.behind = False
            self.library.daemon.weather.last_fault_s = self.library.daemon.world.now_s

    def prepare(self, piece: Piece, read: bool, descriptor: int, offset: int) -> None:
        if read != self.reads or not piece.length:
            raise OSError(errno.EINVAL, f"read={read} of {piece.length} bytes")
        file = self.library.client.files.get(descriptor)
        if file is None:
            raise OSError(errno.EBADF, f"descriptor {descriptor} is not registered")
        while self._order and self._order[0] not in self._in_flight:
            self._order.popleft()
        if len(self._in_flight) >= self.entries or len(self._order) >= 2 * self.entries:
            raise BlockingIOError(errno.EAGAIN, "no entry is free")
        self._in_flight.add(piece)
        self._order.append(piece)
        asks = weakref.ref(self)
        self.library.daemon.take(
            self.library.client, self.generation, piece, file, offset,
            reads=self.reads, complete=lambda result: _complete(asks, piece, result),
        )  # fmt: skip

    def submit(self) -> None:
        """What is prepared may have begun before this."""

    def wait(self, *, max_results: int, min_results: int, timeout: float) -> list[Piece]:
        world = self.library.daemon.world
        until_s = world.now_s + timeout
        while len(self._done) < min_results and world.now_s < until_s:
            self._waiting = world.current
            world.wait(until_s)
            self._waiting = None
        found, self._done = self._done[:max_results], self._done[max_results:]
        self._in_flight.difference_update(found)
        return found

    def completed(self, piece: Piece, result: int) -> None:
        piece.result = result
        self._done.append(piece)
        if self._waiting is not None and self._waiting.process.alive:
            self.library.daemon.world.wake(self._waiting)

    def __del__(self) -> None:
        self.library.client.rings -= 1
        if not self.library.client.rings:
            self.library.client.unheard = 0  # the places that they cost are made anew with the rings
        if _is_living(self.library):
            with contextlib.suppress(OSError, GreenletExit):
                os.unlink(self.link)


def _complete(asks: weakref.ref[Ring], piece: Piece, result: int) -> None:
    """Nobody is told whose ring is gone."""
    ring = asks()
    if ring is not None:
        ring.completed(piece, result)


def _is_living(library: Library) -> bool:
    strand = library.daemon.world.current
    return strand is not None and strand.process.alive and library.process.alive
