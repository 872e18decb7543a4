"""A set of keys that never lets one go, in a fixed amount of memory: a Bloom filter."""

from __future__ import annotations

import xxhash

from tiercache.core.keys import ChunkKey

_PLACES = 4
"""Bits that stand for a key."""


class KeyFilter:
    """Holds every key that was added, and some that were not: of a million keys in 2 MiB, one other key in 400, and the more
    of them the more keys are added.

    Source: Bloom, "Space/time trade-offs in hash coding with allowable errors" (1970); Kirsch and Mitzenmacher, "Less
    hashing, same performance" (2006).
    """

    def __init__(self, size_bytes: int = 2 << 20) -> None:
        """`size_bytes` is a power of two. The memory is taken with the first key."""
        self._size_bytes = size_bytes
        self._bits: bytearray | None = None

    def __bool__(self) -> bool:
        return self._bits is not None

    def __contains__(self, key: ChunkKey) -> bool:
        bits = self._bits
        return bits is not None and all(bits[place >> 3] >> (place & 7) & 1 for place in self._places(key))

    def add(self, key: ChunkKey) -> None:
        if self._bits is None:
            self._bits = bytearray(self._size_bytes)
        for place in self._places(key):
            self._bits[place >> 3] |= 1 << (place & 7)

    def _places(self, key: ChunkKey) -> list[int]:
        first = xxhash.xxh3_64_intdigest(key)
        step = (first >> 32) | 1
        last_place = 8 * self._size_bytes - 1
        return [(first + number * step) & last_place for number in range(_PLACES)]
