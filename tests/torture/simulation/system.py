"""The simulation in the place of the operating system, for as long as a run lasts.

Modules of tiercache get a simulated `threading`, `time`, `random` and `fcntl`; of `os`, the calls that name a simulated file
or descriptor, and those for randomness and the process's number, are answered here for every caller. Everything else goes to
the real system.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import functools
import importlib
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import PosixPath
from types import ModuleType
from typing import Any

from tests.torture.simulation.descriptors import FIRST_DESCRIPTOR
from tests.torture.simulation.files import FileCalls
from tests.torture.simulation.gathering import gather
from tests.torture.simulation.process import Killed, Process
from tests.torture.simulation.threads import Threads
from tests.torture.simulation.world import World

ROOT = "/simulated"
"""All simulated disks are mounted below it."""
_EPOCH_S = 1_700_000_000.0
_PAGE_BYTES = 4096
_FILE_CALLS = (
    *("close", "fdatasync", "fstat", "fsync", "ftruncate", "link", "listdir", "lstat", "mkdir", "open", "posix_fadvise"),
    *("pread", "preadv", "pwrite", "pwritev", "readlink", "rename", "replace", "scandir", "stat", "statvfs", "unlink"),
    "write",
)
_REPLACED = (asyncio, threading, time, random, fcntl, queue.SimpleQueue)
_OURS = "tiercache."


class Stand:
    """A module's stand-in: some names of our own, the others its own."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        self._module = module
        vars(self).update(vars(module), **names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class System:
    """What the simulated processes find. `calls.process` and the world's current strand say who asks."""

    def __init__(self, world: World, calls: FileCalls, stumble: Callable[[], None], also: Collection[str] = ()) -> None:
        """`also`: packages and modules besides tiercache's that run in the simulation; they are imported by now."""
        self.also = also
        self.world = world
        self.calls = calls
        self.threads = Threads(world, stumble)
        self._thread = threading.get_ident()
        self._stands = self._all_stands()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put it in the place of the real one, in this process; not in two runs at a time."""
        with contextlib.suppress(ImportError):
            # It makes a lock between processes when it is first asked: of this process, not of a simulated one.
            importlib.import_module("numcodecs.blosc").get_mutex()
        with contextlib.ExitStack() as stack:
            for module, name, value in _replaceable(len(sys.modules), tuple(self.also)):
                stack.enter_context(changed(module, name, self._instead_of(value)))
            for name in _FILE_CALLS:
                stack.enter_context(changed(os, name, self._file_call(name)))
            stack.enter_context(changed(os, "urandom", self._urandom(os.urandom)))
            stack.enter_context(changed(os, "getpid", self._getpid(os.getpid)))
            for module_name, function, answer in (
                ("tiercache.tiers.files.format", "_fallocate", self._fallocate),
                ("tiercache.tiers.files.access", "_renameat2", self._renameat2),
            ):
                module = sys.modules[module_name]
                stack.enter_context(changed(module, function, answer))
            # An arena is rounded up to huge pages: a handful of slots would be 512.
            stack.enter_context(changed(sys.modules["tiercache.memory.arena"], "HUGE_PAGE_BYTES", _PAGE_BYTES))
            yield

    def _instead_of(self, value: Any) -> Any:
        if type(value) is threading.local:
            return self.threads.local()
        return self._stands[value]

    def _all_stands(self) -> dict[Any, Any]:
        threads = self.threads
        now, wall = self._now, self.wall_s
        return {
            asyncio: Stand(asyncio, gather=gather),
            threading: Stand(
                threading,
                Thread=threads.Thread,
                Lock=threads.Lock,
                RLock=threads.RLock,
                Event=threads.Event,
                Semaphore=threads.Semaphore,
                BoundedSemaphore=threads.BoundedSemaphore,
                local=threads.local,
                get_ident=self._get_ident,
            ),
            time: Stand(
                time,
                monotonic=now,
                perf_counter=now,
                monotonic_ns=lambda: int(now() * 1e9),
                time=wall,
                time_ns=lambda: int(wall() * 1e9),
                sleep=self._sleep,
            ),
            random: self.world.chance,
            fcntl: Stand(fcntl, flock=self._flock, ioctl=self._ioctl),
            queue.SimpleQueue: threads.SimpleQueue,
        }

    def _get_ident(self) -> int:
        strand = self.world.current
        return threading.get_ident() if strand is None else strand.number

    def _now(self) -> float:
        return self.world.now_s

    def wall_s(self) -> float:
        """What clocks on the wall say, which may be wrong."""
        return _EPOCH_S + self.world.now_s + self.world.clock_error_s

    def _sleep(self, seconds: float) -> None:
        self._process()
        self.world.pause(seconds)

    def _process(self) -> Process | None:
        """Who asks; None where it is nobody of the simulation. Raises Killed where it has died."""
        strand = self.world.current
        if strand is None:
            return None
        if not strand.process.alive:
            raise Killed
        return strand.process

    def _file_call(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)
        answer = getattr(self.calls, name)
        world = self.world

        def call(*arguments: Any, **named: Any) -> Any:
            target: Any = arguments[0] if arguments else None
            kind = type(target)
            if kind is PosixPath:
                target, kind = str(target), str
                arguments = (target, *arguments[1:])
            if kind is int:
                ours = target >= FIRST_DESCRIPTOR
            elif kind is str:
                ours = target.startswith(ROOT)
            else:
                ours = _is_simulated(target)
            if not ours and named:
                at = named.get("dir_fd", named.get("src_dir_fd"))
                ours = type(at) is int and at >= FIRST_DESCRIPTOR
            if ours:
                strand = world.current
                if strand is not None and not strand.process.alive:
                    raise Killed
                return answer(*arguments, **named)
            return real(*arguments, **named)

        return call

    def _flock(self, descriptor: Any, operation: int) -> None:
        if _is_simulated(descriptor):
            self._process()
            self.calls.flock(descriptor, operation)
        else:
            fcntl.flock(descriptor, operation)

    def _ioctl(self, descriptor: Any, request: int, *arguments: Any) -> Any:
        if _is_simulated(descriptor):
            self._process()
            return self.calls.ioctl(descriptor, request, *arguments)
        return fcntl.ioctl(descriptor, request, *arguments)

    def _fallocate(self, descriptor: int, mode: int, offset: Any, length: Any) -> int:
        self._process()
        return _as_in_c(self.calls.fallocate, descriptor, mode, offset.value, length.value)

    def _renameat2(self, from_directory: int, old: bytes, to_directory: int, new: bytes, flags: int) -> int:
        self._process()
        at = (None, None) if from_directory < 0 else (from_directory, to_directory)
        return _as_in_c(self.calls.rename_new, os.fsdecode(old), os.fsdecode(new), *at)

    def _urandom(self, real: Callable[[int], bytes]) -> Callable[[int], bytes]:
        def urandom(size: int) -> bytes:
            if self.world.current is None or threading.get_ident() != self._thread:
                return real(size)
            return self.world.chance.randbytes(size)

        return urandom

    def _getpid(self, real: Callable[[], int]) -> Callable[[], int]:
        def getpid() -> int:
            strand = self.world.current
            return real() if strand is None or threading.get_ident() != self._thread else strand.process.number

        return getpid


def _is_simulated(target: Any) -> bool:
    """A descriptor or a path, of whatever type."""
    if isinstance(target, int):
        return target >= FIRST_DESCRIPTOR
    if isinstance(target, (str, bytes, os.PathLike)):
        return os.fsdecode(target).startswith(ROOT)
    return False


def _as_in_c(call: Callable[..., object], *arguments: Any) -> int:
    """0, or -1 with errno."""
    try:
        call(*arguments)
    except OSError as error:
        ctypes.set_errno(error.errno or 0)
        return -1
    return 0


@functools.lru_cache(maxsize=1)
def _replaceable(imported: int, also: tuple[str, ...]) -> list[tuple[ModuleType, str, Any]]:
    """The names in our modules, of which there are so many with all others, that get something else."""
    return [
        (module, name, value)
        for module_name, module in sys.modules.items()
        if _is_ours(module_name, also)
        for name, value in vars(module).items()
        if type(value) is threading.local or any(value is each for each in _REPLACED)
    ]


def _is_ours(name: str, also: tuple[str, ...]) -> bool:
    if any(name == each or name.startswith(f"{each}.") for each in also):
        return True
    return name.startswith(_OURS)


@contextmanager
def changed(place: Any, name: str, value: Any) -> Iterator[None]:
    """`place.name` is `value` for so long."""
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)
