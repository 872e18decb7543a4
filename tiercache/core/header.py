r"""The 4096-byte header in front of every payload that leaves this process's memory.

| offset | bytes | field |
|---|---|---|
| 0 | 8 | magic `TIERKV\r\n` (a transfer that mangles line ends mangles the magic) |
| 8 | 4 | format version: 1, or 3 for a payload that is compressed |
| 12 | 2 | length of the key |
| 14 | 2 | codec of the payload, 0 for none: `tiercache.core.compression` |
| 16 | 32 | key, zero-padded |
| 48 | 16 | layout fingerprint |
| 64 | 8 | payload length, as stored |
| 72 | 8 | xxh3-64 of the payload, as stored |
| 80 | 8 | xxh3-64 of the 80 bytes before |

The rest is zero: 4096 bytes keep the payload aligned for O_DIRECT.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import xxhash

from tiercache.core.compression import COMPRESSING, Codec
from tiercache.core.layout import FINGERPRINT_BYTES

HEADER_BYTES = 4096
ALIGNMENT_BYTES = 4096
MAGIC = b"TIERKV\r\n"
VERSION = 1
COMPRESSED_VERSION = 3
"""The version of headers with a codec, so that a reader without codecs does not take the payload for plain."""

_FIELDS = struct.Struct("<8sIHH32s16sQQ")
_CHECKSUM = struct.Struct("<Q")
_KEY_FIELD_BYTES = 32
_CODECS = {VERSION: [int(Codec.PLAIN)], COMPRESSED_VERSION: [int(codec) for codec in COMPRESSING]}


class HeaderError(ValueError):
    """A header is not valid. The message names the field, what was expected and what was found."""


@dataclass(frozen=True)
class Header:
    key: bytes
    fingerprint: bytes
    payload_bytes: int
    """Length of the stored payload, in bytes. The checksum covers the stored payload, too."""
    payload_checksum: int
    codec: Codec = Codec.PLAIN

    def pack(self) -> bytes:
        """Return the 88 bytes of the header that are not padding."""
        if not 0 < len(self.key) <= _KEY_FIELD_BYTES:
            raise HeaderError(f"key: expected 1..{_KEY_FIELD_BYTES} bytes, found {len(self.key)}")
        if len(self.fingerprint) != FINGERPRINT_BYTES:
            raise HeaderError(f"fingerprint: expected {FINGERPRINT_BYTES} bytes, found {len(self.fingerprint)}")
        fields = _FIELDS.pack(
            MAGIC,
            COMPRESSED_VERSION if self.codec else VERSION,
            len(self.key),
            self.codec,
            self.key,
            self.fingerprint,
            self.payload_bytes,
            self.payload_checksum,
        )
        return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))

    @classmethod
    def unpack(cls, raw: Any) -> Header:
        """Read a header from a buffer of at least 88 bytes. Raises HeaderError."""
        if len(raw) < PACKED_BYTES:
            raise HeaderError(f"header: expected {PACKED_BYTES} bytes, found {len(raw)}")
        fields = bytes(raw[: _FIELDS.size])
        magic, version, key_bytes, codec, key, fingerprint, payload_bytes, payload_checksum = _FIELDS.unpack(fields)
        if magic != MAGIC:
            raise HeaderError(f"magic: expected {MAGIC!r}, found {magic!r}")
        (checksum,) = _CHECKSUM.unpack(bytes(raw[_FIELDS.size : PACKED_BYTES]))
        computed = xxhash.xxh3_64_intdigest(fields)
        if checksum != computed:
            raise HeaderError(f"header checksum: expected {computed:016x}, found {checksum:016x}")
        if version not in (VERSION, COMPRESSED_VERSION):
            raise HeaderError(f"version: expected {VERSION} or {COMPRESSED_VERSION}, found {version}")
        if codec not in _CODECS[version]:
            raise HeaderError(f"codec: expected one of {_CODECS[version]} with version {version}, found {codec}")
        if not 0 < key_bytes <= _KEY_FIELD_BYTES:
            raise HeaderError(f"key length: expected 1..{_KEY_FIELD_BYTES}, found {key_bytes}")
        return cls(key[:key_bytes], fingerprint, payload_bytes, payload_checksum, Codec(codec))

    @classmethod
    def check(cls, raw: Any, key: bytes, fingerprint: bytes | None) -> Header:
        """Read a header as `unpack` does, and check that it belongs to `key`.

        Raises HeaderError unless the layout has `fingerprint` (None allows any layout).
        """
        header = cls.unpack(raw)
        if header.key != key:
            raise HeaderError(f"key: expected {key.hex()}, found {header.key.hex()}")
        if fingerprint is not None and header.fingerprint != fingerprint:
            raise HeaderError(f"layout: expected {fingerprint.hex()}, found {header.fingerprint.hex()}")
        return header

    def check_payload(self, checksum: int) -> None:
        """Raise HeaderError unless this is the payload's checksum."""
        if checksum != self.payload_checksum:
            raise HeaderError(f"payload checksum: expected {self.payload_checksum:016x}, found {checksum:016x}")


PACKED_BYTES = _FIELDS.size + _CHECKSUM.size


def payload_checksum(payload: Any) -> int:
    """Return the xxh3-64 of a contiguous buffer. Releases the GIL."""
    return xxhash.xxh3_64_intdigest(payload)


def aligned(length_bytes: int) -> int:
    """Round up to a multiple of 4096."""
    return -(-length_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def file_bytes(payload_bytes: int) -> int:
    """Return the length of a chunk file: the header and the padded payload."""
    return HEADER_BYTES + aligned(payload_bytes)
