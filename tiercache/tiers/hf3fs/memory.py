"""Shared memory that rings read into and write from: the arena itself, or buffers of our own.

A transfer moves a chunk file's header and its payload. With buffers of our own both lie side by side and a worker thread
copies the payload; where the arena lies in shared memory it is registered itself, and only headers have a place of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from tiercache.core.header import HEADER_BYTES, aligned
from tiercache.errors import ConfigError, TierUnavailable
from tiercache.memory.arena import SHM_DIRECTORY, Arena, ArenaSettings

_BLOCK_BYTES = 256 << 10

Piece = tuple["RegisteredMemory", int, int]
"""Registered memory, an offset in it, a length."""


class RegisteredMemory:
    """One run of shared memory, with the two attributes that `make_iovec` asks of a SharedMemory.

    That class of the standard library has a second process remove the memory of whoever it thinks is gone; our arenas
    have a lock for that.
    """

    def __init__(self, name: str, memory: np.ndarray, is_ours_alone: Callable[[], bool] = lambda: False) -> None:
        """`is_ours_alone`: whether certainly no other process has the memory mapped."""
        self.name = name
        self.is_ours_alone = is_ours_alone
        self.buf = memory.data
        self.memory = memory
        self.iov: Any = None

    def register(self, library: Any, mount: str, numa: int) -> None:
        self.iov = library.make_iovec(self, mount, 0, numa)

    def unregister(self) -> None:
        """Blocks while the mount hangs.

        The iovec's finaliser unlinks the registration. It raises, where nobody can catch it, when that has gone with its
        daemon; so it is called here first, and finds a link of its own when it is called again.
        """
        iov, self.iov = self.iov, None
        if iov is None:
            return
        with contextlib.suppress(OSError):
            iov.__del__()
        with contextlib.suppress(OSError):
            stand_in, iov.link = tempfile.mkstemp(prefix="tiercache-")
            os.close(stand_in)

    def release(self) -> None:
        """The registration goes before the memory does."""
        self.unregister()
        self.buf.release()
        self.memory = np.empty(0, dtype=np.uint8)


class Buffers:
    """`count` places for a transfer each, in shared memory of `size_bytes` that is ours and goes with us."""

    def __init__(self, size_bytes: int, place_bytes: int, what: str) -> None:
        self.place_bytes = place_bytes
        self.count = size_bytes // place_bytes
        if self.count < 2:
            raise ConfigError(
                f"hf3fs_iov_size: {size_bytes} bytes hold {self.count} {what} of {place_bytes} bytes; at least 2 are needed"
            )
        self._arena = Arena(ArenaSettings(size_bytes=size_bytes, shm_name=f"iov-{os.getpid()}-{uuid.uuid4().hex}"))
        assert self._arena.shm_path is not None
        self.registered = RegisteredMemory(self._arena.shm_path.name, self._arena.memory)
        self._free: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        for place in range(self.count - 1, -1, -1):
            self._free.put_nowait(place)

    async def take(self, patience_s: float) -> int:
        """A free place. Raises TierUnavailable when there is none for so long: transfers that hang have them all."""
        if not self._free.empty():
            return self._free.get_nowait()
        try:
            async with asyncio.timeout(patience_s):
                return await self._free.get()
        except TimeoutError:
            raise TierUnavailable(f"no transfer buffer was free for {patience_s:.1f} s") from None

    def give_back(self, place: int) -> None:
        self._free.put_nowait(place)

    def view(self, place: int) -> np.ndarray:
        """Empty when the buffers were closed meanwhile."""
        start = place * self.place_bytes
        return self.registered.memory[start : start + self.place_bytes]

    def piece(self, place: int, start: int, length_bytes: int) -> Piece:
        return self.registered, place * self.place_bytes + start, length_bytes

    def close(self) -> None:
        """Blocks while the mount hangs."""
        self.registered.release()
        self._arena.close()


def copy_with_checksum(source: np.ndarray, target: np.ndarray) -> int:
    """As `payload_checksum(source)`, copied on the way: each block is read once from memory and once from the cache."""
    digest = xxhash.xxh3_64()
    for start in range(0, source.nbytes, _BLOCK_BYTES):
        block = source[start : start + _BLOCK_BYTES]
        digest.update(block.data)
        np.copyto(target[start : start + block.nbytes], block)
    return digest.intdigest()


def transfer_bytes(chunk_bytes: int) -> int:
    """Of a whole chunk file."""
    return HEADER_BYTES + aligned(chunk_bytes)


def registered_arena(arena: Arena) -> RegisteredMemory | None:
    """The arena, to be registered; None where it does not lie in shared memory."""
    if arena.shm_path is None or arena.shm_path.parent != SHM_DIRECTORY or not os.path.exists(arena.shm_path):
        return None
    return RegisteredMemory(arena.shm_path.name, arena.memory, arena.is_ours_alone)
