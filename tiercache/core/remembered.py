"""Bounded, expiring set of keys known to exist in a remote store.

A server evicts and expires without telling, and other clients add and remove. So a key that was seen longer ago than
`keep_s` has to be looked up again.
"""

from __future__ import annotations

from tiercache.core.keys import ChunkKey
from tiercache.core.lru import LruMap

_DROPPED_AT_ONCE = 2
"""Expired keys that are dropped for each one that is added: their number falls, and no call takes long."""


class RememberedKeys:
    """The keys last seen, at most `limit`, each with the bytes that it takes in the store (0: not known). A key costs 200
    bytes. Expired keys are dropped as others are added."""

    def __init__(self, limit: int, keep_s: float) -> None:
        self.limit = limit
        self.keep_s = keep_s
        self.bytes_known = 0
        self._seen = LruMap()
        """The time of an access is in microseconds."""

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, key: ChunkKey, now_s: float, stored_bytes: int = 0) -> None:
        """Record that `key` was seen at `now_s` (monotonic)."""
        old_bytes = self._seen.get(key) or 0
        stored_bytes = stored_bytes or old_bytes
        self._seen.put(key, stored_bytes, time=int(now_s * 1e6))
        self.bytes_known += stored_bytes - old_bytes
        if len(self._seen) > self.limit:
            self.discard(self._seen.coldest())
        for _ in range(_DROPPED_AT_ONCE):
            oldest = self._seen.coldest()
            if oldest is None or self.has(oldest, now_s):
                break
            self.discard(oldest)

    def has(self, key: ChunkKey, now_s: float) -> bool:
        """Return True if the key was seen at most `keep_s` ago."""
        seen_us = self._seen.time(key)
        return seen_us is not None and now_s * 1e6 - seen_us <= self.keep_s * 1e6

    def discard(self, key: ChunkKey | None) -> bool:
        """Drop a key; return False if it was not remembered."""
        stored_bytes = None if key is None else self._seen.pop(key)
        self.bytes_known -= stored_bytes or 0
        return stored_bytes is not None

    def clear(self) -> None:
        self._seen = LruMap()
        self.bytes_known = 0
