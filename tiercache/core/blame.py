"""Tell bad files from a failed device."""

from __future__ import annotations

from tiercache.core.keys import ChunkKey


class Blame:
    """Counts files that could not be read in a row. After `files_to_doubt` of them the device itself has to be tested, by
    reading something else from it: bad files may lie together.
    """

    def __init__(self, files_to_doubt: int = 3) -> None:
        self.files_to_doubt = files_to_doubt
        self._failed: set[ChunkKey] = set()

    def casts_doubt(self, key: ChunkKey) -> bool:
        """Record that `key` could not be read; return True if the device has to be tested now."""
        if len(self._failed) < self.files_to_doubt:
            self._failed.add(key)
        return len(self._failed) >= self.files_to_doubt

    def succeeded(self) -> None:
        """Record that the device answers: a file was read, or found missing."""
        self._failed.clear()
