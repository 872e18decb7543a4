"""A circuit breaker: a tier that fails or dawdles is left alone for a while, probed, and taken back.

After Nygard, "Release It!" (2007). Time is passed in, so it is tested without waiting.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True)
class BreakerSettings:
    failures_to_open: int = 3
    """Consecutive failures, where an operation slower than `slow_s` is one."""
    slow_s: float = 10.0
    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0


class Breaker:
    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self.settings = settings or BreakerSettings()
        self.state = BreakerState.CLOSED
        self.opened_count = 0
        self._failures = 0
        self._pause_s = self.settings.first_pause_s
        self._probe_at_s = 0.0

    def allows(self, now_s: float) -> bool:
        """Whether an operation may start. In the open state, once the pause is over, one caller is let through to probe."""
        if self.state is BreakerState.CLOSED:
            return True
        if now_s < self._probe_at_s:
            return False
        # A probe that never reports back (it hangs) must not leave the breaker half-open for ever.
        self.state = BreakerState.HALF_OPEN
        self._probe_at_s = now_s + max(self._pause_s, self.settings.slow_s)
        return True

    def would_allow(self, now_s: float) -> bool:
        """As `allows`, without taking the probe."""
        return self.state is BreakerState.CLOSED or now_s >= self._probe_at_s

    def succeeded(self, now_s: float, took_s: float = 0.0) -> None:
        if took_s > self.settings.slow_s:
            self.failed(now_s)
            return
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._pause_s = self.settings.first_pause_s

    def failed(self, now_s: float) -> None:
        if self.state is BreakerState.OPEN:
            return  # begun before it opened: all that hang fail together, which is one bad sign and not many
        self._failures += 1
        if self.state is BreakerState.CLOSED and self._failures < self.settings.failures_to_open:
            return
        if self.state is not BreakerState.CLOSED:
            self._pause_s = min(self._pause_s * 2, self.settings.longest_pause_s)
        self._open(now_s)

    def trip(self, now_s: float) -> None:
        """Open at once: the failure is known to last (the device is full, the directory is read-only)."""
        if self.state is not BreakerState.CLOSED:
            self._pause_s = min(self._pause_s * 2, self.settings.longest_pause_s)
        self._open(now_s)

    def _open(self, now_s: float) -> None:
        if self.state is BreakerState.CLOSED:
            self.opened_count += 1
        self.state = BreakerState.OPEN
        self._failures = 0
        self._probe_at_s = now_s + self._pause_s
