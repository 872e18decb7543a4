"""Frame messages on Unix sockets, for control and for lookups: a length of four bytes, then msgpack."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from tiercache.control.messages import LARGEST_MESSAGE_BYTES, ControlError

_LENGTH_BYTES = 4


def frame(content: Any) -> bytes:
    packed = msgspec.msgpack.encode(content)
    return len(packed).to_bytes(_LENGTH_BYTES, "big") + packed


async def receive(reader: asyncio.StreamReader, largest_bytes: int = LARGEST_MESSAGE_BYTES) -> bytes:
    """Return the next message, packed. Raises ControlError ("too_large") before reading it, or IncompleteReadError."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    if length > largest_bytes:
        raise ControlError("too_large", f"expected a message of at most {largest_bytes} bytes, found {length}")
    return await reader.readexactly(length)
