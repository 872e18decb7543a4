"""A mount of 3FS: its daemon, and `hf3fs_fuse.io` for each process, over a simulated disk.

The daemon is no process of the run: it serves at the world's instants, and what a process asked of it goes on when that has
died. Its traps are those of the real one (see tiercache.testing.hf3fs.client): descriptors are known by number, a piece does
not keep its buffer, an operation keeps the memory mapped for as long as it may write to it, and one that takes long holds
back the room of all that came after it.

The daemon keeps no object of a process: whose last reference that was would make calls where the daemon drops it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import uuid
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit

from tiercache.testing.simulation.disk import Disk
from tiercache.testing.simulation.inodes import Directory, File
from tiercache.testing.simulation.process import Process
from tiercache.testing.simulation.shared_memory import SharedMemory
from tiercache.testing.simulation.weather import Weather
from tiercache.testing.simulation.world import Strand, World

if TYPE_CHECKING:
    from tiercache.testing.simulation.files import FileCalls

_VIRTUAL = "3fs-virt"
_SERVES_S = 60e-6
_SLOW_S = 0.05
_LATE_S = 15.0
_STATES = ("dead",)


class RingWeather(Weather):
    """Of a 3FS mount: its calls, its rings, and whether there is a daemon at all."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.daemon: Daemon
        self.dead = False

    @property
    def calm(self) -> bool:
        return super().calm and not self.dead

    @property
    def fails(self) -> bool:
        return super().fails or self.dead

    def turn(self, kind: str, rate: float) -> None:
        if kind != "dead":
            super().turn(kind, rate)
            return
        self.last_fault_s = self.last_failure_s = self.world.now_s
        self.met[kind] += 1
        self.dead = True
        self.daemon.die()
        super().clear()  # who hangs in a call to it goes on, and hears of it

    def clear(self) -> None:
        if self.dead:
            self.dead = False
            self.last_fault_s = self.last_failure_s = self.world.now_s
            self.daemon.begin()
        super().clear()
        self.daemon.go_on()

    def before(self, name: str, disk: Disk, target: object) -> Any:
        ordered = super().before(name, disk, target)
        if self.dead and name != "close":
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return ordered


@dataclass(eq=False)
class _Job:
    """An operation on its way through the daemon."""

    ring: weakref.ref[Ring]
    library: Library
    reads: bool
    piece: Piece
    file: File
    offset: int
    memory: memoryview
    generation: int
    fate: str
    ended: bool = False


