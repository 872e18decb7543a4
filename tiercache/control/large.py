"""Decoding of large messages in short steps: msgpack's decoder holds the interpreter for 0.1 s and more for eight MiB.

A large message is large by its `tokens` or `keys`. These are decoded some thousands at a time, and what is left of it as any
other message.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator
from typing import Any

import msgspec

from tiercache.control.messages import Command, ControlError, HexKey, Prefix, Token, decode
from tiercache.core.keys import KEY_BYTES, TAGGED_KEY_BYTES

FROM_BYTES = 16 << 10
"""A message of that length is decoded in one go."""
_AT_ONCE = 8192
_MOST_TOKENS = 1 << 21
_MOST_KEYS = 1 << 16
_KEY_HEADS = (bytes([0xD9, 2 * KEY_BYTES]), bytes([0xD9, 2 * TAGGED_KEY_BYTES]))

_tokens: msgspec.msgpack.Decoder[list[int]] = msgspec.msgpack.Decoder(list[Token])
_keys: msgspec.msgpack.Decoder[list[str]] = msgspec.msgpack.Decoder(list[HexKey])

_NUMBER_BYTES = bytes(
    {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}.get(
        tag, 1 if tag < 0x80 or tag >= 0xE0 else 0
    )
    for tag in range(256)
)
"""By its first byte, how long an integer is; 0: it is none."""
_FIXED_BYTES = {0xC0: 1, 0xC2: 1, 0xC3: 1, 0xCA: 5, 0xCB: 9, 0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18}
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}


def decode_large(packed: bytes | bytearray) -> Generator[None, None, Command]:
    """As `decode`, with a pause after each short step. Tokens are an `array` then.

    Raises ControlError: "malformed", or "too_large" for more tokens or keys than anybody can mean.
    """
    rest = bytearray()
    found: dict[str, Any] = {}
    try:
        entries, position = _count(packed, 0, 0x80, 0xDE)
        for _ in range(min(entries, 64)):
            end = _end(packed, position)
            name = bytes(packed[position + 1 : end])
            rest += packed[position:end]
            position = end
            if name in (b"tokens", b"keys") and _is_array(packed[position]):
                elements = _token_array if name == b"tokens" else _key_list
                found[name.decode()], position = yield from elements(packed, position)
                rest.append(0x90)  # an empty array, for the decoder of the others
            else:
                end = _end(packed, position)
                rest += packed[position:end]
                position = end
            if len(rest) > FROM_BYTES:
                raise ControlError("malformed", f"malformed message: more than {FROM_BYTES} bytes beside tokens and keys")
    except IndexError:
        raise ControlError("malformed", "malformed message: it ends in the middle of a value") from None
    if entries > 64 or position != len(packed):
        raise ControlError("malformed", "malformed message: expected one map of at most 64 fields, and nothing behind it")
    command = decode(bytes([0xDE, 0, entries]) + rest)
    for field, value in found.items():
        assert isinstance(command, Prefix)  # others have no such fields, and are refused for them
        setattr(command, field, value)
    return command


def _token_array(packed: bytes | bytearray, position: int) -> Generator[None, None, tuple[array[int], int]]:
    count, position = _count(packed, position, 0x90, 0xDC)
    _check_count("tokens", count, _MOST_TOKENS)
    tokens = array("I")
    for first in range(0, count, _AT_ONCE):
        some = min(_AT_ONCE, count - first)
        end = position
        for number in range(some):
            length = _NUMBER_BYTES[packed[end]]
            if not length:
                raise ControlError("malformed", f"malformed message: Expected `int` - at `$.tokens[{first + number}]`")
            end += length
        tokens.extend(_elements(_tokens, packed[position:end], some, "tokens", first))
        position = end
        yield
    return tokens, position


def _key_list(packed: bytes | bytearray, position: int) -> Generator[None, None, tuple[list[str], int]]:
    count, position = _count(packed, position, 0x90, 0xDC)
    _check_count("keys", count, _MOST_KEYS)
    keys: list[str] = []
    head = bytes(packed[position : position + 2])  # of all: the keys of a prefix have all a tag, or none has one
    size = len(head) + head[-1] if head in _KEY_HEADS else 0
    for first in range(0, count, _AT_ONCE):
        some = min(_AT_ONCE, count - first)
        end = position + some * size
        part = packed[position:end]
        if not size or any(part[place::size].count(byte) != some for place, byte in enumerate(head)):
            raise ControlError(
                "malformed",
                f"malformed message: Expected {2 * KEY_BYTES} hex digits, or {2 * TAGGED_KEY_BYTES} in all keys "
                f"- at or behind `$.keys[{first}]`",
            )
        keys += _elements(_keys, part, some, "keys", first)
        position = end
        yield
    return keys, position


def _elements(
    decoder: msgspec.msgpack.Decoder[list[Any]], part: bytes | bytearray, some: int, name: str, first: int
) -> list[Any]:
    try:
        return decoder.decode(b"\xdd" + some.to_bytes(4, "big") + part)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ControlError("malformed", f"malformed message: {error}, counted from `$.{name}[{first}]`") from None


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise ControlError("too_large", f"{name}: expected at most {most} in one message, found {count}")


def _is_array(tag: int) -> bool:
    return tag >> 4 == 0x9 or tag in (0xDC, 0xDD)


def _count(packed: bytes | bytearray, position: int, short_tag: int, long_tag: int) -> tuple[int, int]:
    """How many elements an array or a map has, and where the first one is."""
    tag = packed[position]
    if tag & 0xF0 == short_tag:
        return tag & 0x0F, position + 1
    if tag not in (long_tag, long_tag + 1):
        raise ControlError("malformed", "malformed message: Expected `object`")
    width = 2 if tag == long_tag else 4
    return int.from_bytes(packed[position + 1 : position + 1 + width], "big"), position + 1 + width


def _end(packed: bytes | bytearray, position: int) -> int:
    """Where the value at `position` ends. Gives up behind `FROM_BYTES`: only tokens and keys are longer."""
    start, values = position, 1
    while values:
        if position - start > FROM_BYTES:
            raise ControlError("malformed", f"malformed message: more than {FROM_BYTES} bytes beside tokens and keys")
        values -= 1
        tag = packed[position]
        if tag >> 4 in (0x8, 0x9) or tag in (0xDC, 0xDD, 0xDE, 0xDF):
            is_map = tag >> 4 == 0x8 or tag >= 0xDE
            count, position = _count(packed, position, *((0x80, 0xDE) if is_map else (0x90, 0xDC)))
            values += 2 * count if is_map else count
        elif 0xA0 <= tag < 0xC0:
            position += 1 + (tag & 0x1F)
        elif tag in _LENGTH_BYTES:
            width = _LENGTH_BYTES[tag]
            length = int.from_bytes(packed[position + 1 : position + 1 + width], "big")
            position += 1 + width + length + (0xC7 <= tag <= 0xC9)
        else:
            length = _NUMBER_BYTES[tag] or _FIXED_BYTES.get(tag, 0)
            if not length:
                raise ControlError("malformed", f"malformed message: no value begins with 0x{tag:02x}")
            position += length
    if position > len(packed):
        raise IndexError
    return position
