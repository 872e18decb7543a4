"""`hf3fs_fuse.io`: the layer that clients use, over the native module's objects."""

from __future__ import annotations

import os
import uuid
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from tests.hf3fs_emulator.client import buffers, rings
from tests.hf3fs_emulator.client.descriptors import deregister_fd, register_fd
from tests.hf3fs_emulator.client.mounts import extract_mount_point, force_fsync
from tests.hf3fs_emulator.wire import SHARED_MEMORY, VIRTUAL_DIRECTORY

__all__ = [
    "deregister_fd",
    "extract_mount_point",
    "force_fsync",
    "ioring",
    "iovec",
    "make_ioring",
    "make_iovec",
    "register_fd",
]


class iovec:
    """A registered buffer. Slices of it do not keep it: when it goes, the registration goes, and transfers fail."""

    def __init__(self, iov: buffers.iovec, link: str) -> None:
        self.iov = iov
        self.link = link

    def __del__(self) -> None:
        self.iov.release()
        os.unlink(self.link)

    def __getitem__(self, slice: slice) -> buffers.iovec:
        return self.iov[slice]

    def __setitem__(self, slice: slice, val: Any) -> None:
        self.iov[slice] = val  # type: ignore[index]  # upstream's, which raises TypeError: the native iovec has no such thing


class ioring:
    def __init__(self, ior: rings.ioring) -> None:
        self.ior = ior

    @staticmethod
    def size_for_entries(entries: int) -> int:
        return rings.ioring.size_for_entries(entries)

    def prepare(self, iov: iovec | buffers.iovec, *args: Any, **kwargs: Any) -> rings.ioring:
        return self.ior.prepare(iov.iov if type(iov) is iovec else iov, *args, **kwargs)  # type: ignore[arg-type]

    def submit(self) -> rings.ioring:
        return self.ior.submit()

    def wait(
        self, *, max_results: int = 0, min_results: int = 0, timeout: timedelta | float | None = None
    ) -> list[buffers.iovec]:
        return self.ior.wait(max_results=max_results, min_results=min_results, timeout=timeout)


def make_iovec(shm: SharedMemory, hf3fs_mount_point: str, block_size: int = 0, numa: int = -1) -> iovec:
    """Register `shm`. A transfer must lie within one block of `block_size`; 0 makes the whole one block. Raises OSError."""
    identity = str(uuid.uuid4())
    target = os.path.normpath(f"{SHARED_MEMORY}/{shm.name}")
    blocks = f".b{block_size}" if block_size > 0 else ""
    link = f"{hf3fs_mount_point}/{VIRTUAL_DIRECTORY}/iovs/{identity}{blocks}"
    os.symlink(target, link)
    return iovec(buffers.iovec(shm.buf, identity, hf3fs_mount_point, block_size, numa), link)


def make_ioring(
    hf3fs_mount_point: str,
    entries: int,
    for_read: bool = True,
    io_depth: int = 0,
    priority: int | None = None,
    timeout: int | None = None,
    numa: int = -1,
    flags: int = 0,
) -> ioring:
    """A ring of `entries` operations; see `ioring` of the native module. Raises OSError."""
    return ioring(rings.ioring(hf3fs_mount_point, entries, for_read, io_depth, priority, timeout, numa, flags))