class Daemon:
    """`die` and `begin` are another daemon's, which knows nothing of the one before."""

    def __init__(self, world: World, disk: Disk, weather: RingWeather, memory: SharedMemory) -> None:
        self.world = world
        self.disk = disk
        self.weather = weather
        self.memory = memory
        self.calls: FileCalls
        self.generation = 0
        self.libraries: dict[Process, Library] = {}
        self._iovs: dict[str, memoryview] = {}
        """Views, so that nobody else unmaps it."""
        self._jobs: set[_Job] = set()
        self._held: list[Callable[[], None]] = []
        weather.daemon = self
        memory.is_mapped_elsewhere = self.has_mapped
        self.begin()

    @property
    def registrations(self) -> str:
        return f"{self.disk.root}/{_VIRTUAL}/iovs"

    def begin(self) -> None:
        """A daemon comes up."""
        disk = self.disk
        for path in (f"{disk.root}/{_VIRTUAL}", self.registrations):
            directory, name, found = disk.place(path)
            if found is None:
                disk.make_directory(directory, name, 0o755)
        found_directory = disk.find_directory(self.registrations)
        assert isinstance(found_directory, Directory)
        disk.remove_all(self.registrations)

    def die(self) -> None:
        """With all that it was doing, and all that was open on its mount."""
        self.generation += 1
        self._iovs.clear()
        self._held.clear()
        for job in list(self._jobs):
            self._end(job)
        self.calls.sever(self.disk)

    def go_on(self) -> None:
        held, self._held = self._held, []
        for serve in held:
            self.world.at(self.world.now_s, serve)

    def library(self) -> Library:
        """The calling process's."""
        strand = self.world.current
        assert strand is not None
        process = strand.process
        if process not in self.libraries:
            self.libraries[process] = Library(self, process)
        return self.libraries[process]

    def forget(self, process: Process) -> None:
        """It has died, and what it had registered goes with it. What it asked for goes on."""
        library = self.libraries.pop(process, None)
        if library is not None:
            for link in library.links:
                directory, name, found = self.disk.place(link)
                if found is not None:
                    self.disk.remove(directory, name, found)
                self.unmap(name)
            for file in library.files.values():
                self.let_go(file.inode)

    def has_mapped(self, memory: mmap.mmap) -> bool:
        views = [*self._iovs.values(), *(job.memory for job in self._jobs)]
        return any(view.obj is memory for view in views)

    def map(self, identity: str, name: str) -> None:
        self._iovs[identity] = memoryview(self.memory.memory_of(name))

    def unmap(self, identity: str) -> None:
        self._iovs.pop(identity, None)

    def hold(self, inode: File) -> None:
        inode.descriptors += 1

    def let_go(self, inode: File) -> None:
        inode.descriptors -= 1
        self.disk.release(inode)

    # Operations

    def take(self, ring: Ring, piece: Piece, file: File, offset: int) -> None:
        weather = self.weather
        memory = self._iovs.get(piece.identity)
        if weather.dead or ring.generation != self.generation:
            return
        if memory is None:
            asks = weakref.ref(ring)
            self.world.at(self.world.now_s + _SERVES_S, lambda: _complete(asks, piece, -errno.EINVAL))
            return
        fates = ("silent", "stuck", "late", "ring-error", "ring-short")
        fate = next((kind for kind in fates if weather.strikes(kind)), "")
        job = _Job(weakref.ref(ring), ring.library, ring.reads, piece, file, offset, memory, self.generation, fate)
        self._jobs.add(job)
        self.hold(file)
        if fate == "stuck":
            self._held.append(lambda: self._first(job))
            return
        chance = self.world.chance.random()
        takes_s = chance * (_LATE_S if fate == "late" else _SLOW_S if weather.slow else _SERVES_S)
        self.world.at(self.world.now_s + takes_s / 2, lambda: self._first(job))

    def _first(self, job: _Job) -> None:
        """Half of it."""
        if job.ended or self._waits(lambda: self._first(job)):
            return
        began_s = self.world.now_s
        result = self._move(job, 0, job.piece.length // 2)
        chance = self.world.chance.random()
        takes_s = chance * (_LATE_S if job.fate == "late" else _SLOW_S if self.weather.slow else _SERVES_S)
        self.world.at(began_s + takes_s / 2, lambda: self._second(job, result))

    def _second(self, job: _Job, first: int) -> None:
        """The rest, and its result."""
        if job.ended or self._waits(lambda: self._second(job, first)):
            return
        middle = job.piece.length // 2
        if job.fate == "ring-error":
            result = -errno.EREMOTEIO
        elif first < middle or job.fate == "ring-short":
            result = first
        else:
            second = self._move(job, middle, job.piece.length - middle)
            result = second if second < 0 else first + second
        self._end(job)
        if job.fate == "silent":
            job.library.unheard += 1
        else:
            _complete(job.ring, job.piece, result)

    def _waits(self, call: Callable[[], None]) -> bool:
        if self.weather.hung:
            self.weather.met["hung"] += 1
            self._held.append(call)
        return self.weather.hung

    def _move(self, job: _Job, start: int, length: int) -> int:
        place = job.piece.start + start
        with job.memory[place : place + length] as part:
            try:
                if job.reads:
                    if self.weather.is_spoilt(self.disk, job.file.number):
                        return -errno.EIO
                    return job.file.read_into(part[: max(0, job.file.size - job.offset - start)], job.offset + start)
                return job.file.write([part], job.offset + start, length)
            except OSError as error:
                return -(error.errno or errno.EIO)

    def _end(self, job: _Job) -> None:
        job.ended = True
        self._jobs.discard(job)
        self.let_go(job.file)


@dataclass
class _Registered:
    inode: File


class Library:
    """`hf3fs_fuse.io` of one process."""

    def __init__(self, daemon: Daemon, process: Process) -> None:
        self.daemon = daemon
        self.process = process
        self.files: dict[int, _Registered] = {}
        self.links: list[str] = []
        """What it has registered, and perhaps taken away since."""
        self.rings = 0
        self.iovs = 0
        self.unheard = 0
        """Operations whose end it never hears of."""

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
        self.files[descriptor] = _Registered(inode)

    def deregister_fd(self, descriptor: int) -> None:
        if self._is_ours(descriptor) and (file := self.files.pop(descriptor, None)) is not None:
            self.daemon.let_go(file.inode)

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
        self.links.append(link)
        self.daemon.map(identity, segment.name)
        return Iovec(self, identity, link, segment.buf.nbytes)

    def make_ioring(
        self, mount: str, entries: int, for_read: bool, io_depth: int, priority: None, timeout: None, numa: int
    ) -> Ring:
        link = f"{self.daemon.registrations}/{uuid.uuid4()}.r"
        self.daemon.calls.symlink(f"{self.daemon.memory.disk.root}/hf3fs-iov-{self.process.number}", link)
        self.links.append(link)
        return Ring(self, link, entries, for_read)

    def _is_ours(self, descriptor: int) -> bool:
        try:
            self.daemon.calls.ioctl(descriptor)
            return self.daemon.calls.opened(descriptor).disk is self.daemon.disk
        except OSError:
            return False

    def _require_unregistered(self, descriptor: int) -> None:
        if descriptor in self.files:
            raise OSError(errno.EINVAL, f"descriptor {descriptor} is registered already")


class Iovec:
    def __init__(self, library: Library, identity: str, link: str, length: int) -> None:
        self.link = link
        self._library = library
        self._identity = identity
        self._length = length
        library.iovs += 1
        self._counted = True

    def __getitem__(self, where: slice) -> Piece:
        start, stop, _ = where.indices(self._length)
        return Piece(self._identity, start, stop - start)

    def __del__(self) -> None:
        library = self._library
        if self._counted:
            self._counted = False
            library.iovs -= 1
        if _is_living(library):
            with contextlib.suppress(GreenletExit):
                os.unlink(self.link)
                library.daemon.unmap(self._identity)


class Piece:
    def __init__(self, identity: str, start: int, length: int) -> None:
        self.identity = identity
        self.start = start
        self.length = length
        self.result = 0

    def __getitem__(self, where: slice) -> Piece:
        start, stop, _ = where.indices(self.length)
        return Piece(self.identity, self.start + start, stop - start)


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
        self.library.rings += 1

    def prepare(self, piece: Piece, read: bool, descriptor: int, offset: int) -> None:
        if read != self.reads or not piece.length:
            raise OSError(errno.EINVAL, f"read={read} of {piece.length} bytes")
        file = self.library.files.get(descriptor)
        if file is None:
            raise OSError(errno.EBADF, f"descriptor {descriptor} is not registered")
        while self._order and self._order[0] not in self._in_flight:
            self._order.popleft()
        if len(self._in_flight) >= self.entries or len(self._order) >= 2 * self.entries:
            raise BlockingIOError(errno.EAGAIN, "no entry is free")
        self._in_flight.add(piece)
        self._order.append(piece)
        self.library.daemon.take(self, piece, file.inode, offset)

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
        self.library.rings -= 1
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
