"""Compression of payloads before they are written to a tier, and decompression after they are read.

All functions are synchronous and meant for worker threads. The codecs are Blosc's, by numcodecs: it releases the GIL,
decompresses into given memory, is deterministic, and shuffles bytes (or bits) of equal significance together in the same
pass. `python -m tests.bench --only compression` measures ratios and rates.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tiercache.core.compression import Codec, CompressionChoice, worth_storing
from tiercache.core.header import Header, aligned, payload_checksum
from tiercache.core.keys import ChunkKey
from tiercache.errors import ConfigError, CorruptChunk, TierUnavailable

logger = logging.getLogger("tiercache.compression")

_BLOCK_BYTES = 512 << 10
_LEVEL = 1
_ALGORITHMS = {Codec.LZ4: (b"lz4", 2), Codec.ZSTD: (b"zstd", 1)}
"""Blosc's name of each codec, and the kind of its shuffle: 1 for bytes, 2 for bits."""
_PART_BYTES = 1 << 20
"""The longest plain part of a frame: the library copies its result while it holds the GIL."""
_FRAME = struct.Struct("<4xI4xI")
"""Blosc's header of a frame: plain length and length of the frame."""
_FRAMES_AT = 8
_thread = threading.local()


@dataclass(frozen=True)
class Packed:
    """A chunk in the form that a tier stores. It is a context manager; after its block the memory may be reused."""

    header: Header
    padded: np.ndarray
    """uint8, page-aligned: the stored payload, padded with zeroes to a multiple of 4096 bytes."""
    give_back: Callable[[], object] = lambda: None

    @property
    def payload(self) -> np.ndarray:
        """The stored payload without padding, uint8[header.payload_bytes]."""
        return self.padded[: self.header.payload_bytes]

    def __enter__(self) -> Packed:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()


class Compression:
    """The compression of a tier. All methods may be called in any thread.

    `mode` is none, lz4, zstd or auto (zstd where `CompressionChoice` says so). Compressed payloads are read in every mode.
    Memory: one buffer of a chunk's length for each concurrent write, and one for each thread that reads compressed chunks,
    kept for the next one.
    """

    def __init__(self, mode: str = "none", item_bytes: int = 1, *, concurrency: int = 4, tier: str = "") -> None:
        """`item_bytes` is the length of a number of the KV, `concurrency` the number of concurrent writes.

        `tier` is the name in messages. Raises ConfigError if the library is missing, except for `auto`, which then
        stores plain payloads.
        """
        self.mode = mode
        self.stored_bytes = 0
        """Total length of all payloads sent, after compression."""
        self._item = np.dtype(f"u{item_bytes}")
        self._lock = threading.Lock()
        self._choice = CompressionChoice(concurrency) if mode == "auto" else None
        self._codec = Codec.PLAIN if mode in ("none", "auto") else Codec[mode.upper()]
        self._buffers: list[np.ndarray] = []
        if mode != "none":
            try:
                _library()
            except TierUnavailable as error:
                if mode != "auto":
                    raise ConfigError(
                        f"{tier}: compression by {mode} needs numcodecs, which cannot be imported ({error.__cause__}): "
                        "pip install numcodecs, or set it to none"
                    ) from error
                logger.info("%s: nothing is compressed: %s", tier, error)
                self._choice = None

    def pack(self, key: ChunkKey, fingerprint: bytes, padded: np.ndarray, payload_bytes: int) -> Packed:
        """Compress the first `payload_bytes` of `padded` (uint8).

        Returns the chunk in a buffer, or in `padded` itself if it is stored plain; then the padding is unchanged.
        """
        plain = padded[:payload_bytes]
        codec = self._next_codec(plain)
        if codec is not Codec.PLAIN:
            buffer = self._take_buffer(aligned(payload_bytes))
            stored_bytes = compress(plain, codec, self._item, buffer)
            if stored_bytes:
                stored = buffer[: aligned(stored_bytes)]
                stored[stored_bytes:] = 0
                header = Header(key, fingerprint, stored_bytes, payload_checksum(stored[:stored_bytes]), codec)
                return Packed(header, stored, lambda: self._buffers.append(buffer))
            self._buffers.append(buffer)
        return Packed(Header(key, fingerprint, payload_bytes, payload_checksum(plain)), padded)

    def sent(self, stored_bytes: int, seconds: float) -> None:
        """Record a transfer to the storage."""
        with self._lock:
            self.stored_bytes += stored_bytes
        if self._choice is not None:
            self._choice.sent(stored_bytes, seconds)

    def received(self, stored_bytes: int, seconds: float) -> None:
        """Record a transfer from the storage."""
        if self._choice is not None:
            self._choice.received(stored_bytes, seconds)

    def _next_codec(self, plain: np.ndarray) -> Codec:
        choice = self._choice
        if choice is None:
            return self._codec
        if choice.trial_due():
            part = plain[:_PART_BYTES]
            began_s = time.perf_counter()
            stored = _blosc_of(_items(part, self._item), Codec.ZSTD)
            compressed_s = time.perf_counter()
            _library().decompress(stored, _scratch(part.nbytes))
            ended_s = time.perf_counter()
            choice.tried(part.nbytes, len(stored), compressed_s - began_s, ended_s - compressed_s)
        return choice.codec

    def _take_buffer(self, size_bytes: int) -> np.ndarray:
        with contextlib.suppress(IndexError):
            buffer = self._buffers.pop()
            if buffer.nbytes >= size_bytes:
                return buffer
        return _pages(size_bytes)


