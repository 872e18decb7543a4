"""Payloads compressed on their way into a tier, and made plain on their way out. Synchronous; for worker threads.

Blosc (by numcodecs) does the work: it releases the GIL, writes into memory that it is given when it decompresses, makes
the same of the same bytes, and moves bytes (or bits) of like weight together in the same pass. Measured on the chunks of
SmolLM2 in bfloat16, one core: with Zstandard 0.68 of the bytes are left, 0.4 GB/s in and 1.8 out; with LZ4 0.79, 0.95 and
2.4. Larger blocks than 512 KiB gain nothing, nor do higher levels, which take three times as long.
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
    COMPRESSING,
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
"""By codec: Blosc's name, and whether bytes (1) or bits (2) are shuffled."""
_BLOSC_HEADER = struct.Struct("<4xIII")
"""Plain length, block length, length of the whole."""
_MOST_EXTRA_BYTES = 16
"""By which Blosc makes longer what it cannot make shorter."""
_thread = threading.local()


@dataclass(frozen=True)
class Packed:
    """A chunk as a tier stores it. Its memory is this chunk's until the end of the context."""

    header: Header
    padded: np.ndarray
    """uint8, page-aligned: the payload as it is stored, with zeroes behind it to a multiple of 4096 bytes."""
    give_back: Callable[[], object] = lambda: None

    @property
    def payload(self) -> np.ndarray:
        """uint8[header.payload_bytes]."""
        return self.padded[: self.header.payload_bytes]

    def __enter__(self) -> Packed:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()


class Compression:
    """What one tier does to its payloads. All methods may be called in any thread.

    `mode` is none, lz4, zstd or auto (what is read soonest: `CompressionChoice`). Whatever the mode, what is
    compressed is read. Memory: a buffer of a chunk's length for each write that is under way, kept for the next, and 1 MiB
    for each thread that reads.
    """

    def __init__(self, mode: str = "none", item_bytes: int = 1, *, concurrency: int = 4, tier: str = "") -> None:
        """`item_bytes` is the length of a number of the KV, `concurrency` how many writes the tier does at a time. Raises
        ConfigError, which names the `tier`, when the library is missing; but `auto` goes without."""
        self.mode = mode
        self.stored_bytes = 0
        """Of all payloads that were sent, as they were sent."""
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
        """The chunk as it is to be stored: `padded` itself, whose zeroes may be missing, or a buffer."""
        plain = padded[:payload_bytes]
        codec = self._next_codec(plain)
        packed = None
        if codec is not Codec.PLAIN:
            packed = self._compressed(key, fingerprint, plain, codec)
        if packed is None:
            packed = Packed(Header(key, fingerprint, payload_bytes, payload_checksum(plain)), padded)
        return packed

    def _compressed(self, key: ChunkKey, fingerprint: bytes, plain: np.ndarray, codec: Codec) -> Packed | None:
        """None when it is not worth it."""
        buffer = self._take_buffer(aligned(plain.nbytes))
        stored_bytes = compress(plain, codec, self._item, buffer)
        if not stored_bytes:
            self._buffers.append(buffer)
            return None
        padded = buffer[: aligned(stored_bytes)]
        padded[stored_bytes:] = 0
        header = Header(key, fingerprint, stored_bytes, payload_checksum(padded[:stored_bytes]), codec)
        return Packed(header, padded, lambda: self._buffers.append(buffer))

    def sent(self, stored_bytes: int, seconds: float) -> None:
        """A transfer to the storage took so long."""
        with self._lock:
            self.stored_bytes += stored_bytes
            if self._choice is not None:
                self._choice.sent(stored_bytes, seconds)

    def received(self, stored_bytes: int, seconds: float) -> None:
        """A transfer from the storage took so long."""
        if self._choice is not None:
            with self._lock:
                self._choice.received(stored_bytes, seconds)

    def _next_codec(self, plain: np.ndarray) -> Codec:
        if self._choice is None:
            return self._codec
        with self._lock:
            due = self._choice.trial_due()
        if due:
            self._try(plain[:PART_BYTES])
        with self._lock:
            return self._choice.codec

    def _try(self, part: np.ndarray) -> None:
        """What each codec makes of a part, and how quickly."""
        assert self._choice is not None
        plain, out = _items(part, self._item), _scratch()[: part.nbytes]
        for codec in COMPRESSING:
            began_s = time.perf_counter()
            stored = _blosc_of(plain, codec)
            compressed_s = time.perf_counter()
            _library().decompress(stored, out)
            ended_s = time.perf_counter()
            with self._lock:
                self._choice.tried(codec, part.nbytes, len(stored), compressed_s - began_s, ended_s - compressed_s)

    def _take_buffer(self, size_bytes: int) -> np.ndarray:
        with contextlib.suppress(IndexError):
            buffer = self._buffers.pop()
            if buffer.nbytes >= size_bytes:
                return buffer
        return _pages(size_bytes)


def compress(plain: np.ndarray, codec: Codec, item: np.dtype[Any], into: np.ndarray) -> int:
    """Lay the compressed payload out in `into` (uint8, no shorter than `plain`). Returns its length; 0 when it is not worth
    it, which is found out by the first part where all are alike."""
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
    """Make the payload of `header` plain, which lies in `into` and was verified as it is stored. Returns its length.

    Raises CorruptChunk when it is not what was compressed, whatever it says of itself; nothing beyond `into` is touched.
    TierUnavailable when the library is missing.
    """
    if header.codec is Codec.PLAIN:
        return header.payload_bytes
    try:
        return decompress(into, header.payload_bytes)
    except FrameError as error:
        raise CorruptChunk(f"chunk {header.key.hex()}: {error}") from error


def decompress(into: np.ndarray, stored_bytes: int) -> int:
    """Replace the compressed payload in the first bytes of `into` by the plain one, whose length is returned. From the last
    part to the first, so that none overwrites what is still needed. Raises FrameError."""
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
    """Whether the whole of a compressed payload can be made plain, part by part, without room for all of it. Returns the
    plain length. Raises FrameError."""
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
    """Into all of `plain`. The decoder sees only what says of itself that it becomes just as long. Raises FrameError."""
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
    """This thread's own, as long as a part can be."""
    scratch: np.ndarray | None = getattr(_thread, "scratch", None)
    if scratch is None:
        scratch = _thread.scratch = _pages(aligned(PART_BYTES + _MOST_EXTRA_BYTES))
    return scratch


def _pages(size_bytes: int) -> np.ndarray:
    """Aligned to 4096 bytes; on huge pages where the system has them to give."""
    memory = mmap.mmap(-1, size_bytes)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def _library() -> Any:
    """Blosc. Raises TierUnavailable: what is stored compressed may be good, and is left where it is."""
    try:
        return _blosc()
    except ImportError as error:
        raise TierUnavailable(
            f"compressed chunks need numcodecs, which cannot be imported ({error}): pip install numcodecs"
        ) from error


@cache
def _blosc() -> Any:
    from numcodecs import blosc

    blosc.use_threads = False  # of its own: there are workers enough, and a call in a thread must not wait for others
    return blosc
