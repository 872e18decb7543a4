"""How long people and tools take: a distribution of gaps, learnt as they pass."""

from __future__ import annotations

from math import log2

_PER_OCTAVE = 4
_LEAST_S = 1 / 16
_BUCKETS = 96
"""Up to 2**20 s, twelve days."""


class Gaps:
    """A histogram of gaps in seconds, in quarter octaves, with those that never ended ("lost"). Old ones fade: when `limit`
    were counted, each counts half from then on.

    Adding is O(1), asking O(buckets).
    """

    def __init__(self, limit: int = 4096) -> None:
        self.limit = limit
        self.count = 0.0
        self._ended = [0.0] * _BUCKETS
        self._lost = 0.0

    def add(self, gap_s: float) -> None:
        """A gap that ended after `gap_s`."""
        self._ended[_bucket(gap_s)] += 1.0
        self.count += 1.0
        self._fade()

    def add_lost(self) -> None:
        """One that will never end: the session is over."""
        self._lost += 1.0
        self.count += 1.0
        self._fade()

    def forget_lost(self) -> None:
        """One that was taken for lost came back."""
        taken = min(1.0, self._lost)
        self._lost -= taken
        self.count -= taken

    def probability(self, idle_s: float, from_s: float, to_s: float) -> float:
        """That a gap which has lasted `idle_s` ends between `from_s` and `to_s` (measured from its beginning)."""
        alive = self._after(idle_s) + self._lost
        if alive <= 0:
            return 0.0
        return max(0.0, self._after(max(idle_s, from_s)) - self._after(max(idle_s, to_s))) / alive

    def ends_after(self, idle_s: float) -> bool:
        """Whether any gap longer than `idle_s` is known."""
        return self._after(idle_s) > 0

    def quantile(self, part: float, idle_s: float = 0.0) -> float:
        """When `part` (0..1) of the gaps that outlast `idle_s` and end at all have ended; `idle_s` when none is known."""
        after = self._after(idle_s)
        if after <= 0:
            return idle_s
        goal = after * (1 - part)
        seen = 0.0
        for bucket in range(_BUCKETS - 1, -1, -1):
            count = self._ended[bucket]
            if count and seen + count >= goal:
                low_s, high_s = _bounds(bucket)
                return max(idle_s, low_s + (high_s - low_s) * (1 - (goal - seen) / count))
            seen += count
        return idle_s

    def _after(self, age_s: float) -> float:
        """How many end later than `age_s`; within a bucket they lie evenly."""
        first = _bucket(age_s)
        low_s, high_s = _bounds(first)
        share = min(1.0, max(0.0, (high_s - age_s) / (high_s - low_s)))
        return self._ended[first] * share + sum(self._ended[first + 1 :])

    def _fade(self) -> None:
        if self.count > self.limit:
            self._ended = [count / 2 for count in self._ended]
            self._lost /= 2
            self.count /= 2


def _bucket(gap_s: float) -> int:
    if gap_s <= _LEAST_S:
        return 0
    return min(_BUCKETS - 1, 1 + int(_PER_OCTAVE * log2(gap_s / _LEAST_S)))


def _bounds(bucket: int) -> tuple[float, float]:
    if not bucket:
        return 0.0, _LEAST_S
    low_s = _LEAST_S * 2 ** ((bucket - 1) / _PER_OCTAVE)
    return low_s, low_s * 2 ** (1 / _PER_OCTAVE)
