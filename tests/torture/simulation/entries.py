"""What scandir finds in a simulated directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.torture.simulation.files import FileCalls


class FoundEntries:
    """What `scandir` returns: an iterator that is closed."""

    def __init__(self, entries: list[FoundEntry]) -> None:
        self._entries = iter(entries)

    def __enter__(self) -> FoundEntries:
        return self

    def __exit__(self, *exception: object) -> None:
        self._entries = iter(())

    def __iter__(self) -> Iterator[FoundEntry]:
        return self._entries

    def __next__(self) -> FoundEntry:
        return next(self._entries)


class FoundEntry:
    """As os.DirEntry, for those who ask for its own status alone, which is asked for once."""

    def __init__(self, calls: FileCalls, above: str, name: str, dir_fd: int | None) -> None:
        self.name = name
        self.path = above + name
        self._calls = calls
        self._dir_fd = dir_fd
        self._status: os.stat_result | None = None

    def stat(self, *, follow_symlinks: bool) -> os.stat_result:
        assert not follow_symlinks
        if self._status is None:
            self._status = self._calls.stat(self.path, dir_fd=self._dir_fd, follow_symlinks=False)
        return self._status
