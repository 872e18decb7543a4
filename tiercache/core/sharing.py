"""Follow a directory that other processes change too: the chunks of each subdirectory, and which ones to list again."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from tiercache.core.index import CappedIndex
from tiercache.core.keys import ChunkKey

DIRECTORIES = 256
"""One for each first byte of a key."""


class SharedIndex(CappedIndex):
    """A CappedIndex that can be compared with a listing of one of the directories."""

    def group(self, directory: int) -> frozenset[ChunkKey]:
        """Return the chunks known in a directory, as a copy."""
        return frozenset(self.keys.part(directory))

    def unknown(self, listed: set[ChunkKey]) -> list[ChunkKey]:
        """Return the `listed` chunks that are not known, in an order that is the same in every process."""
        return sorted(key for key in listed if key not in self)

    def drop(self, before: frozenset[ChunkKey], listed: set[ChunkKey]) -> list[ChunkKey]:
        """Forget the chunks that were known `before` a listing began and are not in it; return them.

        Chunks that were added while the listing ran may have come too late for it, and stay.
        """
        gone = sorted(key for key in before - listed if key in self)
        for key in gone:
            self.remove(key)
        return gone


class Freshness:
    """Finds the directories that changed since they were listed, by their modification times.

    A file system's clock ticks in steps: a directory can change again without its time changing. So a directory is listed
    again until a listing begins at least `settle_s` after its time was first seen.
    """

    def __init__(self, settle_s: float) -> None:
        self.settle_s = settle_s
        self._times_ns = [-1] * DIRECTORIES
        self._seen_s = [0.0] * DIRECTORIES
        self._settled = [False] * DIRECTORIES

    def stale(self, times_ns: Sequence[int], now_s: float) -> list[int]:
        """Return the directories to list now. `times_ns` has one modification time each, 0 where there is no directory."""
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
        """Record that the index has a listing of `directory` that began at `began_s`, after its time was taken."""
        self._settled[directory] = began_s >= self._seen_s[directory] + self.settle_s


def pause_s(calls_s: Sequence[float]) -> float:
    """Return the pause after a listing whose calls took `calls_s`, so that listing takes a tenth of the time. The median
    counts, so that a mount that hung once is not left alone for ten times as long."""
    return 10 * median_low(calls_s) * len(calls_s) if calls_s else 0.0
