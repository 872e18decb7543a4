"""The bytes of a chunk are a pure function of its name, so every process can verify every chunk."""

from __future__ import annotations

import hashlib

import numpy as np

from tiercache.core.keys import KEY_BYTES, ChunkKey

CHUNK_BYTES = 32 * 1024
TOP_DIRECTORIES = 32
"""Keys begin with so many different bytes: a small cap is not eaten up by directories."""

LANES = 3
"""Of a worker, side by side: each with keys of its own, so that the order of what happens to a key is known."""
KEYS_A_LANE = 24
PROMPT = 6
"""So many keys that follow one another are a prefix."""
SLOTS = 4
"""Places for workers: one that was killed is followed by another, with the same keys."""
KEYS_A_SLOT = (LANES + 1) * KEYS_A_LANE
"""One lane more than work: the keys by which a worker proves that the place works."""


def number_of(slot: int, lane: int, index: int) -> int:
    """Chunks are numbers outside of the cache."""
    return slot * KEYS_A_SLOT + lane * KEYS_A_LANE + index


def key_of(place: str, number: int) -> ChunkKey:
    digest = hashlib.blake2b(f"{place}/{number}".encode(), digest_size=KEY_BYTES - 1).digest()
    return bytes([number % TOP_DIRECTORIES]) + digest


def payload_of(key: ChunkKey) -> np.ndarray:
    """uint8[1 .. CHUNK_BYTES]. Begins with the key itself, and every word differs from every other one. Half of them can be
    compressed, as KV can: every second byte has few values."""
    seed = int.from_bytes(key[-8:], "little")
    words = np.arange(CHUNK_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(seed)
    payload = words.view(np.uint8)
    if seed & 16:
        payload[1::2] &= 0x07
    payload[:KEY_BYTES] = np.frombuffer(key, np.uint8)
    # Most chunks are whole; some are tails.
    return payload if seed % 8 else payload[: 1 + seed // 8 % CHUNK_BYTES]


def difference(expected: np.ndarray, found: np.ndarray) -> str | None:
    """Where `found` is not what it must be, in words; None where it is."""
    if len(expected) != len(found):
        return f"expected {len(expected)} bytes, found {len(found)}"
    wrong = np.flatnonzero(expected != found)
    if not len(wrong):
        return None
    at = int(wrong[0])
    end = at + 16
    return (
        f"{len(wrong)} of {len(expected)} bytes are wrong, the first at {at}: expected {expected[at:end].tobytes().hex()}, "
        f"found {found[at:end].tobytes().hex()}"
    )
