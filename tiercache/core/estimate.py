"""Histograms of durations, and estimates that decide whether loading a chunk beats recomputing it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bucket bounds for the duration of a tier's operation."""


@dataclass
class Distribution:
    """A histogram.

    Bucket `i` counts amounts above `bounds[i - 1]` and up to `bounds[i]`; the last bucket has no upper bound.
    """

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

    def since(self, before: Distribution) -> Distribution:
        """Return the amounts that were added after the copy `before` was made."""
        counts = [now - then for now, then in zip(self.counts, before.counts, strict=True)]
        sums = [now - then if new else 0.0 for now, then, new in zip(self.sums, before.sums, counts, strict=True)]
        return Distribution(self.bounds, counts, sums)

    def copy(self) -> Distribution:
        return Distribution(self.bounds, list(self.counts), list(self.sums))


_WEIGHT = 0.2
"""Weight of the newest sample in the exponentially weighted moving average, which covers about the last ten."""
_VALID_S = 30.0
_SLOW_SHARE = 0.1
"""Share of the computing time to wait for a load that is slower than expected."""
_UNUSUAL = 4.0
"""Limit of a load's time in multiples of the expected time."""
_LEAST_S = 0.005
"""Shorter waits may be caused by the event loop alone."""


class TransferEstimate:
    """Seconds that a tier takes for one chunk while `concurrency` chunks are in flight.

    The estimate is valid for 30 s after the newest sample. Then the tier is tried again, so that a tier that was slow
    recovers.
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
        """Return the seconds that loading `chunks` should take after `queued` others, by the newest sample of any age."""
        return None if self.read_s is None else self.read_s * -(-(chunks + queued) // self.concurrency)

    def worthwhile(self, chunks: int, recompute_s: float | None, now_s: float, oldest_s: float = 0.0) -> bool:
        """Return True if `chunks`, which the engine computes in `recompute_s` each (None: not known), should be loaded.

        Returns False if loading should take longer than computing. `oldest_s` is the time that the oldest read has been
        in flight. Also returns False if this load would not be waited for so long: the tier hangs or has become slow.
        Above 30 s the tier is tried again.
        """
        if recompute_s is None:
            return True
        compute_s = recompute_s * chunks
        expected_s = self.expected_s(chunks, now_s)
        if expected_s is not None and expected_s > compute_s:
            return False
        return oldest_s > _VALID_S or oldest_s <= worth_waiting_s(self.lasting_s(chunks), compute_s)


def worth_waiting_s(expected_s: float | None, compute_s: float) -> float:
    """Return how long to wait for a load before the rest is computed.

    The load should take `expected_s` (None: not known); computing all of it takes `compute_s`, the upper limit of the
    wait. A load that takes four times the expected time and a tenth of `compute_s` is given up, since the tier has
    become slow; the request loses that tenth. A tier known to be slow is tried for as long.
    """
    if expected_s is None:
        return max(compute_s, _LEAST_S)
    if expected_s > compute_s:
        return max(_SLOW_SHARE * compute_s, _LEAST_S)
    return max(min(compute_s, max(_UNUSUAL * expected_s, _SLOW_SHARE * compute_s)), _LEAST_S)


_STEPS = 8
"""Number of steps in a sample: an engine that schedules ahead reports the end of a step one or two steps late."""
_KEPT = 0.95
"""Weight of older samples relative to the next: the last twenty count for two thirds."""
_LEAST_TOKENS = 64
"""Least variation in the tokens of a step that separates the cost of tokens from the cost of steps."""
_LEAST_PART = 0.25
"""Lower bound of the result, as a share of the average time of a token with the steps included."""
_NEWS = 0.1
"""Relative change that makes `news` return the estimate again."""


class PrefillCost:
    """Fits `base + tokens * token_s` to the duration of steps.

    Uses least squares over samples of several steps; older samples count less. Only times in which the engine was busy
    throughout count: from a step to the next step that continues one of its requests.
    """

    def __init__(self) -> None:
        self.token_s: float | None = None
        """Seconds that one more token costs a step; None before that is known."""
        self._steps_steps = self._steps_tokens = self._tokens_tokens = 0.0
        self._steps_seconds = self._tokens_seconds = 0.0
        self._requests: Collection[str] = ()
        self._began_s = 0.0
        self._tokens = 0
        self._sample: list[float] = [0, 0, 0.0]
        self._told_s: float | None = None

    def news(self) -> float | None:
        """Return `token_s` when it is first known and whenever it has changed, else None."""
        now_s, told_s = self.token_s, self._told_s
        if now_s is None or (told_s is not None and abs(now_s - told_s) <= _NEWS * told_s):
            return None
        self._told_s = now_s
        return now_s

    def began(self, requests: Collection[str], tokens: int, now_s: float) -> None:
        """Record that a step began at `now_s` that computes `tokens` tokens of these requests."""
        if any(request in self._requests for request in requests):
            sample = self._sample
            sample[0] += 1
            sample[1] += self._tokens
            sample[2] += now_s - self._began_s
            if sample[0] == _STEPS:
                self._add(*sample)
                self._sample = [0, 0, 0.0]
        else:
            self._sample = [0, 0, 0.0]
        self._requests, self._tokens, self._began_s = requests, tokens, now_s

    def _add(self, steps: float, tokens: float, seconds: float) -> None:
        self._steps_steps = _KEPT * self._steps_steps + steps * steps
        self._steps_tokens = _KEPT * self._steps_tokens + steps * tokens
        self._tokens_tokens = _KEPT * self._tokens_tokens + tokens * tokens
        self._steps_seconds = _KEPT * self._steps_seconds + steps * seconds
        self._tokens_seconds = _KEPT * self._tokens_seconds + tokens * seconds
        # The variation of tokens that is not due to steps: the determinant divided by `_steps_steps`.
        spread = self._tokens_tokens - self._steps_tokens**2 / self._steps_steps
        if spread < (_STEPS * _LEAST_TOKENS) ** 2:
            return
        slope = (self._tokens_seconds - self._steps_tokens * self._steps_seconds / self._steps_steps) / spread
        # Noise must not make the engine appear so fast that no load is worthwhile.
        self.token_s = max(slope, _LEAST_PART * self._tokens_seconds / self._tokens_tokens)
