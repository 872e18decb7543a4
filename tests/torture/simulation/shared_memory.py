"""/dev/shm of a simulated machine: names, locks and leases are simulated, the memory behind a file is real."""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.torture.simulation.descriptors import FIRST_DESCRIPTOR
from tests.torture.simulation.disk import Disk

if TYPE_CHECKING:
    from tests.torture.simulation.files import FileCalls

_BYTES = 256 << 20


class SharedMemory:
    def __init__(self, root: str, now: Callable[[], float]) -> None:
        self.path = Path(root)
        self.disk = Disk(root, _BYTES, now)
        self.calls: FileCalls
        self.is_mapped_elsewhere: Callable[[mmap.mmap], bool] = lambda memory: False
        self._by_number: dict[int, mmap.mmap] = {}
        self._numbers = itertools.count(1)

    def memory_of(self, name: str) -> mmap.mmap:
        """Return the memory of the file with this name. Raises OSError."""
        return self._by_number[self.disk.find(f"{self.disk.root}/{name}").number]

    def cut_power(self) -> None:
        self.disk.remove_all(self.disk.root)
        self._by_number.clear()

    # What stands in for the system's calls

    def mmap(self, descriptor: int, length: int, **named: Any) -> mmap.mmap:
        if descriptor < FIRST_DESCRIPTOR:
            return mmap.mmap(descriptor, length, **named)
        memory = mmap.mmap(-1, length)
        self._by_number[self.calls.opened(descriptor).inode.number] = memory
        return memory

    def fcntl(self, descriptor: int, command: int, argument: int = 0) -> int:
        """F_SETLEASE for writing is refused while another process has the file mapped."""
        if descriptor < FIRST_DESCRIPTOR:
            return fcntl.fcntl(descriptor, command, argument)
        memory = self._by_number.get(self.calls.opened(descriptor).inode.number)
        wants_lease = command == fcntl.F_SETLEASE and argument == fcntl.F_WRLCK
        if wants_lease and memory is not None and self.is_mapped_elsewhere(memory):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return 0

    def mkstemp(self, prefix: str = "tmp") -> tuple[int, str]:
        path = f"{self.disk.root}/{prefix}{next(self._numbers)}"
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), path
