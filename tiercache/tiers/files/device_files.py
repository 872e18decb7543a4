"""Chunk files written from and read into device memory: through pinned host memory, or through cuFile (`cufile.py`).

Synchronous; everything here blocks and runs in worker threads. What each call promises is what `chunk_file.py` promises for
host memory: verified, whole, durable as configured.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np

from tiercache.core.header import Header, aligned, payload_checksum
from tiercache.device.driver import Driver, Span, Stream
from tiercache.errors import TierUnavailable
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.memory.slots import zero_padding
from tiercache.tiers.compression import unpacked
from tiercache.tiers.files.chunk_file import read_chunk_file, write_chunk_file


class DeviceFiles(ABC):
    """How device memory gets to files. `direct` and `durable` as for `write_chunk_file`. Once closed, `read` and `write`
    raise TierUnavailable."""

    name: str

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        """Reads and writes under way. The last one frees what `close` could not."""
        self._closed = False

    def open(self) -> None:
        """Take what is needed. Raises DeviceError, OSError or ImportError with the reason when it does not work here."""
        self._closed = False

    @abstractmethod
    def read(self, path: str, key: bytes, fingerprint: bytes, into: Span, *, direct: bool) -> int:
        """As `read_chunk_file`, into device memory."""

    @abstractmethod
    def write(
        self, path: str, key: bytes, fingerprint: bytes, payload: Span, payload_bytes: int, *, direct: bool, durable: bool
    ) -> int:
        """As `write_chunk_file`, from device memory."""

    def forget(self, path: str) -> None:  # noqa: B027 - not every way keeps files open
        """The file at `path` is gone."""

    def close_deleted(self) -> int:
        """Close files that others have deleted: as long as they are open they take their space. How many there were."""
        return 0

    def close(self) -> None:
        """Idempotent. What calls under way still use stays until the last of them ends, and goes then."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            ended = self._ended and not was_closed
        if ended:
            self._free()

    @abstractmethod
    def _free(self) -> None:
        """Give back what was taken: closed, and with no call under way."""

    @property
    def _ended(self) -> bool:
        return self._closed and not self._calls

    @contextmanager
    def _call(self) -> Iterator[None]:
        """While a read or a write lasts."""
        with self._lock:
            if self._closed:
                raise TierUnavailable(f"{self.name}: the files are closed")
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                ended = self._ended
            if ended:
                self._free()


class ThreadStreams:
    """A stream for each thread that asks, so that their copies do not wait for one another."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._own = threading.local()
        self._made: list[Stream] = []

    def get(self) -> Stream:
        stream = getattr(self._own, "stream", None)
        if stream is None:
            stream = self._own.stream = self._driver.make_stream()
            self._made.append(stream)
        return stream

    def close(self) -> None:
        """No thread may use one any more."""
        while self._made:
            self._driver.drop_stream(self._made.pop())

    def synchronize(self) -> None:
        """Sleep until this thread's stream has ended its work."""
        self._driver.finish(self.get())


class BounceFiles(DeviceFiles):
    """Through a few pinned buffers, one a thread, and the disk tier's own reads and writes: O_DIRECT, one large call, hashed
    on the host where the bytes are anyway."""

    name = "posix"

    def __init__(self, driver: Driver, chunk_bytes: int, threads: int) -> None:
        super().__init__()
        self._driver = driver
        self._buffer_bytes = aligned(chunk_bytes)
        self._threads = threads
        self._streams = ThreadStreams(driver)
        self._buffers: SimpleQueue[np.ndarray] = SimpleQueue()
        self._arena: Arena | None = None
        self._pinned = False

    def open(self) -> None:
        super().open()
        self._arena = Arena(ArenaSettings(size_bytes=self._threads * self._buffer_bytes))
        self._pinned = self._driver.pin(self._arena.memory)
        for number in range(self._threads):
            start = number * self._buffer_bytes
            self._buffers.put(self._arena.memory[start : start + self._buffer_bytes])

    def read(self, path: str, key: bytes, fingerprint: bytes, into: Span, *, direct: bool) -> int:
        with self._buffer() as buffer:
            length = unpacked(read_chunk_file(path, key, fingerprint, buffer, direct=direct), buffer)
            zero_padding(buffer, length)
            room = into.part(0, aligned(length))
            self._driver.copy(room.address, buffer.ctypes.data, room.length_bytes, self._streams.get())
            self._streams.synchronize()
        return length

    def write(
        self, path: str, key: bytes, fingerprint: bytes, payload: Span, payload_bytes: int, *, direct: bool, durable: bool
    ) -> int:
        with self._buffer() as buffer:
            source = payload.part(0, payload_bytes)
            self._driver.copy(buffer.ctypes.data, source.address, payload_bytes, self._streams.get())
            self._streams.synchronize()
            padded = buffer[: aligned(payload_bytes)]
            padded[payload_bytes:] = 0
            header = Header(key, fingerprint, payload_bytes, payload_checksum(padded[:payload_bytes]))
            return write_chunk_file(path, header, padded, direct=direct, durable=durable)

    def _free(self) -> None:
        arena, self._arena = self._arena, None
        if arena is None:
            return
        if self._pinned:
            self._driver.unpin(arena.memory)
        self._streams.close()
        while not self._buffers.empty():
            self._buffers.get_nowait()
        arena.close()

    @contextmanager
    def _buffer(self) -> Iterator[np.ndarray]:
        """One of as many buffers as there are threads, so nobody waits here."""
        with self._call():
            buffer = self._buffers.get_nowait()
            try:
                yield buffer
            finally:
                self._buffers.put(buffer)
