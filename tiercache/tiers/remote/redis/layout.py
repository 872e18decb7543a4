"""How a chunk lies on a server.

`prefix:<key in hex>` is its head: the 88 bytes of the header, and the payload behind it if that fits in one segment. Such a
chunk is one value, stored and read in one round trip. A longer payload lies in segments, `{prefix:<key>}:<write id>:<n>`,
and the head ends with a manifest: how many there are, how long, and the write id. The braces keep all of it in one slot of
a cluster.

A write is published by its head, which is set only where there is none: the first writer of a chunk wins, and a reader
finds the segments of one writer or none. Segments expire until they are published: a writer that is killed half-way leaves
nothing for longer than a minute and its time-outs. The head is set and all segments get their final expiry (or none) in one
step, by a script (EVAL); when one of them is gone, nothing is left of the chunk. So what can be seen is whole and stays,
whoever dies, and a server that carries the script out after its client has given up does no harm. A writer that has not
heard the answer asks again, and knows its own head by the write id.

A head is taken away with all that it names in one step, too, and only if it still is the one that was looked at: segments
that never expire always have a head, whoever writes, removes or dies meanwhile. A server that evicts may take a head alone;
it comes to the segments in their turn.

While the slot moves between two servers of a cluster there are no such steps. Then a writer lets its segments stay for a
day (no longer than they are to), sets the head, and gives them their final expiry: one that dies in between leaves a chunk
that goes after a day, unless somebody stores it until then, and one that dies before the head leaves segments of nobody for
as long. A head goes after its segments were given an expiry, and only who dies just when the writer gives them their final
one leaves them behind.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tiercache.core.header import MAGIC, PACKED_BYTES, Header, HeaderError
from tiercache.core.keys import ChunkKey

_MANIFEST = struct.Struct("<QQ16s")
"""Segments, bytes of each but the last, write id."""
MANIFEST_BYTES = _MANIFEST.size
HEAD_BYTES = PACKED_BYTES + MANIFEST_BYTES
"""Of a head whose payload lies elsewhere."""
SMALLEST_SEGMENT_BYTES = 4096
"""A payload that is not longer lies in the head: a manifest cannot be taken for one."""
_MOST_SEGMENTS = 1 << 16
"""Of a head that nothing else bounds."""

State = Literal["none", "ours", "broken", "foreign"]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    name: bytes
    part: memoryview
    """Of the payload."""


def head_name(prefix: str, key: ChunkKey) -> bytes:
    return f"{prefix}:{key.hex()}".encode() if prefix else key.hex().encode()


def new_manifest(payload_bytes: int, segment_bytes: int) -> bytes:
    return _MANIFEST.pack(-(-payload_bytes // segment_bytes), segment_bytes, os.urandom(16))


def segments_of(head: bytes, manifest: bytes, payload: memoryview) -> list[Segment]:
    """The segments of a payload of this length. Raises HeaderError when the manifest does not fit it."""
    count, segment_bytes, write_id = _MANIFEST.unpack(manifest)
    if count > _MOST_SEGMENTS or count != _segments(len(payload), segment_bytes):
        raise HeaderError(f"manifest: {count} segments of {segment_bytes} bytes do not make {len(payload)} bytes")
    return [
        Segment(name, payload[number * segment_bytes : (number + 1) * segment_bytes])
        for number, name in enumerate(_names(head, count, write_id))
    ]


def segment_names(head: bytes, value: bytes, chunk_bytes: int) -> Iterator[bytes]:
    """Of a head whose payload lies elsewhere, and which may be damaged: then the segments that it may have had.

    No checksum covers the manifest, so it is believed as far as the length of the payload bears it out, which the header's
    covers; where the header is damaged too, a chunk has `chunk_bytes` at most.
    """
    count, segment_bytes, write_id = _MANIFEST.unpack(value[PACKED_BYTES:HEAD_BYTES])
    try:
        payload_bytes = Header.unpack(value).payload_bytes
    except HeaderError:
        payload_bytes = chunk_bytes
    most = min(_MOST_SEGMENTS, _segments(payload_bytes, SMALLEST_SEGMENT_BYTES))
    likely = [number for number in (count, _segments(payload_bytes, segment_bytes)) if number <= most]
    return _names(head, max(likely, default=0), write_id)


def lies_elsewhere(value: bytes, length: int) -> bool:
    """Whether a value of `length` bytes, which begins with `value`, is a header and a manifest."""
    return length == HEAD_BYTES and is_ours(value) and Header.payload_bytes_of(value) > SMALLEST_SEGMENT_BYTES


def is_ours(value: bytes) -> bool:
    return value[: len(MAGIC)] == MAGIC and len(value) >= PACKED_BYTES


def is_torn(value: bytes) -> bool:
    """Whether it is what is left of a value of ours, be it nothing."""
    return len(value) < PACKED_BYTES and MAGIC.startswith(value[: len(MAGIC)])


def state_of(key: ChunkKey, fingerprint: bytes, beginning: bytes, length: int) -> State:
    """What a value of `length` bytes is that begins so; -1: there is none."""
    if length < 0:
        return "none"
    if is_torn(beginning):
        return "broken"
    if not is_ours(beginning):
        return "foreign"
    try:
        header = Header.check(beginning, key, fingerprint)
        if lies_elsewhere(beginning, length):
            count, segment_bytes, _ = _MANIFEST.unpack(beginning[PACKED_BYTES:])
            whole = count == _segments(header.payload_bytes, segment_bytes)
        else:
            whole = length == PACKED_BYTES + header.payload_bytes
    except HeaderError:
        return "broken"
    return "ours" if whole else "broken"


def _segments(payload_bytes: int, segment_bytes: int) -> int:
    """How many a payload has; none where they would be shorter than any that was ever written."""
    return -(-payload_bytes // segment_bytes) if segment_bytes >= SMALLEST_SEGMENT_BYTES else 0


def _names(head: bytes, count: int, write_id: bytes) -> Iterator[bytes]:
    stem = b"{%b}:%b" % (head, write_id.hex().encode())
    return (b"%b:%d" % (stem, number) for number in range(count))
