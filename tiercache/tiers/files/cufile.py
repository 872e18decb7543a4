"""Chunk files through cuFile (kvikio): device memory straight to the file and back, where GPUDirect Storage works.

Header and payload lie in a slot as they lie in a file, so each file is one transfer. The payload is hashed by a kernel; what
comes to the host is the header and eight numbers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from tiercache.core.compression import Codec
from tiercache.core.header import HEADER_BYTES, PACKED_BYTES, Header, aligned, file_bytes, payload_checksum
from tiercache.device import checksum
from tiercache.device.driver import DeviceError, Driver, Span
from tiercache.errors import CorruptChunk
from tiercache.tiers.files.access import occupied_bytes, open_regular
from tiercache.tiers.files.allocation import NO_ROOM, reserve
from tiercache.tiers.files.chunk_file import verify_chunk
from tiercache.tiers.files.device_files import DeviceFiles, ThreadStreams

_OPEN_FILES = 128
_TASK_BYTES = 16 << 20
_PAGE = 4096


class CuFileFiles(DeviceFiles):
    """`memory` is the pool's, registered with cuFile once; every payload lies in it, with the header's page before it."""

    name = "cufile"

    def __init__(self, driver: Driver, memory: Span, chunk_bytes: int, threads: int) -> None:
        super().__init__()
        self._driver = driver
        self._memory = memory
        self._chunk_bytes = chunk_bytes
        self._threads = threads
        self._streams = ThreadStreams(driver)
        self._own = threading.local()
        self._owned: list[tuple[np.ndarray, Span, bool]] = []
        """Of all threads; and whether the page is pinned."""
        self._open_files: OrderedDict[str, _OpenFile] = OrderedDict()
        self._registered: Any = None
        self._kvikio: Any = None

    def open(self) -> None:
        if not self._driver.has_kernels:
            raise DeviceError("there are no kernels to verify chunks with")
        super().open()
        self._kvikio = import_kvikio()
        self._kvikio.defaults.set({"num_threads": self._threads, "task_size": _TASK_BYTES})
        memory = self._driver.array(self._memory)
        if not isinstance(memory, np.ndarray):
            self._kvikio.memory_register(memory)
        self._registered = memory

    def read(self, path: str, key: bytes, fingerprint: bytes, into: Span, *, direct: bool) -> int:
        with self._call():
            return self._read(path, key, fingerprint, into)

    def _read(self, path: str, key: bytes, fingerprint: bytes, into: Span) -> int:
        file = self._opened(path)
        try:
            room_bytes = HEADER_BYTES + into.length_bytes
            if file.length_bytes < file_bytes(1) or file.length_bytes > room_bytes:
                raise CorruptChunk(f"{path}: length: expected at most {room_bytes} bytes, found {file.length_bytes}")
            slot = Span(into.address - HEADER_BYTES, file.length_bytes)
            try:
                got = file.handle.pread(self._driver.array(slot), slot.length_bytes, 0, _TASK_BYTES).get()
            except RuntimeError as error:
                raise _os_error(error, path) from error
        finally:
            self._give_back(path, file)
        if got != file.length_bytes:
            raise CorruptChunk(f"{path}: length: expected {file.length_bytes} bytes, read {got}")
        return self._verify(path, key, fingerprint, slot)

    def write(
        self, path: str, key: bytes, fingerprint: bytes, payload: Span, payload_bytes: int, *, direct: bool, durable: bool
    ) -> int:
        with self._call():
            return self._write(path, key, fingerprint, payload, payload_bytes, durable)

    def _write(
        self, path: str, key: bytes, fingerprint: bytes, payload: Span, payload_bytes: int, durable: bool
    ) -> int:
        self.close_deleted()
        total_bytes = file_bytes(payload_bytes)
        page, _ = self._scratch()
        header = Header(key, fingerprint, payload_bytes, self._digest(payload.part(0, payload_bytes))).pack()
        page[:] = 0
        page[: len(header)] = np.frombuffer(header, dtype=np.uint8)
        slot = Span(payload.address - HEADER_BYTES, total_bytes)
        self._driver.copy(slot.address, page.ctypes.data, HEADER_BYTES, self._streams.get())
        self._streams.synchronize()
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            reserve(descriptor, total_bytes)
            with contextlib.closing(self._cufile(path, "r+")) as file:
                try:
                    written = file.pwrite(self._driver.array(slot), total_bytes, 0, _TASK_BYTES).get()
                except RuntimeError as error:
                    raise _os_error(error, path) from error
            if written != total_bytes:
                raise OSError(errno.EIO, f"short write: {written} of {total_bytes} bytes", path)
            if durable:
                os.fdatasync(descriptor)
            return occupied_bytes(os.fstat(descriptor))
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)

    def forget(self, path: str) -> None:
        with self._lock:
            file = self._open_files.pop(path, None)
        if file is not None:
            file.handle.close()

    def close_deleted(self) -> int:
        with self._lock:
            deleted = [path for path, file in self._open_files.items() if not file.exists]
            files = [self._open_files.pop(path) for path in deleted]
        for file in files:
            file.handle.close()
        return len(files)

    def _free(self) -> None:
        with self._lock:
            files, self._open_files = list(self._open_files.values()), OrderedDict()
        for file in files:
            file.handle.close()
        if self._registered is not None and not isinstance(self._registered, np.ndarray):
            self._kvikio.memory_deregister(self._registered)
        self._registered = None
        while self._owned:
            page, scratch, pinned = self._owned.pop()
            if pinned:
                self._driver.unpin(page)
            self._driver.free(scratch)
        self._streams.close()

    def _verify(self, path: str, key: bytes, fingerprint: bytes, slot: Span) -> int:
        page, _ = self._scratch()
        self._driver.copy(page.ctypes.data, slot.address, _PAGE, self._streams.get())
        self._streams.synchronize()
        length = slot.length_bytes

        def digest(payload_bytes: int) -> int:
            return self._digest(slot.part(HEADER_BYTES, payload_bytes))

        header = verify_chunk(path, page[:PACKED_BYTES].data, key, fingerprint, length, length, digest)
        if header.codec is not Codec.PLAIN:
            # Only another tier makes such files. Out of the way, so that the chunk is stored plain the next time.
            raise CorruptChunk(f"{path}: it is compressed, and is not decompressed in device memory")
        return header.payload_bytes

    def _digest(self, payload: Span) -> int:
        page, scratch = self._scratch()
        stream = self._streams.get()
        if payload.length_bytes < checksum.SHORTEST_BYTES:
            self._driver.copy(page.ctypes.data, payload.address, payload.length_bytes, stream)
            self._streams.synchronize()
            return payload_checksum(page[: payload.length_bytes])
        result = checksum.begin(self._driver, payload, scratch, stream)
        self._driver.copy(page.ctypes.data, result.address, checksum.RESULT_BYTES, stream)
        self._streams.synchronize()
        return checksum.finish(page[: checksum.RESULT_BYTES].view(np.uint64), payload.length_bytes)

    def _scratch(self) -> tuple[np.ndarray, Span]:
        """A pinned page, and device memory for a digest, of this thread's own."""
        scratch: tuple[np.ndarray, Span] | None = getattr(self._own, "scratch", None)
        if scratch is None:
            memory = np.zeros(2 * _PAGE, dtype=np.uint8)
            page = memory[-memory.ctypes.data % _PAGE :][:_PAGE]
            device = self._driver.allocate(aligned(checksum.scratch_bytes(self._chunk_bytes)))
            try:
                pinned = self._driver.pin(page)
            except BaseException:
                self._driver.free(device)
                raise
            scratch = self._own.scratch = (page, device)
            self._owned.append((page, device, pinned))
        return scratch

    # Open files: registering one with cuFile costs more than reading it

    def _opened(self, path: str) -> _OpenFile:
        """The file, taken out of the cache while it is used: two reads of one chunk at once open it twice."""
        with self._lock:
            file = self._open_files.pop(path, None)
        if file is not None:
            if file.exists:
                return file
            file.handle.close()
        os.close(open_regular(path, os.O_RDONLY))  # cuFile would wait for the other end of a pipe
        return _OpenFile(self._cufile(path, "r"))

    def _give_back(self, path: str, file: _OpenFile) -> None:
        surplus = [file]
        with self._lock:
            if path not in self._open_files and file.exists:
                self._open_files[path] = surplus.pop()
            if len(self._open_files) > _OPEN_FILES:
                surplus.append(self._open_files.popitem(last=False)[1])
        for each in surplus:
            each.handle.close()

    def _cufile(self, path: str, flags: str) -> Any:
        try:
            return self._kvikio.CuFile(path, flags)
        except RuntimeError as error:
            # kvikio says RuntimeError for everything; a missing file must be told apart from a failing one.
            if not os.path.exists(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
            raise _os_error(error, path) from error


def _os_error(error: RuntimeError, path: str) -> OSError:
    """What kvikio meant: it says RuntimeError for everything. No room is told from the rest by its words."""
    text = str(error)
    code = next((code for code in NO_ROOM if os.strerror(code) in text or errno.errorcode[code] in text), errno.EIO)
    return OSError(code, f"cuFile: {text}", path)


class _OpenFile:
    __slots__ = ("descriptor", "handle", "length_bytes")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.descriptor = handle.fileno()
        self.length_bytes = os.fstat(self.descriptor).st_size

    @property
    def exists(self) -> bool:
        """Whether the file still has a name: another process may have deleted it."""
        return os.fstat(self.descriptor).st_nlink > 0


def import_kvikio() -> Any:
    """kvikio. Its libraries are found only when `rapids_logger` was loaded before. ImportError says what is missing."""
    try:
        import rapids_logger

        rapids_logger.load_library()
        import kvikio
        import kvikio.defaults
    except Exception as error:  # kvikio's loaders raise classes of their own
        raise ImportError(f"kvikio cannot be loaded ({error}): pip install 'tiercache[gds]'") from error
    return kvikio