def compress(plain: np.ndarray, codec: Codec, item: np.dtype[Any], into: np.ndarray) -> int:
    """Compress `plain` into `into` (uint8, no shorter than `plain`). Return the stored length, or 0 if compression is
    not worthwhile, of the first part alone or of all parts together.
    """
    end = _FRAMES_AT
    for start in range(0, plain.nbytes, _PART_BYTES):
        part = plain[start : start + _PART_BYTES]
        frame = np.frombuffer(_blosc_of(_items(part, item), codec), dtype=np.uint8)
        if not worth_storing(end + frame.nbytes, plain.nbytes if start else part.nbytes):
            return 0
        into[end : end + frame.nbytes] = frame
        end += frame.nbytes
    into[:_FRAMES_AT] = np.frombuffer(payload_checksum(plain).to_bytes(_FRAMES_AT, "little"), dtype=np.uint8)
    return end


def unpacked(header: Header, into: np.ndarray) -> int:
    """Decompress the payload of `header` in place. Its stored bytes are in `into` and match the header's checksum.

    Return the plain length. Writes nothing outside of `into`. Raises CorruptChunk if a frame is invalid, or the plain
    payload does not fit or match its checksum; TierUnavailable if the library is missing.
    """
    if header.codec is Codec.PLAIN:
        return header.payload_bytes
    stored = _scratch(header.payload_bytes)
    np.copyto(stored, into[: header.payload_bytes])
    end = 0
    try:
        for frame, part_bytes in _frames(stored):
            if part_bytes > into.nbytes - end:
                raise ValueError(f"expected at most {into.nbytes - end} plain bytes in a frame, found {part_bytes}")
            _library().decompress(frame, into[end : end + part_bytes])
            end += part_bytes
    except (RuntimeError, ValueError) as error:
        raise CorruptChunk(f"chunk {header.key.hex()}: {error}") from error
    checksum, found = int.from_bytes(stored[:_FRAMES_AT].tobytes(), "little"), payload_checksum(into[:end])
    if found != checksum:
        raise CorruptChunk(f"chunk {header.key.hex()}: plain checksum: expected {checksum:016x}, found {found:016x}")
    return end


def plain_bytes(stored: np.ndarray) -> int:
    """Return the plain length that the frames of a compressed payload claim to have. Raises ValueError."""
    return sum(part_bytes for _, part_bytes in _frames(stored))


def _frames(stored: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Yield each frame and the plain length in its header. Raises ValueError if a frame is invalid."""
    start = _FRAMES_AT
    while start < stored.nbytes or start == _FRAMES_AT:
        if stored.nbytes - start < _FRAME.size:
            raise ValueError(f"expected a frame of at least {_FRAME.size} bytes, found {max(0, stored.nbytes - start)}")
        part_bytes, frame_bytes = _FRAME.unpack(stored[start : start + _FRAME.size].data)
        if not _FRAME.size <= frame_bytes <= stored.nbytes - start:
            raise ValueError(f"expected a frame of at most {stored.nbytes - start} bytes, found {frame_bytes}")
        yield stored[start : start + frame_bytes], part_bytes
        start += frame_bytes


def _blosc_of(plain: np.ndarray, codec: Codec) -> bytes:
    algorithm, shuffle = _ALGORITHMS[codec]
    stored: bytes = _library().compress(plain, algorithm, _LEVEL, shuffle, _BLOCK_BYTES)
    return stored


def _items(part: np.ndarray, item: np.dtype[Any]) -> np.ndarray:
    return part if part.nbytes % item.itemsize else part.view(item)


def _scratch(size_bytes: int) -> np.ndarray:
    """Return `size_bytes` of this thread's buffer."""
    scratch: np.ndarray | None = getattr(_thread, "scratch", None)
    if scratch is None or scratch.nbytes < size_bytes:
        scratch = _thread.scratch = _pages(aligned(size_bytes))
    return scratch[:size_bytes]


def _pages(size_bytes: int) -> np.ndarray:
    """Return memory aligned to 4096 bytes, on huge pages if the system has them."""
    memory = mmap.mmap(-1, size_bytes)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


@cache
def _library() -> Any:
    """Return Blosc. Raises TierUnavailable if it is missing, not CorruptChunk, since the chunks may be good."""
    try:
        from numcodecs import blosc
    except ImportError as error:
        raise TierUnavailable(
            f"compressed chunks need numcodecs, which cannot be imported ({error}): pip install numcodecs"
        ) from error
    blosc.use_threads = False  # each call runs in a worker thread already, and must not wait for others
    return blosc
