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
"""A read, a write, and a floor for each: with fewer the one would wait for the other for ever."""

Slot = int

Fill = tuple[Slot, int, Callable[[np.ndarray], None]]
"""A slot, how many bytes come into it, and what writes them."""


class Pool(Protocol):
    """Memory cut into equal slots: the arena's (`SlotPool`), or a device's."""

    slot_bytes: int
    count: int

    @property
    def free(self) -> int: ...

    def take(self) -> Slot | None: ...

    def give_back(self, slot: Slot) -> None: ...

    def view(self, slot: Slot, length_bytes: int | None = None) -> Any:
        """The slot's payload room, or its first bytes."""

    def readable(self, slot: Slot, length_bytes: int) -> Any:
        """Its first bytes, read-only where the kind of memory knows that."""

    def close(self) -> None: ...


class SlotPool:
    """Free slots of one size: the last one given back is the next one handed out, since it is warm in the caches."""

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
        """uint8[length_bytes] of the slot, the whole slot by default. Aligned to 4096 bytes. CacheClosed after `close`."""
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
        """Let go of the arena's memory. No slot may be used after."""
        self._free.clear()
        self._use(np.empty((0, self.slot_bytes), dtype=np.uint8))

    def _use(self, memory: np.ndarray) -> None:
        self._memory = memory
        self._read_only = memory.view()
        self._read_only.flags.writeable = False  # and so are its parts: to say that of each takes as long as to make it

    def _check_open(self) -> None:
        if not self._memory.size:
            raise CacheClosed("the cache is closed, and its memory given back") from None


def fill_slot(slot: np.ndarray, length_bytes: int, source: Callable[[np.ndarray], object]) -> None:
    """Have `source` write a payload, and zero the padding behind it, so that no tier ever stores another chunk's bytes."""
    if length_bytes == slot.nbytes:
        source(slot)
        return
    source(slot[:length_bytes])
    zero_padding(slot, length_bytes)


def zero_padding(slot: np.ndarray, length_bytes: int) -> None:
    """Behind a payload that is in the slot already, up to the next page."""
    if (end := aligned(length_bytes)) != length_bytes:
        slot[length_bytes:end] = 0
