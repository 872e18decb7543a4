"""Decide which chunks a tier writes, and limit bytes in time.

Flash wears by writing. Most chunks of a prompt are never requested again, and a chunk that was requested twice probably is
a third time; docs/policies.md has the figures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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


DAY_S = 86400.0
REMEMBERED_KEYS = 1 << 20
"""Keys whose accesses a tier remembers. A million of them take 130 MB."""


class Admission(ABC):
    """Decides whether a chunk is worth writing. Every call takes O(1); the number of remembered keys is bounded."""

    @abstractmethod
    def used(self, key: ChunkKey) -> None:
        """Record that a request needed the chunk, wherever it came from (computed, read or hot). Called once a request."""

    def continued(self, key: ChunkKey) -> None:  # noqa: B027 - not abstract: most policies ignore it
        """Record that a request which continues an earlier one needs the chunk."""

    @abstractmethod
    def admits(self, key: ChunkKey) -> bool:
        """Return True if the chunk may be written now. Changes nothing."""


class AdmitAll(Admission):
    """Admits every chunk (write-through)."""

    def used(self, key: ChunkKey) -> None:
        pass

    def admits(self, key: ChunkKey) -> bool:
        return True


class SecondTouch(Admission):
    """Admits chunks that two requests needed, among the last `limit` keys. A key costs about 130 bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._uses: OrderedDict[ChunkKey, bool] = OrderedDict()

    def used(self, key: ChunkKey) -> None:
        uses = self._uses
        if key in uses:
            uses[key] = True
            uses.move_to_end(key)
        else:
            uses[key] = False
            if len(uses) > self.limit:
                uses.popitem(last=False)

    def admits(self, key: ChunkKey) -> bool:
        return self._uses.get(key, False)


class LiveSession(Admission):
    """Admits chunks of sessions that have come back at least once, those of their newest turns included.

    `continued` reports the chunks of such sessions.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._live: OrderedDict[ChunkKey, None] = OrderedDict()

    def used(self, key: ChunkKey) -> None:
        if key in self._live:
            self._live.move_to_end(key)

    def continued(self, key: ChunkKey) -> None:
        self._live[key] = None
        self._live.move_to_end(key)
        if len(self._live) > self.limit:
            self._live.popitem(last=False)

    def admits(self, key: ChunkKey) -> bool:
        return key in self._live


ADMISSIONS = ("all", "second_touch", "live_session")


def make_admission(name: str, limit: int) -> Admission:
    """Return the admission called `name` in the configuration (`flash_admission`), which remembers up to `limit` keys."""
    if name == "all":
        return AdmitAll()
    return SecondTouch(limit) if name == "second_touch" else LiveSession(limit)


class Governor:
    """Limits the bytes that are written a day. A limit of 0 lets everything through.

    Unspent bytes are kept for up to `burst_s`, so that a busy hour may use what a quiet one left. No span of a day sees more
    than `bytes_per_day`, the burst included, so in the long run 4 % less is written.
    """

    def __init__(self, bytes_per_day: float, burst_s: float = 3600.0) -> None:
        self.bytes_per_day = bytes_per_day
        bytes_per_s = bytes_per_day / (DAY_S + burst_s)
        self._rate = RateLimit(bytes_per_s, bytes_per_s * burst_s, bytes_per_s * burst_s)

    def allows(self, amount_bytes: int, now_s: float) -> bool:
        """Take `amount_bytes` at `now_s` (monotonic) if there are so many; return False if there are not."""
        if self.bytes_per_day <= 0:
            return True
        if not self._rate.allows(amount_bytes, now_s):
            return False
        self._rate.take(amount_bytes)
        return True

    def give_back(self, amount_bytes: int) -> None:
        """Return bytes that were taken and not written."""
        self._rate.give_back(amount_bytes)
