"""Pipes and epoll for the event bridge, whose one use for them is to be told that somebody has closed the other end."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tiercache.testing.simulation.process import Killed, Process

if TYPE_CHECKING:
    from tiercache.testing.simulation.world import World

_FIRST = 2_000_000
_CLOSE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Pipe:
    def __init__(self, process: Process) -> None:
        self.process = process
        self.ends: set[int] = set()
        self.hung_up = False
        self.watcher: Epoll | None = None


class Pipes:
    """Of one world. What a process has open goes with it."""

    def __init__(self, world: World, fails: Callable[[], bool]) -> None:
        """`fails`: whether there is no file for another pipe at this moment."""
        self.world = world
        self.by_end: dict[int, tuple[_Pipe, bool]] = {}
        """Each end's pipe, and whether one reads from it."""
        self.epolls: dict[int, Epoll] = {}
        self._fails = fails
        self._numbers = itertools.count(_FIRST)
        self._native_close = _CLOSE(self._closed_by_driver)
        self.ctypes = _Ctypes(self._native_close)
        """Stands in for `ctypes`, as far as it finds libc's close."""

    def left_by(self, process: Process) -> list[int]:
        """What it has open."""
        own = [end for end, (pipe, _) in self.by_end.items() if pipe.process is process]
        return own + [number for number, epoll in self.epolls.items() if epoll.process is process]

    def die(self, process: Process) -> None:
        for number in self.left_by(process):
            self.by_end.pop(number, None)
            self.epolls.pop(number, None)

    def pipe2(self, flags: int) -> tuple[int, int]:
        process = self.caller()
        if self._fails():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        pipe = _Pipe(process)
        pipe.ends = {next(self._numbers), next(self._numbers)}
        read_end, write_end = sorted(pipe.ends)
        self.by_end[read_end] = pipe, True
        self.by_end[write_end] = pipe, False
        return read_end, write_end

    def close(self, descriptor: int) -> None:
        if descriptor not in self.by_end:
            if descriptor >= _FIRST:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            os.close(descriptor)
            return
        pipe, reads = self.by_end.pop(descriptor)
        if reads and pipe.watcher is not None:
            pipe.watcher.ends.pop(descriptor, None)
        if not reads:
            pipe.hung_up = True
            if pipe.watcher is not None:
                pipe.watcher.notify()

    def epoll(self) -> Epoll:
        epoll = Epoll(self, next(self._numbers), self.caller())
        self.epolls[epoll.number] = epoll
        return epoll

    def caller(self) -> Process:
        strand = self.world.current
        assert strand is not None
        if not strand.process.alive:
            raise Killed
        return strand.process

    def _closed_by_driver(self, descriptor: int) -> None:
        strand = self.world.current
        if strand is not None and strand.process.alive:
            self.close(descriptor)


class Epoll:
    """As `select.epoll`, for hang-ups alone."""

    def __init__(self, pipes: Pipes, number: int, process: Process) -> None:
        self.number = number
        self.process = process
        self.ends: dict[int, _Pipe] = {}
        self._pipes = pipes
        self._told = False

    def fileno(self) -> int:
        return self.number

    def register(self, descriptor: int, events: int) -> None:
        pipe, _ = self._pipes.by_end[descriptor]
        self.ends[descriptor] = pipe
        pipe.watcher = self
        if pipe.hung_up:
            self.notify()

    def unregister(self, descriptor: int) -> None:
        self.ends.pop(descriptor).watcher = None

    def poll(self, timeout: float, most: int) -> list[tuple[int, int]]:
        self._told = False
        found = [(descriptor, select.EPOLLHUP) for descriptor, pipe in self.ends.items() if pipe.hung_up]
        if len(found) > most:
            self.notify()
        return found[:most]

    def close(self) -> None:
        self._pipes.epolls.pop(self.number, None)

    def notify(self) -> None:
        loop = self.process.loop
        if not self._told and self.process.alive and loop is not None and not loop.is_closed():
            self._told = True
            loop.readable(self.number)


class _Ctypes:
    def __init__(self, close: Any) -> None:
        self._close = close

    def CDLL(self, name: None) -> _Ctypes:
        return self

    @property
    def close(self) -> Any:
        return self._close

    def __getattr__(self, name: str) -> Any:
        return getattr(ctypes, name)
