"""Whether one file is to blame for an error, or the device it lies on."""

from __future__ import annotations

from tiercache.core.keys import ChunkKey


class Blame:
    """A file that cannot be read costs itself. Several in a row, with no good one in between, cast doubt on the device.

    Bad files may lie together, and a device may have failed: that is told apart by reading something else from it.
    """

    def __init__(self, files_to_doubt: int = 3) -> None:
        self.files_to_doubt = files_to_doubt
        self._failed: set[ChunkKey] = set()

    def casts_doubt(self, key: ChunkKey) -> bool:
        """Note that `key` could not be read; whether the device is to be asked now. If that succeeds, it was the files."""
        if len(self._failed) < self.files_to_doubt:
            self._failed.add(key)
        return len(self._failed) >= self.files_to_doubt

    def succeeded(self) -> None:
        """Something could be read, or is not there: the device answers."""
        self._failed.clear()
