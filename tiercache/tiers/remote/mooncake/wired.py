"""Memory that Mooncake may read and write: the arena, headers, and a detour for whatever lies elsewhere."""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import numpy as np

from tiercache.core.header import PACKED_BYTES, aligned
from tiercache.errors import TierUnavailable

logger = logging.getLogger("tiercache.mooncake")

_CELL_BYTES = 128

Register = Callable[[int, int], int]
"""`register_buffer(address, size)`: 0 when good."""


class WiredMemory:
    """Thread-safe, but for `wire` and `release`, which come in turns. Stays mapped for as long as this object lives."""

    def __init__(self, arena: np.ndarray | None, chunk_bytes: int, cells: int, wait_s: float) -> None:
        self._arena = arena
        self._arena_wired = False
        self._headers = np.frombuffer(mmap.mmap(-1, aligned(cells * _CELL_BYTES)), dtype=np.uint8)
        self._free: SimpleQueue[int] = SimpleQueue()
        for number in range(cells):
            self._free.put(number * _CELL_BYTES)
        self._detour = np.frombuffer(mmap.mmap(-1, aligned(chunk_bytes)), dtype=np.uint8)
        self._detour_lock = threading.Lock()
        self._wait_s = wait_s
        self._registered: list[int] = []

    def wire(self, register: Register) -> int:
        """Register everything. Returns 0, also when all but the arena could be, else Mooncake's code."""
        for memory in (self._headers, self._detour):
            if code := self._wire(memory, register):
                return code
        if self._arena is not None and self._arena.nbytes:
            code = self._wire(self._arena, register)
            self._arena_wired = code == 0
            if code:
                logger.warning(
                    "the arena (%d bytes) cannot be registered with Mooncake (code %d): each chunk is copied once more; "
                    "with RDMA see ulimit -l",
                    self._arena.nbytes,
                    code,
                )
        return 0

    def release(self, unregister: Callable[[int], int]) -> None:
        """Nothing may be in flight."""
        while self._registered:
            unregister(self._registered.pop())
        self._arena_wired = False

    @contextlib.contextmanager
    def header(self) -> Iterator[tuple[np.ndarray, int]]:
        """Room for one header, and its address."""
        offset = self._free.get()
        try:
            yield self._headers[offset : offset + PACKED_BYTES], int(self._headers.ctypes.data) + offset
        finally:
            self._free.put(offset)

    @contextlib.contextmanager
    def reachable(self, payload: np.ndarray) -> Iterator[np.ndarray]:
        """`payload` itself where it lies in the arena, else as many bytes of the detour, which one thread has at a time.

        The caller copies. Raises TierUnavailable when the detour stays taken.
        """
        if self._arena_wired and self._arena is not None:
            offset = int(payload.ctypes.data) - int(self._arena.ctypes.data)
            if 0 <= offset <= self._arena.nbytes - payload.nbytes:
                yield payload
                return
        if not self._detour_lock.acquire(timeout=self._wait_s):
            raise TierUnavailable("Mooncake's detour for memory outside of the arena stays taken")
        try:
            yield self._detour[: payload.nbytes]
        finally:
            self._detour_lock.release()

    def _wire(self, memory: np.ndarray, register: Register) -> int:
        code = register(int(memory.ctypes.data), memory.nbytes)
        if code == 0:
            self._registered.append(int(memory.ctypes.data))
        return code
