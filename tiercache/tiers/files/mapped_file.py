"""A chunk file as memory of this process: mapped whole, verified, and read where it lies. Synchronous; for worker threads.

Only for file systems that are memory. A chunk file is never changed nor shortened once it has its name, and to delete it
leaves its pages to those who have mapped them. What somebody else does to it is not kept from us: who shortens the file with
another program has this process killed by SIGBUS at its next look.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

from tiercache.core.compression import Codec
from tiercache.core.header import HEADER_BYTES, PACKED_BYTES
from tiercache.errors import CorruptChunk
from tiercache.tiers.files.access import open_regular
from tiercache.tiers.files.chunk_file import host_checksum, verify_chunk

_MAP_FIXED = 0x10
_MAP_POPULATE = 0x8000
_FAILED = ctypes.c_void_p(-1).value
_lost: list[mmap.mmap] = []
"""Where mapping a file failed: whose those addresses are now nobody knows, so they are never given back."""


def _map_call() -> ctypes._FuncPointer:
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(3 * [ctypes.c_int]), ctypes.c_int64]
    return call


_map = _map_call()


class MappedFile:
    """A verified chunk. Its pages stay as long as somebody has `memory`, or a view of it."""

    __slots__ = ("inode", "memory", "payload_bytes")

    def __init__(self, memory: np.ndarray, payload_bytes: int, inode: tuple[int, int]) -> None:
        self.memory = memory
        """uint8, read-only: the header of 4096 bytes, the payload, its padding."""
        self.payload_bytes = payload_bytes
        self.inode = inode

    def is_at(self, path: str) -> bool:
        """Whether the file still has that name."""
        try:
            status = os.lstat(path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self.inode


def map_chunk_file(path: Path | str, key: bytes, fingerprint: bytes) -> MappedFile:
    """Map and verify the chunk at `path`. Raises as `read_chunk_file`, and OSError (ENOMEM) where nothing can be mapped."""
    descriptor = open_regular(path, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        length_bytes = status.st_size
        if length_bytes <= HEADER_BYTES:
            raise CorruptChunk(f"{path}: length: expected more than {HEADER_BYTES} bytes, found {length_bytes}")
        memory = _mapped(descriptor, length_bytes)
    finally:
        os.close(descriptor)
    checksum = host_checksum(memory[HEADER_BYTES:])
    header = verify_chunk(path, memory[:PACKED_BYTES].data, key, fingerprint, length_bytes, length_bytes, checksum)
    if header.codec is not Codec.PLAIN:
        # Only another tier makes such files. Out of the way, so that the chunk is stored plain the next time.
        raise CorruptChunk(f"{path}: it is compressed, and cannot be read where it lies")
    return MappedFile(memory, header.payload_bytes, (status.st_dev, status.st_ino))


def _mapped(descriptor: int, length_bytes: int) -> np.ndarray:
    """The file's pages, present already. Not Python's own mapping of a file: that keeps a descriptor each."""
    place = mmap.mmap(-1, length_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    memory = np.frombuffer(place, dtype=np.uint8)
    address = memory.ctypes.data
    flags = mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
    if _map(address, length_bytes, mmap.PROT_READ, flags, descriptor, 0) == _FAILED:
        code = ctypes.get_errno()
        _lost.append(place)
        raise OSError(code, os.strerror(code))
    return memory
