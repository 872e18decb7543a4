"""What every predictor says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiercache.core.keys import ChunkKey

KEY_HELD_BYTES = 80
"""What a key takes that is remembered, with its place in a list."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Chunks that will be needed together, a prefix from its first chunk on. Times are of one monotonic clock."""

    predictor: str
    """Who says so: hints, the queue, sessions or workflows. Accounts are kept by this name."""
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
    """When all of it has passed."""
    priority: int = 0
    """Smaller goes first, whatever the value."""
    grace_s: float = 0.0
    """How long after `latest_s` the chunks are still worth keeping."""

    def chance(self, from_s: float, to_s: float) -> float:
        """That they are needed between two times, if they were not before: half of `probability` lies evenly on either side
        of `expected_s`."""
        passed = self._passed(from_s)
        return (self._passed(to_s) - passed) / max(1e-9, 1 - passed)

    def _passed(self, time_s: float) -> float:
        if time_s >= self.latest_s:
            return self.probability
        if time_s >= self.expected_s:
            part = (time_s - self.expected_s) / (self.latest_s - self.expected_s)
            return self.probability * (1 + part) / 2
        if time_s <= self.earliest_s:
            return 0.0
        return self.probability / 2 * (time_s - self.earliest_s) / (self.expected_s - self.earliest_s)
