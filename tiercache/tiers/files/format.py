"""The chunk file: a header of 4096 bytes, the payload, and zero padding to a multiple of 4096 bytes.

`write_chunk_file` and `read_chunk_file` move header and payload in one `pwritev` or `preadv`, with O_DIRECT where the file
system supports it, and verify what they read. `reserve`, `spread` and `DeviceTurns` keep writes fast. Synchronous; runs in
worker threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tiercache.core.header import (
    HEADER_BYTES,
    PACKED_BYTES,
    Header,
    HeaderError,
    aligned,
    file_bytes,
    payload_checksum,
)
from tiercache.errors import CorruptChunk
from tiercache.tiers.files.access import file_system_of, occupied_bytes, open_file

_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_CANNOT = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_GET_FLAGS = 0x80086601
_SET_FLAGS = 0x40086602
"""FS_IOC_GETFLAGS and FS_IOC_SETFLAGS; wrong numbers on some processors are harmless."""
_TOP = 0x20000
"""FS_TOPDIR_FL, `chattr +T`."""
_HINTED = ("ext2", "ext3", "ext4")


def reserve(descriptor: int, length_bytes: int) -> None:
    """Call fallocate(2) for the first `length_bytes`, where supported. Raises OSError (ENOSPC).

    posix_fallocate would write a byte into each block where the call is missing (NFS before 4.2, CephFS).
    """
    if _fallocate is None:
        return
    while _fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(length_bytes)):
        code = ctypes.get_errno()
        if code in _CANNOT:
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def spread(directory: Path) -> None:
    """Ask the file system to place the subdirectories of `directory` apart, where supported. Does not raise.

    ext4 skips recently freed inodes one by one for each new file. If all directories share one inode group, these include
    every recently evicted chunk.
    """
    with contextlib.suppress(OSError):
        if file_system_of(directory) not in _HINTED:
            return
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            flags = int.from_bytes(fcntl.ioctl(descriptor, _GET_FLAGS, bytes(8))[:4], sys.byteorder)
            fcntl.ioctl(descriptor, _SET_FLAGS, (flags | _TOP).to_bytes(8, sys.byteorder))
        finally:
            os.close(descriptor)


_PATIENCE_S = 0.05
"""Longest wait of a write for its turn, which bounds the effect of hung writes."""
LARGE_BYTES = 1 << 20
"""Smaller writes need no turn: a few of them do not keep a device busy."""


class DeviceTurns:
    """Limits concurrent large writes. Writes that share a device end together and would all wait for the commit at once;
    with a limit, others use the device meanwhile.
    """

    def __init__(self, places: int) -> None:
        """`places`: concurrent writes."""
        self._places = threading.Semaphore(places)

    @contextmanager
    def taken(self, length_bytes: int) -> Iterator[None]:
        """Hold a place during a write of `length_bytes`, or none if it takes too long to get one."""
        is_ours = length_bytes >= LARGE_BYTES and self._places.acquire(timeout=_PATIENCE_S)
        try:
            yield
        finally:
            if is_ours:
                self._places.release()


_thread = threading.local()


def write_chunk_file(
    path: Path | str, header: Header, payload: np.ndarray, *, direct: bool, durable: bool, turns: DeviceTurns | None = None
) -> int:
    """Create `path`, which must not exist, with a chunk. Return the bytes that it occupies.

    `payload` is uint8, page-aligned, zero-padded to a multiple of 4096. `durable` adds fdatasync. On error the file is
    removed. The write holds a place of `turns`, if given.
    """
    total_bytes = file_bytes(header.payload_bytes)
    with created(path, os.O_WRONLY | (os.O_DIRECT if direct else 0), total_bytes) as descriptor:
        buffers = [memoryview(_header_buffer(header)), payload[: total_bytes - HEADER_BYTES].data]
        with contextlib.nullcontext() if turns is None else turns.taken(total_bytes):
            written = os.pwritev(descriptor, buffers, 0)
        while written < total_bytes:
            if written < HEADER_BYTES or written % 4096:
                raise OSError(errno.EIO, f"short write: {written} of {total_bytes} bytes", str(path))
            more = os.pwritev(descriptor, [payload[written - HEADER_BYTES : total_bytes - HEADER_BYTES].data], written)
            if more <= 0:
                raise OSError(errno.EIO, f"short write: {written} of {total_bytes} bytes", str(path))
            written += more
        if durable:
            os.fdatasync(descriptor)
        return occupied_bytes(os.fstat(descriptor))


@contextmanager
def created(path: Path | str, flags: int, length_bytes: int) -> Iterator[int]:
    """Create `path`, which must not exist, with room for `length_bytes`, and open it. An error removes the file."""
    descriptor = open_file(path, flags | os.O_CREAT | os.O_EXCL)
    try:
        reserve(descriptor, length_bytes)
        yield descriptor
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def read_chunk_file(
    path: Path | str, key: bytes, fingerprint: bytes | None, into: np.ndarray, *, direct: bool
) -> Header:
    """Read the chunk at `path` into `into` (uint8, page-aligned) and verify it. Return its header, for `unpacked`.

    `fingerprint` None accepts any layout. The payload is left as stored.

    Raises FileNotFoundError, and CorruptChunk with the expected and the found value. After an exception the
    content of `into` is undefined.
    """
    descriptor = open_file(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        length_bytes = os.fstat(descriptor).st_size
        payload_room = min(aligned(max(0, length_bytes - HEADER_BYTES)), into.nbytes)
        buffer = _buffer()
        got = os.preadv(descriptor, [memoryview(buffer), into[:payload_room].data], 0)
        while HEADER_BYTES <= got < min(length_bytes, HEADER_BYTES + payload_room):
            more = os.preadv(descriptor, [into[got - HEADER_BYTES : payload_room].data], got)
            if more <= 0:
                break
            got += more
    finally:
        os.close(descriptor)
    raw_header = memoryview(buffer)[: min(got, PACKED_BYTES)]
    return verify_chunk(path, raw_header, key, fingerprint, got, length_bytes, host_checksum(into))


def verify_chunk(
    path: Path | str,
    raw_header: memoryview,
    key: bytes,
    fingerprint: bytes | None,
    got: int,
    length: int,
    checksum: Callable[[int], int],
) -> Header:
    """Verify a chunk of which `got` of `length` bytes were read, and return its header. Raises CorruptChunk.

    `fingerprint` None accepts any layout. `checksum` is called once with the stored payload's length without padding.
    """
    try:
        header = Header.check(raw_header, key, fingerprint)
        if length != file_bytes(header.payload_bytes) or got < length:
            raise HeaderError(f"length: expected {file_bytes(header.payload_bytes)} bytes, found {length} (read {got})")
        header.check_payload(checksum(header.payload_bytes))
    except HeaderError as error:
        raise CorruptChunk(f"{path}: {error}") from error
    return header


def host_checksum(payload: np.ndarray) -> Callable[[int], int]:
    """Return the `checksum` of `verify_chunk` for a payload in host memory."""
    return lambda payload_bytes: payload_checksum(payload[:payload_bytes])


def supports_direct_io(directory: Path, name: str = "") -> bool:
    """Return True if O_DIRECT works in `directory`. Writes a file of that or a unique name.

    Raises OSError if no file can be written.
    """
    path = directory / (name or f"probe.{os.getpid()}.{threading.get_ident()}")
    block = mmap.mmap(-1, 4096)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno == errno.EINVAL:
            path.unlink(missing_ok=True)
            return False
        raise
    try:
        path.unlink(missing_ok=True)  # before the write, so that a kill leaves nothing
        os.pwrite(descriptor, block, 0)
        return True
    except OSError as error:
        if error.errno in NO_ROOM:
            return True  # O_DIRECT was accepted
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        os.close(descriptor)


def _buffer() -> mmap.mmap:
    """Return this thread's page for headers, aligned for O_DIRECT."""
    buffer: mmap.mmap | None = getattr(_thread, "header", None)
    if buffer is None:
        buffer = _thread.header = mmap.mmap(-1, HEADER_BYTES)
    return buffer


def _header_buffer(header: Header) -> mmap.mmap:
    buffer = _buffer()
    packed = header.pack()
    buffer[:] = packed + bytes(HEADER_BYTES - len(packed))
    return buffer
