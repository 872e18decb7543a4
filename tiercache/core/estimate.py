"""What a tier's reads take, as far as lately seen: is a load worth it, or is the engine quicker?"""

from __future__ import annotations

_WEIGHT = 0.2
"""Of the newest sample: an exponentially weighted moving average over about the last ten."""
_BELIEVED_S = 30.0


class TransferEstimate:
    """Seconds that one chunk takes from one tier, while `concurrency` of them are in flight.

    Believed for 30 s after the newest sample. Then the tier is tried again, so that one that was slow comes back by itself.
    """

    def __init__(self, concurrency: int) -> None:
        self.concurrency = max(1, concurrency)
        self.read_s: float | None = None
        """None before the first sample."""
        self._sampled_at_s = 0.0

    def add(self, took_s: float, now_s: float) -> None:
        """A chunk was read in `took_s`."""
        if self.read_s is None or now_s - self._sampled_at_s > _BELIEVED_S:
            self.read_s = took_s
        else:
            self.read_s += _WEIGHT * (took_s - self.read_s)
        self._sampled_at_s = now_s

    def expected_s(self, chunks: int, now_s: float) -> float | None:
        """Seconds that loading `chunks` should take; None when that is not known, or not any more."""
        if self.read_s is None or now_s - self._sampled_at_s > _BELIEVED_S:
            return None
        return self.read_s * -(-chunks // self.concurrency)

    def worthwhile(self, chunks: int, recompute_s: float | None, now_s: float) -> bool:
        """Whether loading `chunks` should take no longer than computing them, at `recompute_s` each (None: not known)."""
        if recompute_s is None:
            return True
        expected_s = self.expected_s(chunks, now_s)
        return expected_s is None or expected_s <= recompute_s * chunks
