"""How chunks are read from tiers, and what came of it: settings and counters of the reading half."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiercache.core.distribution import SECONDS, Distribution


@dataclass
class ReaderSettings:
    deadline_s: float = 10.0
    """For a caller that names none."""
    probe_deadline_s: float = 3.0
    """How long a look-up waits for a shared tier to say what it has."""
    recompute_s: float | None = None
    """What the engine takes to compute one chunk: what takes longer to load is left to it. None: not known. It changes, as
    the engine is measured."""


@dataclass
class ReaderStatistics:
    """In chunks. `joined` asked for a key that was in flight already; `late` gave up at their deadline; `overtaken` are
    prefetches that still waited when somebody came for their chunk; `kept` came too late for who asked first, and is hot."""

    hits: dict[str, int] = field(default_factory=dict)
    misses: int = 0
    joined: int = 0
    overtaken: int = 0
    late: int = 0
    kept: int = 0
    corrupt: int = 0
    failed: int = 0
    sink_failures: int = 0


@dataclass
class TierReadStatistics:
    """Of one tier. `failed` failed, failed verification, or were given up: of the `failed` and `corrupt` of all tiers."""

    seconds: Distribution = field(default_factory=lambda: Distribution.of(SECONDS))
    """What reads took that found their chunk, or until they were given up."""
    failed: int = 0
    reading: int = 0
    """Reads that the tier has begun and not ended."""
