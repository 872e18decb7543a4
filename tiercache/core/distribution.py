"""Histograms that can be added up over processes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bucket bounds for the duration of a tier's operation."""


@dataclass
class Distribution:
    """A histogram. Bucket `i` counts amounts above `bounds[i - 1]` and up to `bounds[i]`; the last one all larger ones."""

    bounds: tuple[float, ...]
    counts: list[int]
    sums: list[float]
    """Sum of the amounts in each bucket."""

    @classmethod
    def of(cls, bounds: Sequence[float]) -> Distribution:
        return cls(tuple(bounds), [0] * (len(bounds) + 1), [0.0] * (len(bounds) + 1))

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def sum(self) -> float:
        return sum(self.sums)

    def add(self, amount: float) -> None:
        bucket = bisect_left(self.bounds, amount)
        self.counts[bucket] += 1
        self.sums[bucket] += amount

    def include(self, other: Distribution) -> None:
        """Add the counts of `other`, which has the same bounds."""
        for bucket in range(len(self.counts)):
            self.counts[bucket] += other.counts[bucket]
            self.sums[bucket] += other.sums[bucket]

    def since(self, before: Distribution) -> Distribution:
        """Return the amounts that were added after the copy `before` was made."""
        counts = [now - then for now, then in zip(self.counts, before.counts, strict=True)]
        sums = [now - then if new else 0.0 for now, then, new in zip(self.sums, before.sums, counts, strict=True)]
        return Distribution(self.bounds, counts, sums)

    def copy(self) -> Distribution:
        return Distribution(self.bounds, list(self.counts), list(self.sums))
