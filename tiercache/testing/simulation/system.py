"""The simulation in the place of the operating system, for as long as a run lasts.

Modules of tiercache get a simulated `threading`, `time`, `random` and `fcntl`; of `os`, the calls that name a simulated file
or descriptor, and those for randomness and the process's number, are answered here whoever makes them. Everything else goes
to the real system.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from tiercache.testing.simulation.descriptors import FIRST_DESCRIPTOR
from tiercache.testing.simulation.files import FileCalls
from tiercache.testing.simulation.process import Killed, Process
from tiercache.testing.simulation.threads import Threads
from tiercache.testing.simulation.world import World

ROOT = "/simulated"
"""All simulated disks are mounted below it."""
_EPOCH_S = 1_700_000_000.0
_PAGE_BYTES = 4096
_FILE_CALLS = (
    *("access", "chmod", "close", "fchmod", "fdatasync", "fstat", "fsync", "ftruncate", "link", "listdir", "lstat"),
    *("mkdir", "makedirs", "open", "posix_fadvise", "pread", "preadv", "pwrite", "pwritev", "read", "readlink"),
    *("remove", "rename", "replace", "rmdir", "scandir", "stat", "statvfs", "symlink", "unlink", "utime", "write"),
)
_OURS = "tiercache."
_NOT_OURS = "tiercache.testing.simulation"


class Stand:
    """A module's stand-in: some names of our own, the others its own."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class System:
    """What the simulated processes find. `calls.process` and the world's current strand say who asks."""

    def __init__(self, world: World, calls: FileCalls, stumble: Callable[[], None]) -> None:
        self.world = world
        self.calls = calls
        self.threads = Threads(world, stumble)
        self._thread = threading.get_ident()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put it in the place of the real one, in this process; not in two runs at a time."""
        with contextlib.ExitStack() as stack:
            for module in [module for name, module in sys.modules.items() if _is_ours(name)]:
                for name, value in list(vars(module).items()):
                    replacement = self._instead_of(value)
                    if replacement is not None:
                        stack.enter_context(changed(module, name, replacement))
            for name in _FILE_CALLS:
                stack.enter_context(changed(os, name, self._file_call(name)))
            stack.enter_context(changed(os, "urandom", self._urandom(os.urandom)))
            stack.enter_context(changed(os, "getpid", self._getpid(os.getpid)))
            for module_name, function, answer in (
                ("tiercache.tiers.allocation", "_fallocate", self._fallocate),
                ("tiercache.tiers.naming", "_renameat2", self._renameat2),
            ):
                module = sys.modules[module_name]
                stack.enter_context(changed(module, function, answer))
            # An arena is rounded up to huge pages: a handful of slots would be 512.
            stack.enter_context(changed(sys.modules["tiercache.memory.arena"], "HUGE_PAGE_BYTES", _PAGE_BYTES))
            yield

    def _instead_of(self, value: Any) -> Any:
        threads = self.threads
        if value is threading:
            return Stand(
                threading,
                Thread=threads.Thread,
                Lock=threads.Lock,
                RLock=threads.RLock,
                Event=threads.Event,
                Condition=threads.Condition,
                Semaphore=threads.Semaphore,
                BoundedSemaphore=threads.BoundedSemaphore,
                local=threads.local,
            )
        if value is time:
            now = self._now
            return Stand(
                time,
                monotonic=now,
                perf_counter=now,
                monotonic_ns=lambda: int(now() * 1e9),
                time=lambda: _EPOCH_S + now(),
                time_ns=lambda: int((_EPOCH_S + now()) * 1e9),
                sleep=self._sleep,
            )
        if value is random:
            return self.world.chance
        if value is fcntl:
            return Stand(fcntl, flock=self._flock)
        if value is queue.SimpleQueue:
            return threads.SimpleQueue
        if type(value) is threading.local:
            return threads.local()
        return None

    def _now(self) -> float:
        return self.world.now_s

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
        owns = self._owns
        process = self._process

        def call(target: Any, *arguments: Any, **named: Any) -> Any:
            if owns(target) or (named and owns(named.get("dir_fd"))):
                process()
                return answer(target, *arguments, **named)
            return real(target, *arguments, **named)

        def call_of_any(*arguments: Any, **named: Any) -> Any:  # of those that may be called without a path
            return call(*arguments, **named) if arguments else real(**named)

        return call_of_any if name in ("listdir", "scandir") else call

    def _owns(self, target: Any) -> bool:
        if type(target) is int:
            return target >= FIRST_DESCRIPTOR
        if type(target) is str:
            return target.startswith(ROOT)
        if isinstance(target, bytes):
            return os.fsdecode(target).startswith(ROOT)
        if isinstance(target, os.PathLike):
            return str(target).startswith(ROOT)
        return False

    def _flock(self, descriptor: Any, operation: int) -> None:
        if self._owns(descriptor):
            self._process()
            self.calls.flock(descriptor, operation)
        else:
            fcntl.flock(descriptor, operation)

    def _fallocate(self, descriptor: int, mode: int, offset: Any, length: Any) -> int:
        self._process()
        return _as_in_c(self.calls.fallocate, descriptor, mode, offset.value, length.value)

    def _renameat2(self, from_directory: int, old: bytes, to_directory: int, new: bytes, flags: int) -> int:
        self._process()
        return _as_in_c(self.calls.rename_new, os.fsdecode(old), os.fsdecode(new))

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


def _as_in_c(call: Callable[..., object], *arguments: Any) -> int:
    """0, or -1 with errno."""
    try:
        call(*arguments)
    except OSError as error:
        ctypes.set_errno(error.errno or 0)
        return -1
    return 0


def _is_ours(name: str) -> bool:
    return name.startswith(_OURS) and not name.startswith(_NOT_OURS)


@contextmanager
def changed(place: Any, name: str, value: Any) -> Iterator[None]:
    """`place.name` is `value` for so long."""
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)
