"""What scandir finds in a simulated directory."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tests.torture.simulation.inodes import Inode

if TYPE_CHECKING:
    from tests.torture.simulation.files import FileCalls


class FoundEntries:
    """What `scandir` returns: an iterator that is closed."""

    def __init__(self, entries: list[FoundEntry]) -> None:
        self._entries = iter(entries)

    def __enter__(self) -> FoundEntries:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[FoundEntry]:
        return self._entries

    def __next__(self) -> FoundEntry:
        return next(self._entries)

    def close(self) -> None:
        self._entries = iter(())


class FoundEntry:
    """As os.DirEntry: which kind it is was read with its name, the rest is asked for once."""

    def __init__(self, calls: FileCalls, above: str, name: str, inode: Inode, dir_fd: int | None) -> None:
        self.name = name
        self.path = above + name
        self._calls = calls
        self._dir_fd = dir_fd
        self._number = inode.number
        self._kind = stat.S_IFMT(inode.mode)
        self._statuses: dict[bool, os.stat_result] = {}

    def __fspath__(self) -> str:
        return self.path

    def inode(self) -> int:
        return self._number

    def is_symlink(self) -> bool:
        return self._kind == stat.S_IFLNK

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_IFDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_IFREG, follow_symlinks)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        follow = follow_symlinks and self.is_symlink()
        if follow not in self._statuses:
            self._statuses[follow] = self._calls.stat(self.path, dir_fd=self._dir_fd, follow_symlinks=follow)
        return self._statuses[follow]

    def _is(self, kind: int, follow_symlinks: bool) -> bool:
        if not follow_symlinks or not self.is_symlink():
            return self._kind == kind
        try:
            return stat.S_IFMT(self.stat().st_mode) == kind
        except FileNotFoundError:
            return False
