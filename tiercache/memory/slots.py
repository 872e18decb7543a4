"""Slots: the arena cut into equal parts, one chunk each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from tiercache.core.header import aligned
from tiercache.errors import CacheClosed, ConfigError
from tiercache.memory.arena import Arena

FEWEST_SLOTS = 4
"""One for a read and one for a write, and a floor for each: with fewer, reads and writes would wait for each other."""

Slot = int

Fill = tuple[Slot, int, Callable[[np.ndarray], None]]
"""A slot, the number of bytes that are written into it, and the call that writes them."""


class Pool(Protocol):
    """Memory cut into equal slots: the arena's (`SlotPool`), or a device's."""

    slot_bytes: int
    count: int

    @property
    def free(self) -> int: ...

    def take(self) -> Slot | None: ...

    def give_back(self, slot: Slot) -> None: ...

    def view(self, slot: Slot, length_bytes: int | None = None) -> Any:
        """Return the slot's payload room, or its first bytes."""

    def readable(self, slot: Slot, length_bytes: int) -> Any:
        """Return its first bytes, read-only where the kind of memory supports that."""

    def close(self) -> None: ...


class SlotPool:
    """Free slots of one size. The last one given back is handed out next, since it is warm in the CPU's caches."""

    def __init__(self, arena: Arena, chunk_bytes: int) -> None:
        self.slot_bytes = aligned(chunk_bytes)
        self.count = arena.size_bytes // self.slot_bytes
        if self.count < FEWEST_SLOTS:
            enough_gb = math.ceil(1000 * FEWEST_SLOTS * self.slot_bytes / 2**30) / 1000
            raise ConfigError(
                f"max_local_cpu_size: {arena.size_bytes / 2**30:.4g} GB hold {self.count} chunks of "
                f"{chunk_bytes / 2**20:.2f} MiB; at least {FEWEST_SLOTS} are needed: raise it to "
                f"{enough_gb:g} or more, or lower chunk_size"
            )
        self._use(arena.memory[: self.count * self.slot_bytes].reshape(self.count, self.slot_bytes))
        self._free: list[Slot] = list(range(self.count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> Slot | None:
        return self._free.pop() if self._free else None

    def give_back(self, slot: Slot) -> None:
        self._free.append(slot)

    def view(self, slot: Slot, length_bytes: int | None = None) -> np.ndarray:
        """Return uint8[length_bytes] of the slot, by default the whole slot, aligned to 4096 bytes. Raises CacheClosed after
        `close`."""
        try:
            return self._memory[slot] if length_bytes is None else self._memory[slot, :length_bytes]
        except IndexError:
            self._check_open()
            raise

    def readable(self, slot: Slot, length_bytes: int) -> np.ndarray:
        try:
            return self._read_only[slot, :length_bytes]
        except IndexError:
            self._check_open()
            raise

    def close(self) -> None:
        """Drop the reference to the arena's memory. No slot may be used after; views that exist stay valid."""
        self._free.clear()
        self._use(np.empty((0, self.slot_bytes), dtype=np.uint8))

    def _use(self, memory: np.ndarray) -> None:
        self._memory = memory
        self._read_only = memory.view()
        self._read_only.flags.writeable = False  # its slices inherit this, which is faster than a flag on each

    def _check_open(self) -> None:
        if not self._memory.size:
            raise CacheClosed("the cache is closed, and its memory given back") from None


def fill_slot(slot: np.ndarray, length_bytes: int, source: Callable[[np.ndarray], object]) -> None:
    """Let `source` write a payload, and zero the padding behind it, so that no tier stores another chunk's bytes."""
    if length_bytes == slot.nbytes:
        source(slot)
        return
    source(slot[:length_bytes])
    zero_padding(slot, length_bytes)


def zero_padding(slot: np.ndarray, length_bytes: int) -> None:
    """Zero the bytes between a payload and the next page."""
    if (end := aligned(length_bytes)) != length_bytes:
        slot[length_bytes:end] = 0
