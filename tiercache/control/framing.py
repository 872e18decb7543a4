"""How messages travel on our Unix sockets, those of caches and those of look-ups: a length of four bytes, then msgpack."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from tiercache.control.messages import LARGEST_MESSAGE_BYTES, ControlError

_LENGTH_BYTES = 4
_PART_BYTES = 64 << 10


def frame(content: Any) -> bytes:
    packed = msgspec.msgpack.encode(content)
    return len(packed).to_bytes(_LENGTH_BYTES, "big") + packed


async def receive(reader: asyncio.StreamReader, largest_bytes: int = LARGEST_MESSAGE_BYTES) -> bytearray:
    """The next message, packed. Raises ControlError ("too_large") without reading it, IncompleteReadError at the end."""
    length = await receive_length(reader, largest_bytes)
    packed = bytearray()
    while len(packed) < length:
        await receive_part(reader, packed, length)
    return packed


async def receive_length(reader: asyncio.StreamReader, largest_bytes: int = LARGEST_MESSAGE_BYTES) -> int:
    """Of the next message, in bytes. Raises as `receive`."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    if length > largest_bytes:
        raise ControlError("too_large", f"expected a message of at most {largest_bytes} bytes, found {length}")
    return length


async def receive_part(reader: asyncio.StreamReader, packed: bytearray, length: int) -> None:
    """What there is of the rest of a message, behind `packed`: eight MiB in one go would hold the loop."""
    part = await reader.read(min(_PART_BYTES, length - len(packed)))
    if not part:
        raise asyncio.IncompleteReadError(b"", length)
    packed += part
