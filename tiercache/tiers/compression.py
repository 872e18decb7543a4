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
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import xxhash

from tiercache.core.compression import (
    PART_BYTES,
    Codec,
    CompressionChoice,
    Frame,
    FrameError,
    packed_bytes,
    parts_of,
    worth_storing,
)
from tiercache.core.header import Header, aligned, payload_checksum
from tiercache.core.keys import ChunkKey
from tiercache.errors import ConfigError, CorruptChunk, TierUnavailable

logger = logging.getLogger("tiercache.compression")

_BLOCK_BYTES = 512 << 10
_LEVEL = 1
_ALGORITHMS = {Codec.LZ4: (b"lz4", 2), Codec.ZSTD: (b"zstd", 1)}
"""Blosc's name of each codec, and the kind of its shuffle: 1 for bytes, 2 for bits."""
_BLOSC_HEADER = struct.Struct("<4xIII")
"""Plain length, block length and stored length."""
_MOST_EXTRA_BYTES = 16
"""Largest number of bytes that Blosc adds to incompressible data."""
_thread = threading.local()


@dataclass(frozen=True)
class Packed:
    """A chunk as a tier stores it: a context manager, at whose end its memory may be reused."""

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

    `mode` is none, lz4, zstd or auto (zstd if `CompressionChoice` says so). Compressed payloads are read in every mode.
    Memory: a buffer of a chunk's length for each concurrent write, kept for the next write, and 1 MiB for each thread
    that reads.
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
                _blosc()
            except ImportError as error:
                if mode != "auto":
                    raise ConfigError(
                        f"{tier}: compression by {mode} needs numcodecs, which cannot be imported ({error}): pip "
                        "install numcodecs, or set it to none"
                    ) from error
                logger.info("%s: numcodecs cannot be imported (%s): nothing is compressed", tier, error)
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
            with self._lock:
                self._choice.received(stored_bytes, seconds)

    def _next_codec(self, plain: np.ndarray) -> Codec:
        choice = self._choice
        if choice is None:
            return self._codec
        with self._lock:
            due = choice.trial_due()
        if due:
            part = plain[:PART_BYTES]
            began_s = time.perf_counter()
            stored = _blosc_of(_items(part, self._item), Codec.ZSTD)
            compressed_s = time.perf_counter()
            _library().decompress(stored, _scratch()[: part.nbytes])
            ended_s = time.perf_counter()
            with self._lock:
                choice.tried(part.nbytes, len(stored), compressed_s - began_s, ended_s - compressed_s)
        with self._lock:
            return choice.codec

    def _take_buffer(self, size_bytes: int) -> np.ndarray:
        with contextlib.suppress(IndexError):
            buffer = self._buffers.pop()
            if buffer.nbytes >= size_bytes:
                return buffer
        return _pages(size_bytes)


def compress(plain: np.ndarray, codec: Codec, item: np.dtype[Any], into: np.ndarray) -> int:
    """Compress `plain` into `into` (uint8, at least as long), and return the stored length.

    Returns 0 if compression is not worthwhile, which the first part shows if all parts are alike.
    """
    parts, stored, end = parts_of(plain.nbytes), [], packed_bytes(parts_of(plain.nbytes))
    for number in range(parts):
        part = plain[number * PART_BYTES : (number + 1) * PART_BYTES]
        compressed = np.frombuffer(_blosc_of(_items(part, item), codec), dtype=np.uint8)
        if end + compressed.nbytes > into.nbytes or (not number and not worth_storing(compressed.nbytes, part.nbytes)):
            return 0
        np.copyto(into[end : end + compressed.nbytes], compressed)
        stored.append(compressed.nbytes)
        end += compressed.nbytes
    frame = Frame(plain.nbytes, payload_checksum(plain), PART_BYTES, tuple(stored))
    if not worth_storing(end, plain.nbytes) or not frame.fits_in_place:
        return 0
    packed = frame.pack()
    into[: len(packed)] = np.frombuffer(packed, dtype=np.uint8)
    return end


def unpacked(header: Header, into: np.ndarray) -> int:
    """Decompress the payload of `header` in place. Its stored bytes are in `into` and match the header's checksum.

    Returns the plain length. Writes nothing outside of `into`. Raises CorruptChunk if the plain payload does not match
    its checksum or the frame is invalid, TierUnavailable if the library is missing.
    """
    if header.codec is Codec.PLAIN:
        return header.payload_bytes
    try:
        return decompress(into, header.payload_bytes)
    except FrameError as error:
        raise CorruptChunk(f"chunk {header.key.hex()}: {error}") from error


