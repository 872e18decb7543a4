"""One chunk in one file: a header of 4096 bytes, the payload, zero padding to 4096 bytes. Synchronous; for worker threads.

One `pwritev` or `preadv` moves header and payload together, around the page cache (O_DIRECT) where the file system can.
A ring of io_uring was no better: it wrote 1.4 to 1.7 GB/s and read 2.9 to 3.0, where threads write 1.6 to 2.0 and read 2.6
to 2.9 (2 MiB, one and four at a time, two cores). mmap writes 0.3 to 0.4 and reads 0.8 to 1.3.
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
import time
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
from tiercache.tiers.compression import Compression, Packed, unpacked
from tiercache.tiers.files.access import file_system_of, occupied_bytes, open_found, open_regular

_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_CANNOT = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_GET_FLAGS = 0x80086601
_SET_FLAGS = 0x40086602
"""FS_IOC_GETFLAGS and FS_IOC_SETFLAGS; other numbers on some processors, where nothing comes of it."""
_TOP = 0x20000
"""FS_TOPDIR_FL, `chattr +T`."""
_HINTED = ("ext2", "ext3", "ext4")


def reserve(descriptor: int, length_bytes: int) -> None:
    """fallocate(2) of the first `length_bytes`, nothing where the file system has no such call. Raises OSError (ENOSPC).

    Not posix_fallocate: where the call is missing (NFS before 4.2, CephFS) glibc's writes a byte into every block instead,
    which is as many requests as the file has blocks.
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
    """Have the directories that are made in `directory` lie apart on its device, each with its files. Nothing where the file
    system has no such hint. Does not raise.

    ext4 passes over the inodes that were freed in the last minutes, one by one, each time it makes a file. Where all
    directories share one group of inodes, that is every chunk that was lately evicted, and whoever makes one waits for it.
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
"""How long a write waits for its turn: where each takes long, or hangs, the others are not kept."""
LARGE_BYTES = 1 << 20
"""A write of less needs no turn: it takes many of them to keep a device busy."""


class DeviceTurns:
    """Writes that are at a device together end together, since it serves all alike: then all of them wait for the file
    system's commit and for the counter, and the device for them. Where fewer are there, others take their places."""

    def __init__(self, places: int | None) -> None:
        """None: nobody waits."""
        self._places = threading.Semaphore(places) if places is not None else None

    @contextmanager
    def taken(self, length_bytes: int) -> Iterator[None]:
        """Hold one while so much is written. It goes on without where none was free for a moment."""
        places = self._places if length_bytes >= LARGE_BYTES else None
        is_ours = places is not None and places.acquire(timeout=_PATIENCE_S)
        try:
            yield
        finally:
            if places is not None and is_ours:
                places.release()


EVERYBODYS = DeviceTurns(None)


PART_BYTES, _PARTS = 1 << 20, 8
"""What a read that pauses asks for at a time: an eighth of its chunk, if that is no less than a mebibyte. Half of that
costs a tenth of the throughput; demand reads among them take a quarter less time then."""

_thread = threading.local()


def write_chunk(
    path: Path | str,
    chunk: Packed,
    compression: Compression,
    *,
    direct: bool,
    durable: bool,
    turns: DeviceTurns = EVERYBODYS,
) -> int:
    """As `write_chunk_file`; `compression` learns how quick it was."""
    began_s = time.monotonic()
    occupied_bytes = write_chunk_file(path, chunk.header, chunk.padded, direct=direct, durable=durable, turns=turns)
    compression.sent(chunk.header.payload_bytes, time.monotonic() - began_s)
    return occupied_bytes


def read_chunk(
    path: Path | str,
    key: bytes,
    fingerprint: bytes,
    into: np.ndarray,
    compression: Compression,
    *,
    direct: bool,
    pause: Callable[[], None] | None = None,
) -> int:
    """As `read_chunk_file`, made plain: returns the payload's length. `compression` learns how quick
    it was, unless it had to give way."""
    began_s = time.monotonic()
    header = read_chunk_file(path, key, fingerprint, into, direct=direct, pause=pause)
    if pause is None:
        compression.received(header.payload_bytes, time.monotonic() - began_s)
    return unpacked(header, into)


def write_chunk_file(
    path: Path | str, header: Header, payload: np.ndarray, *, direct: bool, durable: bool, turns: DeviceTurns = EVERYBODYS
) -> int:
    """Create `path` (which must not exist) with the chunk, checked for its full length. Returns the bytes it occupies.

    `payload` is uint8, page-aligned, padded with zeroes to a multiple of 4096. `durable` adds fdatasync. On any error the
    file is removed again and the error raised. One of `turns` is held while the bytes go to the device.
    """
    total_bytes = file_bytes(header.payload_bytes)
    descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0))
    try:
        reserve(descriptor, total_bytes)
        buffers = [memoryview(_header_buffer(header)), payload[: total_bytes - HEADER_BYTES].data]
        with turns.taken(total_bytes):
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
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def read_chunk_file(
    path: Path | str,
    key: bytes,
    fingerprint: bytes,
    into: np.ndarray,
    *,
    direct: bool,
    pause: Callable[[], None] | None = None,
) -> Header:
    """Read and verify the chunk at `path` into `into` (uint8, page-aligned). Returns its header, by which the payload is
    `unpacked`: it lies there as it was stored.

    With a `pause` it is read in parts, between which that is called.

    Raises FileNotFoundError when it is not there, NotAFile when something else is, CorruptChunk with what was expected and
    found when it is not the chunk.
    What `into` holds after an exception means nothing.
    """
    descriptor, status = open_found(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        length_bytes = status.st_size
        payload_room = min(aligned(max(0, length_bytes - HEADER_BYTES)), into.nbytes)
        buffer = _buffer()
        part_bytes = payload_room if pause is None else max(PART_BYTES, aligned(payload_room // _PARTS))
        got = os.preadv(descriptor, [memoryview(buffer), into[: min(part_bytes, payload_room)].data], 0)
        while HEADER_BYTES <= got < min(length_bytes, HEADER_BYTES + payload_room):
            if pause is not None:
                pause()
            start = got - HEADER_BYTES
            more = os.preadv(descriptor, [into[start : min(start + part_bytes, payload_room)].data], got)
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
    """Check everything that a header promises, and return it. `fingerprint` None accepts any layout (for `tiercache
    verify`). Of a file of `length` bytes, `got` were read.

    `checksum` is called once, with the stored payload's length without padding.
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
    """For `verify_chunk`: of a payload in host memory."""
    return lambda payload_bytes: payload_checksum(payload[:payload_bytes])


def supports_direct_io(directory: Path, name: str = "") -> bool:
    """Whether O_DIRECT works in `directory`, found out by doing it, with a file of that name or one that nobody else uses.

    Raises OSError when nothing can be written there."""
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
        path.unlink(missing_ok=True)  # first: whoever is killed now leaves nothing
        os.pwrite(descriptor, block, 0)
        return True
    except OSError as error:
        if error.errno in NO_ROOM:
            return True  # it was taken, and there is no room
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        os.close(descriptor)


def _buffer() -> mmap.mmap:
    """A page of this thread's own: O_DIRECT wants the header aligned as well."""
    buffer: mmap.mmap | None = getattr(_thread, "header", None)
    if buffer is None:
        buffer = _thread.header = mmap.mmap(-1, HEADER_BYTES)
    return buffer


def _header_buffer(header: Header) -> mmap.mmap:
    buffer = _buffer()
    packed = header.pack()
    buffer[:] = packed + bytes(HEADER_BYTES - len(packed))
    return buffer
