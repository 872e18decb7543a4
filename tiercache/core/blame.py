"""Whether one file is to blame for an error, or the device it lies on."""

from __future__ import annotations

from tiercache.core.keys import ChunkKey


class Blame:
    """A file that cannot be read costs itself. Several in a row, with no good one in between, are the device's fault."""

    def __init__(self, files_to_suspect: int = 3) -> None:
        self.files_to_suspect = files_to_suspect
        self._failed: set[ChunkKey] = set()

    def is_the_device(self, key: ChunkKey) -> bool:
        """Note that `key` could not be read."""
        if len(self._failed) < self.files_to_suspect:
            self._failed.add(key)
        return len(self._failed) >= self.files_to_suspect

    def succeeded(self) -> None:
        """Another one could be, or is not there: the device answers."""
        self._failed.clear()
