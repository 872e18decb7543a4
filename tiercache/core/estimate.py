"""Estimate the read latency of a tier, and decide whether loading beats recomputing and when to give a load up."""

from __future__ import annotations

_WEIGHT = 0.2
"""Weight of the newest sample in the exponentially weighted moving average, which covers about the last ten."""
_VALID_S = 30.0
_SLOW_SHARE = 0.1
"""Share of the computing time for which a load that is slower than it should be is waited for."""
_UNUSUAL = 4.0
"""A load may take this many times the expected time."""
_LEAST_S = 0.005
"""Shorter waits may be caused by the event loop alone."""


class TransferEstimate:
    """Seconds that one tier takes for one chunk while `concurrency` of them are in flight.

    The estimate is valid for 30 s after the newest sample. Then the tier is tried again, so a tier that was slow recovers.
    """

    def __init__(self, concurrency: int) -> None:
        self.concurrency = max(1, concurrency)
        self.read_s: float | None = None
        """None before the first sample."""
        self._sampled_at_s = 0.0

    def add(self, took_s: float, now_s: float) -> None:
        """Record that a chunk was read in `took_s`."""
        if self.read_s is None or now_s - self._sampled_at_s > _VALID_S:
            self.read_s = took_s
        else:
            self.read_s += _WEIGHT * (took_s - self.read_s)
        self._sampled_at_s = now_s

    def expected_s(self, chunks: int, now_s: float) -> float | None:
        """Return the seconds that loading `chunks` should take; None if there is no valid estimate."""
        if self.read_s is None or now_s - self._sampled_at_s > _VALID_S:
            return None
        return self.read_s * -(-chunks // self.concurrency)

    def lasting_s(self, chunks: int, queued: int = 0) -> float | None:
        """Return the seconds that loading `chunks` should take behind `queued` others, by the newest sample of any age."""
        return None if self.read_s is None else self.read_s * -(-(chunks + queued) // self.concurrency)

    def worthwhile(self, chunks: int, recompute_s: float | None, now_s: float, oldest_s: float = 0.0) -> bool:
        """Return True if `chunks`, which the engine computes in `recompute_s` each (None: not known), should be loaded.

        False if loading should take longer than computing, or while a read has been in flight for `oldest_s`, longer than a
        read of this load would be waited for: the tier hangs or has become slow. After 30 s it is tried all the same.
        """
        if recompute_s is None:
            return True
        compute_s = recompute_s * chunks
        expected_s = self.expected_s(chunks, now_s)
        if expected_s is not None and expected_s > compute_s:
            return False
        return oldest_s > _VALID_S or oldest_s <= worth_waiting_s(self.lasting_s(chunks), compute_s)


def worth_waiting_s(expected_s: float | None, compute_s: float) -> float:
    """Return how long to wait for a load that should take `expected_s` (None: not known) before the rest is computed;
    computing all of it takes `compute_s`.

    The wait is at most `compute_s`. A load that takes four times the expected time and a tenth of `compute_s` is given up,
    since the tier has become slow; the request loses that tenth. A tier known to be slow is tried for as long.
    """
    if expected_s is None:
        return max(compute_s, _LEAST_S)
    if expected_s > compute_s:
        return max(_SLOW_SHARE * compute_s, _LEAST_S)
    return max(min(compute_s, max(_UNUSUAL * expected_s, _SLOW_SHARE * compute_s)), _LEAST_S)
