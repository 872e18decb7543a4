"""A rate limit in bytes per second."""

from __future__ import annotations


class RateLimit:
    """Token bucket: earns `bytes_per_s` and keeps up to `burst_bytes`. Times are seconds of one monotonic clock."""

    def __init__(self, bytes_per_s: float, burst_bytes: float, left_bytes: float) -> None:
        """`left_bytes` is the initial content."""
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = burst_bytes
        self._left_bytes = left_bytes
        self._at_s: float | None = None

    def allows(self, amount_bytes: int, now_s: float) -> bool:
        """Return True if `amount_bytes` may be taken now. More than the burst may be taken from a full bucket, whose content
        is negative then."""
        if self._at_s is not None and now_s > self._at_s:
            earned_bytes = (now_s - self._at_s) * self._bytes_per_s
            self._left_bytes = min(self._burst_bytes, self._left_bytes + earned_bytes)
        self._at_s = now_s if self._at_s is None else max(now_s, self._at_s)
        return self._left_bytes >= min(amount_bytes, self._burst_bytes)

    def take(self, amount_bytes: int) -> None:
        self._left_bytes -= amount_bytes

    def give_back(self, amount_bytes: int) -> None:
        self._left_bytes = min(self._burst_bytes, self._left_bytes + amount_bytes)

    def wait_s(self, amount_bytes: int) -> float:
        """Return the seconds from the last `allows` until `amount_bytes` may be taken."""
        return (amount_bytes - self._left_bytes) / self._bytes_per_s
