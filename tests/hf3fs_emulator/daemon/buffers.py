"""The I/O buffers and rings registered below `3fs-virt/iovs`, each in the shared memory of a client."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from dataclasses import dataclass

from tests.hf3fs_emulator.daemon.served_ring import ServedRing
from tests.hf3fs_emulator.ring_memory import RingMemory
from tests.hf3fs_emulator.wire import SHARED_MEMORY, Registration, entries_in, parse_registration


@dataclass
class Buffer:
    memory: memoryview
    block_bytes: int

    def piece(self, offset: int, length: int) -> memoryview | None:
        """The part to transfer; None where it leaves the buffer or crosses from one block into another."""
        if offset + length > len(self.memory):
            return None
        if offset // self.block_bytes != (offset + length - 1) // self.block_bytes:
            return None
        return self.memory[offset : offset + length]


@dataclass
class _Entry:
    registration: Registration
    target: str
    pid: int


class Buffers:
    def __init__(self, *, negative_io_depth: bool = True) -> None:
        self._negative_io_depth = negative_io_depth
        self._lock = threading.Condition()
        self._entries: dict[str, _Entry] = {}
        self._buffers: dict[bytes, Buffer] = {}
        self._rings: dict[bytes, ServedRing] = {}

    def register(self, name: str, target: str, pid: int) -> None:
        """Raises OSError as a `symlink` into `iovs` does: EINVAL, EEXIST."""
        try:
            registration = parse_registration(name)
        except ValueError as error:
            raise OSError(errno.EINVAL, str(error)) from None
        if registration.ring is not None and registration.ring.io_depth < 0 and not self._negative_io_depth:
            raise OSError(errno.EINVAL, f"{name}: this daemon refuses a negative io_depth")
        with self._lock:
            if any(entry.registration.id == registration.id for entry in self._entries.values()):
                raise OSError(errno.EEXIST, f"{name} is registered already")
            memory = _map(target, registration)
            if registration.ring is None:
                block_bytes = registration.block_bytes or len(memory)
                self._buffers[registration.id] = Buffer(memoryview(memory), block_bytes)
            else:
                self._rings[registration.id] = ServedRing(RingMemory(memory), registration.ring)
            self._entries[name] = _Entry(registration, target, pid)
            self._lock.notify_all()

    def unregister(self, name: str) -> None:
        """Transfers that are under way keep the memory until they end. Raises OSError: ENOENT."""
        with self._lock:
            entry = self._entries.pop(name, None)
            if entry is None:
                raise OSError(errno.ENOENT, f"{name} is not registered")
            self._buffers.pop(entry.registration.id, None)
            self._rings.pop(entry.registration.id, None)
            self._lock.notify_all()

    def forget_process(self, pid: int) -> None:
        """A client died: nobody else will take its registrations away."""
        for name in [name for name, entry in list(self._entries.items()) if entry.pid == pid]:
            self.unregister(name)

    def names(self) -> list[str]:
        return list(self._entries)

    def target(self, name: str) -> str | None:
        entry = self._entries.get(name)
        return None if entry is None else entry.target

    def find(self, buffer_id: bytes) -> Buffer | None:
        return self._buffers.get(buffer_id)

    def rings(self, priority: int) -> list[ServedRing]:
        return [ring for ring in list(self._rings.values()) if ring.traits.priority == priority]

    def counts(self) -> tuple[int, int]:
        """(buffers, rings)"""
        return len(self._buffers), len(self._rings)

    def until(self, buffers: int, rings: int) -> None:
        """Wait until exactly so many are registered."""
        with self._lock:
            self._lock.wait_for(lambda: self.counts() == (buffers, rings))


def _map(target: str, registration: Registration) -> mmap.mmap:
    path = os.path.normpath(target)
    if os.path.dirname(path) != SHARED_MEMORY:
        raise OSError(errno.EINVAL, f"{target} is not in {SHARED_MEMORY}")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise OSError(errno.EINVAL, f"{target}: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
            raise OSError(errno.EINVAL, f"{target} is not a piece of shared memory")
        if registration.block_bytes > status.st_size:
            raise OSError(errno.EINVAL, f"blocks of {registration.block_bytes} in {status.st_size} bytes")
        if registration.ring is not None:
            entries = entries_in(status.st_size)
            if entries <= 0 or registration.ring.io_depth > entries:
                raise OSError(errno.EINVAL, f"io_depth {registration.ring.io_depth} in a ring of {entries} entries")
        # Populated now, where the real one pins the pages for its network card: no transfer pays for a page fault.
        return mmap.mmap(descriptor, status.st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)
