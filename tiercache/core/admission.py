"""Decide which chunks a tier writes, and limit bytes in time.

Flash wears by writing. Most chunks of a prompt are never requested again, but a chunk that was requested twice is likely to
be requested again; docs/policies.md has the figures.
"""

from __future__ import annotations

from collections import OrderedDict

from tiercache.core.keys import ChunkKey


class RateLimit:
    """Token bucket: earns `bytes_per_s` and keeps up to `burst_bytes`. Times are seconds of one monotonic clock."""

    def __init__(self, bytes_per_s: float, burst_bytes: float, left_bytes: float) -> None:
        """`left_bytes` is the initial content."""
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = burst_bytes
        self._left_bytes = left_bytes
        self._at_s: float | None = None

    def allows(self, amount_bytes: int, now_s: float) -> bool:
        """Return True if `amount_bytes` may be taken now.

        A full bucket allows even an amount above the burst, which makes its content negative.
        """
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
        """Return the seconds from the last `allows` until `amount_bytes`, at most the burst, may be taken."""
        return (amount_bytes - self._left_bytes) / self._bytes_per_s


DAY_S = 86400.0
REMEMBERED_KEYS = 1 << 20
"""Keys whose accesses a tier remembers. A million of them take 130 MB."""


ADMISSIONS = ("all", "second_touch", "live_session")
"""All values of `flash_admission`."""


class Admission:
    """Decides whether a chunk is worth writing. Every call takes O(1); a remembered key costs about 130 bytes.

    `all` admits every chunk (write-through), `second_touch` chunks that two requests needed, and `live_session` chunks of
    sessions with at least two turns, including their newest turns.
    """

    def __init__(self, policy: str, limit: int = REMEMBERED_KEYS) -> None:
        """`policy` is one of `ADMISSIONS`; the `limit` most recently accessed keys are remembered."""
        self.policy = policy
        self.limit = limit
        self._admitted: OrderedDict[ChunkKey, bool] = OrderedDict()
        """Remembered keys, least recently accessed first, with True if their chunks are admitted."""

    def used(self, key: ChunkKey) -> None:
        """Record that a request needed the chunk, wherever it came from (computed, read or hot); once per request."""
        if key in self._admitted:
            self._remember(key, True)
        elif self.policy == "second_touch":
            self._remember(key, False)

    def continued(self, key: ChunkKey) -> None:
        """Record that a request which continues an earlier one needs the chunk."""
        if self.policy == "live_session":
            self._remember(key, True)

    def admits(self, key: ChunkKey) -> bool:
        """Return True if the chunk may be written now. Changes nothing."""
        return self.policy == "all" or self._admitted.get(key, False)

    def _remember(self, key: ChunkKey, admitted: bool) -> None:
        self._admitted[key] = admitted
        self._admitted.move_to_end(key)
        if len(self._admitted) > self.limit:
            self._admitted.popitem(last=False)


class Governor:
    """Limits the bytes written per day. A limit of 0 admits everything.

    Unspent bytes are kept for up to `burst_s`, so that a busy hour can use the budget of a quiet hour. No period of a
    day has more than `bytes_per_day`, the burst included, so the long-term rate is 4 % lower.
    """

    def __init__(self, bytes_per_day: float, burst_s: float = 3600.0) -> None:
        self.bytes_per_day = bytes_per_day
        bytes_per_s = bytes_per_day / (DAY_S + burst_s)
        self._rate = RateLimit(bytes_per_s, bytes_per_s * burst_s, bytes_per_s * burst_s)

    def allows(self, amount_bytes: int, now_s: float) -> bool:
        """Take `amount_bytes` at `now_s` (monotonic). Return False if the budget is too small."""
        if self.bytes_per_day <= 0:
            return True
        if not self._rate.allows(amount_bytes, now_s):
            return False
        self._rate.take(amount_bytes)
        return True

    def give_back(self, amount_bytes: int) -> None:
        """Return bytes that were taken and not written."""
        self._rate.give_back(amount_bytes)
