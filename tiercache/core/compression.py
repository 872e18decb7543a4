"""Bit-exact compression of payloads: how a compressed one is laid out, and when one is worth it. The codecs themselves are
called in `tiers/compression.py`.

KV in bfloat16 is hardly compressible as it lies: the bytes of its mantissas are noise. Its exponents are not, so bytes (or
bits) of like weight are put together first, as Blosc does ("shuffle").

A compressed payload is cut into parts, so that no call works on more than a part:

| offset | bytes | field |
|---|---|---|
| 0 | 8 | length of the plain payload |
| 8 | 8 | xxh3-64 of the plain payload |
| 16 | 4 | plain length of each part but the last |
| 20 | 4 | number of parts |
| 24 | 4 each | stored length of each part |

and the parts behind it. The chunk's header says which codec it was, and has length and checksum of all of this.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate
from typing import Any

PART_BYTES = 1 << 20
_WORTH = 0.95
"""What compression has to leave at most to be worth anything."""
_TRIAL_EVERY = 256
"""Chunks. What a codec leaves and takes is looked at anew so often."""
_FASTER = 0.9
"""Of the time without a codec: what is hardly quicker is left alone."""

_FIXED = struct.Struct("<QQII")


class FrameError(ValueError):
    """What should be a compressed payload is none. The message says what was expected and found."""


class Codec(IntEnum):
    """What a header says of its payload. The numbers are part of the format."""

    PLAIN = 0
    LZ4 = 1
    """Bit shuffle, and LZ4."""
    ZSTD = 2
    """Byte shuffle, and Zstandard."""


COMPRESSING = (Codec.LZ4, Codec.ZSTD)
MODES = ("none", "lz4", "zstd", "auto")
"""What a tier may be told."""


@dataclass(frozen=True)
class Frame:
    """The beginning of a compressed payload."""

    plain_bytes: int
    plain_checksum: int
    part_bytes: int
    stored: tuple[int, ...]
    """Of each part."""

    @property
    def packed_bytes(self) -> int:
        return packed_bytes(len(self.stored))

    @property
    def stored_bytes(self) -> int:
        """Of the whole compressed payload."""
        return self.packed_bytes + sum(self.stored)

    def pack(self) -> bytes:
        fixed = _FIXED.pack(self.plain_bytes, self.plain_checksum, self.part_bytes, len(self.stored))
        return fixed + struct.pack(f"<{len(self.stored)}I", *self.stored)

    @classmethod
    def unpack(cls, raw: Any, stored_bytes: int, room_bytes: int) -> Frame:
        """From the first bytes of a payload of `stored_bytes`, which becomes `room_bytes` at most. Raises FrameError.

        A frame that passes can be taken apart from its end, in place: see `fits_in_place`.
        """
        if stored_bytes < _FIXED.size or len(raw) < _FIXED.size:
            raise FrameError(f"compressed payload: expected at least {_FIXED.size} bytes, found {stored_bytes}")
        plain_bytes, checksum, part_bytes, count = _FIXED.unpack(raw[: _FIXED.size])
        if not 0 < plain_bytes <= room_bytes:
            raise FrameError(f"plain length: expected at most {room_bytes}, found {plain_bytes}")
        if part_bytes != PART_BYTES or count != parts_of(plain_bytes):
            raise FrameError(f"parts: {count} of {part_bytes} bytes do not make {plain_bytes}")
        if packed_bytes(count) > min(stored_bytes, len(raw)):
            raise FrameError(f"compressed payload: {stored_bytes} bytes have no room for {count} parts")
        stored = struct.unpack_from(f"<{count}I", raw, _FIXED.size)
        frame = cls(plain_bytes, checksum, part_bytes, stored)
        if not all(stored) or frame.stored_bytes != stored_bytes:
            raise FrameError(f"compressed payload: expected {frame.stored_bytes} bytes, found {stored_bytes}")
        if not frame.fits_in_place:
            raise FrameError("compressed payload: a part lies behind its plain place")
        return frame

    def plain_bytes_of(self, number: int) -> int:
        """Of that part."""
        return min(self.part_bytes, self.plain_bytes - number * self.part_bytes)

    @property
    def starts(self) -> list[int]:
        """Where each part begins in the compressed payload."""
        return list(accumulate(self.stored[:-1], initial=self.packed_bytes))

    @property
    def fits_in_place(self) -> bool:
        """Whether no part but the first begins behind where its plain bytes do: then the last part can be replaced by its
        plain bytes first, and so on to the front, without a second buffer."""
        return all(start <= number * self.part_bytes for number, start in enumerate(self.starts) if number)


def parts_of(plain_bytes: int) -> int:
    return -(-plain_bytes // PART_BYTES)


def packed_bytes(parts: int) -> int:
    """Length of a frame of so many parts, without them."""
    return _FIXED.size + 4 * parts


def worth_storing(stored_bytes: int, plain_bytes: int) -> bool:
    """Whether so many bytes are few enough to store them in place of the plain ones."""
    return stored_bytes <= _WORTH * plain_bytes


def item_bytes(kv_dtype: str) -> int:
    """Of one number, as a layout calls its type: bfloat16, float8_e4m3, torch.float32, ... 1 where that is not known."""
    name = kv_dtype.rpartition(".")[2].lower()
    if name in ("half", "float", "double"):
        return {"half": 2, "float": 4, "double": 8}[name]
    digits = name.partition("_")[0].lstrip("abcdefghijklmnopqrstuvwxyz")
    return int(digits) // 8 if digits in ("8", "16", "32", "64") else 1


@dataclass
class _Average:
    """Seconds a byte, the latest counting most."""

    weight: float
    value: float | None = None

    def add(self, bytes_moved: int, seconds: float) -> None:
        found = seconds / max(1, bytes_moved)
        self.value = found if self.value is None else self.value + self.weight * (found - self.value)


@dataclass
class _Candidate:
    """What a codec did when it was tried last; times are of a plain byte."""

    ratio: float = 1.0
    compress: _Average = field(default_factory=lambda: _Average(0.5))
    decompress: _Average = field(default_factory=lambda: _Average(0.5))


class CompressionChoice:
    """Which codec the next chunk gets, where the tier is to find that out (`auto`).

    Somebody waits for reads: the codec is chosen with which a chunk is back soonest, transfer and decompression one after
    the other. Nobody waits for a write, but what is written must keep up: with the codec as many chunks a second have to get
    there as without. All times are measured: transfers as they come, codecs by a part of every 256th chunk, beside all that
    the machine does then.
    """

    def __init__(self, concurrency: int = 4) -> None:
        """`concurrency` is the number of transfers at a time: while some compress, the others have the link."""
        self._concurrency = concurrency
        self._sending = _Average(1 / 8)
        self._receiving = _Average(1 / 8)
        self._candidates = {codec: _Candidate() for codec in COMPRESSING}
        self._chunks_until_trial = 0

    def trial_due(self) -> bool:
        """Told of each chunk: whether codecs are to be tried with it."""
        self._chunks_until_trial -= 1
        if self._chunks_until_trial >= 0:
            return False
        self._chunks_until_trial = _TRIAL_EVERY - 1
        return True

    def tried(self, codec: Codec, plain_bytes: int, stored_bytes: int, compress_s: float, decompress_s: float) -> None:
        candidate = self._candidates[codec]
        candidate.ratio = stored_bytes / plain_bytes
        candidate.compress.add(plain_bytes, compress_s)
        candidate.decompress.add(plain_bytes, decompress_s)

    def sent(self, stored_bytes: int, seconds: float) -> None:
        self._sending.add(stored_bytes, seconds)

    def received(self, stored_bytes: int, seconds: float) -> None:
        self._receiving.add(stored_bytes, seconds)

    @property
    def codec(self) -> Codec:
        """PLAIN as long as no transfer is known; what was never read is taken to be read as it is written."""
        sending_s = self._sending.value
        if sending_s is None:
            return Codec.PLAIN
        receiving_s = sending_s if self._receiving.value is None else self._receiving.value
        best, best_s = Codec.PLAIN, _FASTER * receiving_s
        for codec, candidate in self._candidates.items():
            ratio, compress_s, decompress_s = candidate.ratio, candidate.compress.value, candidate.decompress.value
            if compress_s is None or decompress_s is None or not worth_storing(round(1000 * ratio), 1000):
                continue
            keeps_up = compress_s + ratio * sending_s / self._concurrency <= sending_s
            back_s = ratio * receiving_s + decompress_s
            if keeps_up and back_s < best_s:
                best, best_s = codec, back_s
        return best
