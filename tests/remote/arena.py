"""Payloads as the cache has them: in an arena, which tiers register with their servers."""

from collections.abc import Iterator

import numpy as np
import pytest

from tiercache.core.header import aligned
from tiercache.core.keys import KEY_BYTES, ChunkKey
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.testing.contract import CHUNK_BYTES

ARENA = Arena(ArenaSettings(size_bytes=128 << 20))
_taken = 0


def page_aligned(length_bytes: int) -> np.ndarray:
    """As `tiercache.testing.contract.page_aligned`, until the test ends."""
    global _taken
    memory = ARENA.memory[_taken : _taken + aligned(length_bytes)]
    assert memory.nbytes == aligned(length_bytes), "the arena is used up"
    _taken += memory.nbytes
    memory[:] = 0
    return memory


def chunk(number: int, length_bytes: int = CHUNK_BYTES) -> tuple[ChunkKey, np.ndarray]:
    memory = page_aligned(length_bytes)
    memory[:length_bytes] = np.random.default_rng(number).integers(0, 256, length_bytes, dtype=np.uint8)
    return number.to_bytes(KEY_BYTES, "big"), memory


@pytest.fixture(autouse=True)
def payloads_in_the_arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those of the contract, too. What a module made when it was imported stays."""
    global _taken
    monkeypatch.setattr("tiercache.testing.contract.page_aligned", page_aligned)
    before = _taken
    yield
    _taken = before
