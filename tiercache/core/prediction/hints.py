"""What a program says itself: this prefix is coming in N seconds."""

from __future__ import annotations

from collections.abc import Sequence

from tiercache.core.keys import ChunkKey
from tiercache.core.prediction.base import Prediction

_TTL_S = 60.0
_SLACK_S = 1.0
"""Of what is announced, most comes within so short a time after it was due."""


class Hints:
    """Explicit hints, believed. A program that hints for nothing is charged for it in the accounts of its predictor."""

    name = "hints"

    def __init__(self, probability: float = 0.95) -> None:
        self.probability = probability
        self._anonymous = 0

    def announce(
        self,
        keys: Sequence[ChunkKey],
        now_s: float,
        *,
        due_in_s: float = 0.0,
        ttl_s: float = _TTL_S,
        priority: int = 0,
        subject: str | None = None,
    ) -> Prediction:
        """`keys` will be needed in `due_in_s`, and are not worth keeping `ttl_s` after that."""
        if subject is None:
            self._anonymous += 1
            subject = f"#{self._anonymous}"
        due_s = now_s + max(0.0, due_in_s)
        # Programs are wrong about when, about as much as the time is long.
        earliest_s = now_s + (due_s - now_s) / 2
        latest_s = due_s + min(ttl_s, _SLACK_S)
        grace_s = due_s + ttl_s - latest_s
        return Prediction(
            self.name, subject, keys, self.probability, earliest_s, due_s, latest_s, priority, grace_s
        )
