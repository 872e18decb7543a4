"""The smallest client that keeps the rules, for tests to break them one at a time."""

import os
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import pytest
from hf3fs_fuse.io import deregister_fd, make_ioring, make_iovec, register_fd

from tests.hf3fs_emulator import Hf3fsEmulator

BUFFER_BYTES = 1 << 20
PATIENCE_S = 20.0
"""For what must happen. A test that waits this long has failed."""


class Client:
    def __init__(self, emulator: Hf3fsEmulator, block_size: int = 0) -> None:
        self.mount = emulator.mount
        self.shm = SharedMemory(create=True, size=BUFFER_BYTES)
        self.memory = self.shm.buf
        self.iov = make_iovec(self.shm, str(self.mount), block_size)
        self._descriptors: list[int] = []

    def ring(self, for_read: bool = True, entries: int = 8, **settings: Any) -> Any:
        return make_ioring(str(self.mount), entries, for_read, **settings)

    def file(self, name: str, content: bytes = b"") -> str:
        (self.mount / name).write_bytes(content)
        return str(self.mount / name)

    def open(self, name: str, flags: int, content: bytes | None = None) -> int:
        """A registered descriptor, deregistered and closed at the end."""
        if content is not None:
            self.file(name, content)
        descriptor = os.open(self.mount / name, flags)
        register_fd(descriptor)
        self._descriptors.append(descriptor)
        return descriptor

    def close_descriptor(self, descriptor: int) -> None:
        self._descriptors.remove(descriptor)
        deregister_fd(descriptor)
        os.close(descriptor)

    def close(self) -> None:
        for descriptor in list(self._descriptors):
            self.close_descriptor(descriptor)
        del self.iov, self.memory
        self.shm.close()
        self.shm.unlink()


def run(ring: Any, piece: Any, read: bool, descriptor: int, offset: int = 0) -> int:
    """One operation from beginning to end; its result."""
    ring.prepare(piece, read, descriptor, offset)
    (done,) = ring.submit().wait(min_results=1, timeout=PATIENCE_S)
    assert done is piece
    return done.result


def fails(number: int) -> pytest.RaisesExc[OSError]:
    """A context in which an OSError with this errno must come."""
    return pytest.raises(OSError, match=rf"\[Errno {number}\]")
