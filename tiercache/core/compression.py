"""Bit-exact compression of payloads: the codecs, and the choice of one. `tiers/compression.py` calls them.

KV in bfloat16 is hardly compressible as it is, since the bytes of its mantissas are noise. Its exponents are not, so bytes
(or bits) of equal weight are put together first, as Blosc does ("shuffle").

A compressed payload is the xxh3-64 of the plain one (8 bytes, little-endian) and a Blosc frame for each part of 1 MiB. The
chunk's header names the codec, and has length and checksum of the compressed payload.
"""

from __future__ import annotations

from enum import IntEnum

_WORTH = 0.95
"""A compressed payload is stored if it has at most this share of the plain bytes."""
_TRIAL_EVERY = 256
"""Chunks from one measurement of the codec to the next."""
_FASTER = 0.9
"""Chunks are compressed if reads then take less than this share of their time without compression."""


class Codec(IntEnum):
    """The codec of a payload, as in its header. The numbers are part of the format."""

    PLAIN = 0
    LZ4 = 1
    """LZ4 after a bit shuffle."""
    ZSTD = 2
    """Zstandard after a byte shuffle."""


COMPRESSING = (Codec.LZ4, Codec.ZSTD)
MODES = ("none", "lz4", "zstd", "auto")
"""The values of a tier's `compression`."""


def worth_storing(stored_bytes: int, plain_bytes: int) -> bool:
    """Return True if the compressed payload is short enough to be stored in place of the plain one."""
    return stored_bytes <= _WORTH * plain_bytes


def item_bytes(kv_dtype: str) -> int:
    """Return the length of a number of a layout's type (bfloat16, float8_e4m3, torch.float32, ...); 1 for unknown types."""
    name = kv_dtype.rpartition(".")[2].lower()
    if name in ("half", "float", "double"):
        return {"half": 2, "float": 4, "double": 8}[name]
    digits = name.partition("_")[0].lstrip("abcdefghijklmnopqrstuvwxyz")
    return int(digits) // 8 if digits in ("8", "16", "32", "64") else 1


class CompressionChoice:
    """Decides if the next chunk is compressed by Zstandard (`compression: auto`).

    It is compressed if reads are shorter (transfer, then decompression) and the write rate is not lower. All times are
    measured per byte: transfers as they occur, the codec on a part of every 256th chunk under the current load.
    Threads may call it without a lock: a measurement that another thread overwrites is one of many.
    """

    def __init__(self, concurrency: int = 4) -> None:
        """`concurrency` is the number of transfers at a time: while some compress, the others use the link."""
        self._concurrency = concurrency
        self._sending_s: float | None = None
        self._receiving_s: float | None = None
        self._ratio = 1.0
        self._compress_s: float | None = None
        self._decompress_s: float | None = None
        self._chunks_until_trial = 0

    def trial_due(self) -> bool:
        """Return True if the codec has to be measured with this chunk. Called for each chunk."""
        self._chunks_until_trial -= 1
        if self._chunks_until_trial >= 0:
            return False
        self._chunks_until_trial = _TRIAL_EVERY - 1
        return True

    def tried(self, plain_bytes: int, stored_bytes: int, compress_s: float, decompress_s: float) -> None:
        self._ratio = stored_bytes / plain_bytes
        self._compress_s = _averaged(self._compress_s, compress_s / plain_bytes, 1 / 2)
        self._decompress_s = _averaged(self._decompress_s, decompress_s / plain_bytes, 1 / 2)

    def sent(self, stored_bytes: int, seconds: float) -> None:
        self._sending_s = _averaged(self._sending_s, seconds / max(1, stored_bytes), 1 / 8)

    def received(self, stored_bytes: int, seconds: float) -> None:
        self._receiving_s = _averaged(self._receiving_s, seconds / max(1, stored_bytes), 1 / 8)

    @property
    def codec(self) -> Codec:
        """The codec of the next chunk; PLAIN until a write and the codec were measured.

        Reads are assumed as fast as writes until measured.
        """
        sending_s, compress_s, decompress_s = self._sending_s, self._compress_s, self._decompress_s
        if sending_s is None or compress_s is None or decompress_s is None or self._ratio > _WORTH:
            return Codec.PLAIN
        receiving_s = sending_s if self._receiving_s is None else self._receiving_s
        keeps_up = compress_s + self._ratio * sending_s / self._concurrency <= sending_s
        is_shorter = self._ratio * receiving_s + decompress_s < _FASTER * receiving_s
        return Codec.ZSTD if keeps_up and is_shorter else Codec.PLAIN


def _averaged(average: float | None, found: float, weight: float) -> float:
    """Return the next exponentially weighted average."""
    return found if average is None else average + weight * (found - average)
