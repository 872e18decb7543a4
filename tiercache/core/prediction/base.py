"""What every predictor says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiercache.core.keys import ChunkKey


@dataclass(frozen=True, slots=True)
class Prediction:
    """Chunks that will be needed together, a prefix from its first chunk on. Times are of one monotonic clock."""

    predictor: str
    """Who says so: hints, sessions or workflows. Accounts are kept by this name."""
    subject: str
    """What it is about, such as a session. A newer prediction of the same predictor and subject replaces it."""
    keys: Sequence[ChunkKey]
    probability: float
    """That they are needed between `earliest_s` and `latest_s`."""
    earliest_s: float
    """Not worth having before."""
    expected_s: float
    """When half of the probability has passed: the deadline to aim at."""
    latest_s: float
    """Not worth keeping after."""
    priority: int = 0
    """Smaller goes first, whatever the value."""
