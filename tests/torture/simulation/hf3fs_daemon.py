"""A mount of 3FS: its weather, and the daemon over a simulated disk. Who asks is in `usrbio.py`.

The daemon is no process of the run: it serves at the world's instants, and what a process asked of it goes on when that has
died. Its traps are those of the real one (see tests.hf3fs_emulator.client): descriptors are known by number, a piece does
not keep its buffer, an operation keeps the memory mapped for as long as it may write to it, and one that takes long holds
back the room of all that came after it.

The daemon keeps no object of a process: whose last reference that was would make calls where the daemon drops it.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.torture.simulation.disk import Disk
from tests.torture.simulation.inodes import Directory, File
from tests.torture.simulation.process import Process
from tests.torture.simulation.shared_memory import SharedMemory
from tests.torture.simulation.weather import Weather
from tests.torture.simulation.world import World

if TYPE_CHECKING:
    from tests.torture.simulation.files import FileCalls

_VIRTUAL = "3fs-virt"
_SERVES_S = 60e-6
_SLOW_S = 0.05
_LATE_S = 15.0


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


class Piece:
    """Of a buffer that is registered."""

    def __init__(self, identity: str, start: int, length: int) -> None:
        self.identity = identity
        self.start = start
        self.length = length
        self.result = 0

    def __getitem__(self, where: slice) -> Piece:
        start, stop, _ = where.indices(self.length)
        return Piece(self.identity, self.start + start, stop - start)


@dataclass(eq=False)
class Client:
    """What a process has at the daemon."""

    files: dict[int, File] = field(default_factory=dict)
    """Those that its rings know, by their descriptors."""
    stale: set[int] = field(default_factory=set)
    """Descriptors of those that a daemon knew that has died. They stay known until their numbers are used again."""
    links: list[str] = field(default_factory=list)
    """What it has registered, and perhaps taken away since."""
    rings: int = 0
    iovs: int = 0
    unheard: int = 0
    """Operations whose end it never hears of."""
    behind: bool = False
    """True if its daemon has died, and it has not made rings of the next one yet: the call that notices this fails."""


@dataclass(eq=False)
class _Job:
    """An operation on its way through the daemon."""

    client: Client
    complete: Callable[[int], None]
    """Called with the result, if a client is left to get it."""
    reads: bool
    piece: Piece
    file: File
    offset: int
    memory: memoryview
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
        self.clients: dict[Process, Client] = {}
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
        for client in self.clients.values():
            for descriptor in sorted(client.files.keys() - client.stale):
                self.let_go(client.files[descriptor])
            client.stale = set(client.files)
            client.behind |= client.rings > 0
        for job in list(self._jobs):
            self._end(job)
        self.calls.sever(self.disk)

    def go_on(self) -> None:
        held, self._held = self._held, []
        for serve in held:
            self.world.at(self.world.now_s, serve)

    def forget(self, process: Process) -> None:
        """It has died, and what it had registered goes with it. What it asked for goes on."""
        client = self.clients.pop(process, None)
        if client is not None:
            for link in client.links:
                directory, name, found = self.disk.place(link)
                if found is not None:
                    self.disk.remove(directory, name, found)
                self.unmap(name)
            for descriptor in sorted(client.files.keys() - client.stale):
                self.let_go(client.files[descriptor])

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

    def take(
        self,
        client: Client,
        generation: int,
        piece: Piece,
        file: File,
        offset: int,
        *,
        reads: bool,
        complete: Callable[[int], None],
    ) -> None:
        """`generation`: of the daemon that knew the ring."""
        weather = self.weather
        memory = self._iovs.get(piece.identity)
        if weather.dead or generation != self.generation:
            return
        if memory is None:
            self.world.at(self.world.now_s + _SERVES_S, lambda: complete(-errno.EINVAL))
            return
        fates = ("silent", "stuck", "late", "ring-error", "ring-short")
        fate = next((kind for kind in fates if weather.strikes(kind)), "")
        job = _Job(client, complete, reads, piece, file, offset, memory, fate)
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
            job.client.unheard += 1
        else:
            job.complete(result)

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
