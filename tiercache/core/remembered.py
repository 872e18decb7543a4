"""Keys that somebody else keeps, as far as this process knows: bounded, and forgotten after a while.

A server evicts and expires without telling, and other clients add and remove. So knowledge of it is a hint with an age:
what was seen longer ago than `keep_s` has to be asked again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from tiercache.core.keys import ChunkKey

_DROPPED_AT_ONCE = 2
"""Keys that are too old, for each one that is added: their number falls, and no call takes long."""


class RememberedKeys:
    """The keys last seen, at most `limit`, each with the bytes that it takes there (0: not known). A key costs 200 bytes.

    Keys that are too old leave as others are added.
    """

    def __init__(self, limit: int, keep_s: float) -> None:
        self.limit = limit
        self.keep_s = keep_s
        self.bytes_known = 0
        self._seen: OrderedDict[ChunkKey, tuple[float, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._seen)

    def add(self, key: ChunkKey, now_s: float, stored_bytes: int = 0) -> None:
        """Seen at `now_s` (monotonic)."""
        old = self._seen.pop(key, None)
        if old is not None:
            self.bytes_known -= old[1]
            stored_bytes = stored_bytes or old[1]
        self._seen[key] = now_s, stored_bytes
        self.bytes_known += stored_bytes
        if len(self._seen) > self.limit:
            self._drop_oldest()
        for _ in range(_DROPPED_AT_ONCE):
            if now_s - next(iter(self._seen.values()))[0] <= self.keep_s:
                break
            self._drop_oldest()

    def has(self, key: ChunkKey, now_s: float) -> bool:
        """Whether the key was seen lately."""
        seen = self._seen.get(key)
        return seen is not None and now_s - seen[0] <= self.keep_s

    def discard(self, key: ChunkKey) -> bool:
        """Whether it was remembered at all."""
        seen = self._seen.pop(key, None)
        if seen is None:
            return False
        self.bytes_known -= seen[1]
        return True

    def _drop_oldest(self) -> None:
        _, (_, stored_bytes) = self._seen.popitem(last=False)
        self.bytes_known -= stored_bytes

    def clear(self) -> None:
        self._seen.clear()
        self.bytes_known = 0
