"""A circuit breaker: a tier that fails or is slow is skipped for a while, probed, and used again.

Source: Nygard, "Release It!" (2007). Times are seconds of one monotonic clock and are passed in.
"""

from __future__ import annotations

from enum import Enum

_FAILURES_TO_OPEN = 3
"""Consecutive failures."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"
    DETACHED = "detached"
    """Shown instead of a breaker's state while the tier is detached."""


class Breaker:
    """Counts the outcomes of operations. A failed lookup counts as one; the answer to a lookup proves nothing."""

    def __init__(self, slow_s: float) -> None:
        """An operation slower than `slow_s` counts as a failure."""
        self._slow_s = slow_s
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._opened_s = float("-inf")
        self._probe_at_s = 0.0
        self._probed_s = 0.0
        """The time at which the latest probe was let through."""

    def allows(self, now_s: float) -> bool:
        """Return True if an operation may start. When the pause of an open breaker is over, one caller may probe."""
        if self.state is BreakerState.CLOSED:
            return True
        if now_s < self._probe_at_s:
            return False
        # A probe that never reports back (it hangs) must not leave the breaker half-open for ever.
        self.state = BreakerState.HALF_OPEN
        self._probed_s = now_s
        self._probe_at_s = now_s + max(self._pause_s, self._slow_s)
        return True

    def would_allow(self, now_s: float) -> bool:
        """Return the result of `allows` without taking the probe."""
        return self.state is BreakerState.CLOSED or now_s >= self._probe_at_s

    def probing(self, now_s: float) -> bool:
        """Return True while a probe is in flight: a caller that can wait should wait for its outcome."""
        return self.state is BreakerState.HALF_OPEN and now_s < self._probe_at_s

    def succeeded(self, now_s: float, took_s: float = 0.0) -> None:
        if took_s > self._slow_s:
            self.failed(now_s)
            return
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S

    def failed(self, now_s: float, *, began_s: float | None = None) -> None:
        """Record a failure. `began_s` is the start of the operation, if the caller knows it."""
        if self.state is BreakerState.OPEN or (began_s is not None and began_s < self._opened_s):
            return  # operations that hang fail together: those that began before the breaker opened count once
        self._failures += 1
        if self.state is BreakerState.CLOSED and self._failures < _FAILURES_TO_OPEN:
            return
        self._open(now_s)

    def trip(self, now_s: float, *, began_s: float | None = None) -> None:
        """Open at once: the failure is known to last (the device is full, the directory is read-only)."""
        if began_s is not None and began_s <= self._opened_s:
            return  # as in `failed`; no operation begins after the opening in the same moment
        self._open(now_s)

    def abandoned(self, now_s: float, began_s: float) -> None:
        """Record that the operation that began at `began_s` proved nothing: it was cancelled, or a lookup was answered.

        If it was the probe, the next operation may probe at once.
        """
        if self.state is BreakerState.HALF_OPEN and began_s >= self._probed_s:
            self._probe_at_s = min(self._probe_at_s, now_s)

    def _open(self, now_s: float) -> None:
        """Open, and double the pause if it was over."""
        if self.state is not BreakerState.CLOSED and now_s >= self._opened_s + self._pause_s:
            self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)
        self.state = BreakerState.OPEN
        self._failures = 0
        self._opened_s = now_s
        self._probe_at_s = now_s + self._pause_s
