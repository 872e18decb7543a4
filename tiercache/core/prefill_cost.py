"""Estimate the time that an engine takes to compute one more prompt token, from the duration of its steps."""

from __future__ import annotations

from collections.abc import Collection

_STEPS = 8
"""Steps of one sample. Several, since an engine that schedules ahead reports the end of a step one or two steps late."""
_KEPT = 0.95
"""Weight of older samples relative to the next: the last twenty count for two thirds."""
_LEAST_TOKENS = 64
"""Variation in the tokens of a step from which on the cost of tokens is told from the cost of steps."""
_LEAST_PART = 0.25
"""Lower bound of the result, as a share of the average time of a token with the steps included."""
_NEWS = 0.1
"""Relative change from which on `news` returns the estimate again."""


class PrefillCost:
    """Fits `base + tokens * token_s` to the duration of steps, by least squares over samples of several steps; older samples
    count less. Only times in which the engine was busy throughout count: from a step to the next that goes on with one of
    its requests."""

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
        # The variation of tokens that is not due to steps: the determinant over the steps.
        spread = self._tokens_tokens - self._steps_tokens**2 / self._steps_steps
        if spread < (_STEPS * _LEAST_TOKENS) ** 2:
            return
        slope = (self._tokens_seconds - self._steps_tokens * self._steps_seconds / self._steps_steps) / spread
        # Noise must not make the engine so quick that nothing is worth loading any more.
        self.token_s = max(slope, _LEAST_PART * self._tokens_seconds / self._tokens_tokens)
