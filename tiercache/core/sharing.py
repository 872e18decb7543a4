"""What an instance knows of a directory that others change too: its chunks by subdirectory, and which to list again."""

from __future__ import annotations

from collections.abc import Sequence

from tiercache.core.index import CappedIndex
from tiercache.core.keys import ChunkKey

DIRECTORIES = 256
"""One for each first byte of a key."""


class SharedIndex(CappedIndex):
    """A CappedIndex that can be compared with a listing of one of the directories."""

    def group(self, directory: int) -> frozenset[ChunkKey]:
        """Return the chunks known in a directory, as they are now."""
        return frozenset(self.keys.part(directory))

    def unknown(self, listed: set[ChunkKey]) -> list[ChunkKey]:
        """Return the `listed` chunks that are not known, in an order that is the same in every process."""
        return sorted(key for key in listed if key not in self)

    def drop(self, before: frozenset[ChunkKey], listed: set[ChunkKey]) -> list[ChunkKey]:
        """Forget the chunks that were known `before` a listing began and are not in it; return them.

        What was added while the listing ran may have come too late for it, and stays.
        """
        gone = sorted(key for key in before - listed if key in self)
        for key in gone:
            self.remove(key)
        return gone


class Freshness:
    """Which directories changed since they were listed, from their modification times.

    A file system's clock ticks in steps: a directory can change again without its time changing. So a new time is
    believed only once it has stood for `settle_s` when the listing begins; until then the directory is listed again.
    """

    def __init__(self, settle_s: float) -> None:
        self.settle_s = settle_s
        self._times_ns = [-1] * DIRECTORIES
        self._seen_s = [0.0] * DIRECTORIES
        self._settled = [False] * DIRECTORIES

    def stale(self, times_ns: Sequence[int], now_s: float) -> list[int]:
        """The directories to list now. `times_ns` has one modification time each, 0 where there is no such directory."""
        found = []
        for directory, time_ns in enumerate(times_ns):
            if time_ns != self._times_ns[directory]:
                self._times_ns[directory] = time_ns
                self._seen_s[directory] = now_s
                self._settled[directory] = False
            if not self._settled[directory]:
                found.append(directory)
        return found

    def listed(self, directory: int, began_s: float) -> None:
        """A listing of `directory` that began at `began_s`, after its time was taken, is in the index."""
        self._settled[directory] = began_s >= self._seen_s[directory] + self.settle_s


def eviction_goal_bytes(counted_bytes: int, cap_bytes: int, low: float, wanted: Sequence[int]) -> int:
    """How much has to go so that `counted_bytes` comes down to `low` (a part of the cap), and to each that is `wanted`."""
    return max(0, counted_bytes - min([int(cap_bytes * low), *wanted]))
