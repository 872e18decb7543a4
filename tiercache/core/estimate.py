"""What a tier's reads take, as far as lately seen: is a load worth it, or is the engine quicker? And if it takes longer than
it should, when to give it up."""

from __future__ import annotations

_WEIGHT = 0.2
"""Of the newest sample: an exponentially weighted moving average over about the last ten."""
_BELIEVED_S = 30.0
_TRIED = 0.1
"""Of what computing takes, for a load that is slower than it should be. What is given up then costs the request no more."""
_UNUSUAL = 4.0
"""How much longer than expected a load may take."""
_LEAST_S = 0.005
"""A wait that the loop alone may cause says nothing."""


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

    def lasting_s(self, chunks: int, ahead: int = 0) -> float | None:
        """As `expected_s`, behind `ahead` others that were there before, by the newest sample however old it is."""
        return None if self.read_s is None else self.read_s * -(-(chunks + ahead) // self.concurrency)

    def worthwhile(self, chunks: int, recompute_s: float | None, now_s: float, oldest_s: float = 0.0) -> bool:
        """Whether to begin to load `chunks`, which the engine computes in `recompute_s` each (None: not known).

        Not where loading should take longer. Nor while a read has been under way for `oldest_s` that would have been given
        up by now if it were a part of this load: the tier hangs, or has become slow. After 30 s it is tried all the same.
        """
        if recompute_s is None:
            return True
        compute_s = recompute_s * chunks
        expected_s = self.expected_s(chunks, now_s)
        if expected_s is not None and expected_s > compute_s:
            return False
        return oldest_s > _BELIEVED_S or oldest_s <= worth_waiting_s(self.lasting_s(chunks), compute_s)


def worth_waiting_s(expected_s: float | None, compute_s: float) -> float:
    """How long to wait for a load that should take `expected_s` (None: not known) before the rest is computed; all of it
    would take `compute_s`.

    As long as computing takes, or until it has taken four times what such loads take and a tenth of what computing takes:
    then the tier is not what it was, and that tenth is what the request loses. One that was slow before is tried as long.
    """
    if expected_s is None:
        return max(compute_s, _LEAST_S)
    if expected_s > compute_s:
        return max(_TRIED * compute_s, _LEAST_S)
    return max(min(compute_s, max(_UNUSUAL * expected_s, _TRIED * compute_s)), _LEAST_S)
