"""Map a chunk file, verify it, and read it in place. Synchronous; runs in worker threads.

This is only for file systems in memory. A published chunk file never changes, and its pages outlive its deletion while they
are mapped. If another program shortens a mapped file, the kernel kills this process with SIGBUS at the next access.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tiercache.core.compression import Codec
from tiercache.core.header import HEADER_BYTES, PACKED_BYTES
from tiercache.errors import CorruptChunk
from tiercache.tiers.files.access import Access, open_found
from tiercache.tiers.files.format import host_checksum, verify_chunk

_libc = ctypes.CDLL(None, use_errno=True)
_map, _unmap = _libc.mmap, _libc.munmap
_map.restype = ctypes.c_void_p
_map.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(3 * [ctypes.c_int]), ctypes.c_int64]
_unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value

Inode = tuple[int, int]
"""Device and inode number."""


class _Pages:
    """The pages of a file until their last view is gone. Python's `mmap` would keep a descriptor per file.

    The kernel chooses the address, so that it can map huge pages.
    """

    __slots__ = ("__array_interface__",)

    def __init__(self, descriptor: int, length_bytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {}
        address = _map(None, length_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        read_only = True
        self.__array_interface__ |= {
            "version": 3, "typestr": "|u1", "shape": (length_bytes,), "data": (address, read_only)
        }  # fmt: skip

    def __del__(self, unmap: Callable[[int, int], int] = _unmap) -> None:
        if found := self.__array_interface__:
            unmap(found["data"][0], *found["shape"])


class MappedFile:
    """A verified chunk. Its pages stay mapped until `memory` and all its views are gone."""

    __slots__ = ("inode", "memory", "payload_bytes")

    def __init__(self, memory: np.ndarray, payload_bytes: int, inode: Inode) -> None:
        self.memory = memory
        """uint8, read-only: the header of 4096 bytes, the payload, and padding."""
        self.payload_bytes = payload_bytes
        self.inode = inode


def inode_at(path: str) -> Inode | None:
    """Return the inode at a path, or None. A mapped file keeps its inode number, so an equal one is the same file."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def map_chunk_file(path: Path | str, key: bytes, fingerprint: bytes, access: Access) -> MappedFile:
    """Map and verify the chunk at `path`. Raises like `read_chunk_file`, OSError (ENOMEM) if mapping fails, and
    PermissionError if another user can change the file."""
    descriptor, status = open_found(path, os.O_RDONLY)
    try:
        if not access.owns(status) or status.st_mode & stat.S_IWOTH:
            raise PermissionError(errno.EACCES, "another user can change it", str(path))
        length_bytes = status.st_size
        if length_bytes <= HEADER_BYTES:
            raise CorruptChunk(f"{path}: length: expected more than {HEADER_BYTES} bytes, found {length_bytes}")
        memory = np.asarray(_Pages(descriptor, length_bytes))
    finally:
        os.close(descriptor)
    checksum = host_checksum(memory[HEADER_BYTES:])
    header = verify_chunk(path, memory[:PACKED_BYTES].data, key, fingerprint, length_bytes, length_bytes, checksum)
    if header.codec is not Codec.PLAIN:
        # Only another tier compresses. Its file goes to quarantine, so that the chunk can be stored again.
        raise CorruptChunk(f"{path}: it is compressed, and cannot be read in place")
    return MappedFile(memory, header.payload_bytes, (status.st_dev, status.st_ino))