def decompress(into: np.ndarray, stored_bytes: int) -> int:
    """Replace the compressed payload in `into[:stored_bytes]` by the plain payload, and return its length.

    Works from the last part to the first, so that no part is overwritten before its use. Raises FrameError.
    """
    frame = Frame.unpack(into[:stored_bytes].data, stored_bytes, into.nbytes)
    scratch = _scratch()
    for number, start in reversed(list(enumerate(frame.starts))):
        stored = scratch[: frame.stored[number]]
        if stored.nbytes < frame.stored[number]:
            raise FrameError(f"part {number}: expected at most {scratch.nbytes} bytes, found {frame.stored[number]}")
        np.copyto(stored, into[start : start + stored.nbytes])
        first = number * PART_BYTES
        _decompress_part(stored, into[first : first + frame.plain_bytes_of(number)])
    _check_plain(frame, payload_checksum(into[: frame.plain_bytes]))
    return frame.plain_bytes


def check_compressed(stored: np.ndarray) -> int:
    """Verify a compressed payload part by part, without memory for all of it.

    Returns the plain length. Raises FrameError.
    """
    frame = Frame.unpack(stored.data, stored.nbytes, sys.maxsize)
    digest = xxhash.xxh3_64()
    for number, start in enumerate(frame.starts):
        plain = _scratch()[: frame.plain_bytes_of(number)]
        _decompress_part(stored[start : start + frame.stored[number]], plain)
        digest.update(plain.data)
    _check_plain(frame, digest.intdigest())
    return frame.plain_bytes


def _check_plain(frame: Frame, checksum: int) -> None:
    if checksum != frame.plain_checksum:
        raise FrameError(f"plain checksum: expected {frame.plain_checksum:016x}, found {checksum:016x}")


def _decompress_part(stored: np.ndarray, plain: np.ndarray) -> None:
    """Decompress a part into the whole of `plain`. Raises FrameError.

    Checks the lengths in Blosc's header before the decoder runs.
    """
    if stored.nbytes < _BLOSC_HEADER.size:
        raise FrameError(f"part: expected at least {_BLOSC_HEADER.size} bytes, found {stored.nbytes}")
    becomes, _, says = _BLOSC_HEADER.unpack(stored[: _BLOSC_HEADER.size].data)
    if (becomes, says) != (plain.nbytes, stored.nbytes):
        raise FrameError(f"part: expected {plain.nbytes} bytes from {stored.nbytes}, it says {becomes} from {says}")
    try:
        _library().decompress(stored, plain)
    except (RuntimeError, ValueError) as error:
        raise FrameError(f"part: {error}") from error


def _blosc_of(plain: np.ndarray, codec: Codec) -> bytes:
    algorithm, shuffle = _ALGORITHMS[codec]
    stored: bytes = _library().compress(plain, algorithm, _LEVEL, shuffle, _BLOCK_BYTES)
    return stored


def _items(part: np.ndarray, item: np.dtype[Any]) -> np.ndarray:
    return part if part.nbytes % item.itemsize else part.view(item)


def _scratch() -> np.ndarray:
    """Return this thread's buffer, which fits the longest part."""
    scratch: np.ndarray | None = getattr(_thread, "scratch", None)
    if scratch is None:
        scratch = _thread.scratch = _pages(aligned(PART_BYTES + _MOST_EXTRA_BYTES))
    return scratch


def _pages(size_bytes: int) -> np.ndarray:
    """Return memory aligned to 4096 bytes, on huge pages if the system has them."""
    memory = mmap.mmap(-1, size_bytes)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def _library() -> Any:
    """Return Blosc. Raises TierUnavailable, since compressed chunks that cannot be read may still be good."""
    try:
        return _blosc()
    except ImportError as error:
        raise TierUnavailable(
            f"compressed chunks need numcodecs, which cannot be imported ({error}): pip install numcodecs"
        ) from error


@cache
def _blosc() -> Any:
    from numcodecs import blosc

    blosc.use_threads = False  # each call runs in a worker thread already, and must not wait for others
    return blosc
