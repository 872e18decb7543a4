"""What the referee asks of a place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tiercache.core.keys import ChunkKey

RECOVERY_S = 45.0
"""So long after a fault a place works again. A breaker that has just failed to close asks again after a pause that was
doubled with each failure, and a probe that hangs keeps others away for the tier's slow limit (10 s), or its own deadline."""

ARENA_BYTES = 2 << 20


class Skipped(Exception):
    """The machine lacks what this place needs; the message says what."""


@dataclass(frozen=True)
class Occupied:
    """What the files of a place occupy on their device, in bytes."""

    counted_bytes: int
    """Chunks, finished or not, and the directories they lie in: all that the cap is about."""
    private_bytes: int = 0
    """The tier's own: count, locks, records."""


class Place(ABC):
    """Methods that may wait are called in a thread, each by a deadline of the referee."""

    cap_bytes: int | None = None
    keeps = False
    """True if a flushed chunk stays until it is forgotten: there is room for all, and nothing is evicted."""
    keeps_forgotten_away = True
    """True if forgotten chunks are surely gone."""
    remembers_s = 0.0
    """For so long a tier takes a chunk for stored that the place has lost since."""
    stale_s = 3.0
    """How old the answer to a lookup may be: what was stored since then may be missing in it."""
    is_calm = True
    """Whether nothing ever happens to the place itself, so that nobody has a reason to refuse anything."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory

    descriptors_kept = 0
    """Of files and connections that a tier keeps for the next use."""

    @abstractmethod
    def open(self) -> None:
        """Raises Skipped."""

    @abstractmethod
    def close(self) -> None:
        """Leave nothing but files. Also after half an `open`, and twice."""

    @abstractmethod
    def overrides(self, slot: int) -> dict[str, Any]:
        """The configuration of a worker's cache; `config` has what is alike in all places."""

    def strike(self, kind: str) -> bool:
        """Whether what was stored is lost by that."""
        raise NotImplementedError(kind)

    def heal(self) -> None:
        """End what `strike` began."""
        raise NotImplementedError

    def damage(self, keys: Sequence[ChunkKey], random: Random) -> ChunkKey | None:
        """Flip a byte of one of these chunks, at rest, and return which. None where that cannot be done."""
        return None

    def occupied(self) -> Occupied | None:
        """None where there is nothing to walk through."""
        return None

    def config(self, **more: Any) -> dict[str, Any]:
        return {
            "chunk_size": 16,
            "max_local_cpu_size": ARENA_BYTES / 2**30,
            "blocking_timeout_secs": 5,
            "lookup_timeout_ms": 2000,
            "queue_wait_s": 2.0,
            "device": "none",
        } | more
