"""Which residents are set aside, and for the sake of which prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tiercache.core.eviction.family import Family
from tiercache.core.keys import ChunkKey

Group = list[ChunkKey]


class Spared:
    """Residents whose turn had come, and that were just used or stand before one that was. The policy does not think of them
    (`spare`) until the prefix for whose sake it is, named by its end, is one of many again (`restore`).
    """

    def __init__(self, spare: Callable[[ChunkKey], Any], restore: Callable[[ChunkKey, Any], None]) -> None:
        self.standings: dict[ChunkKey, tuple[Group, Any]] = {}
        self.groups: dict[ChunkKey, Group] = {}
        """By the end of their prefix. One that is judged again may still be in its group."""
        self._spare = spare
        self._restore = restore

    def add(self, path: Sequence[ChunkKey], group: Group) -> None:
        for key in reversed(path):
            group.append(key)
            self.standings[key] = group, self._spare(key)

    def judge(self, key: ChunkKey) -> bool:
        """Whether it was spared; it is not any more."""
        found = self.standings.pop(key, None)
        if found is not None:
            self._restore(key, found[1])
        return found is not None

    def judge_group(self, end: ChunkKey) -> Sequence[ChunkKey]:
        """Returns those that were spared for the sake of `end`."""
        group = self.groups.pop(end, None)
        return [key for key in group if self.judge(key)] if group else ()

    def judge_before(self, ancestor: ChunkKey | None, family: Family) -> None:
        """What was behind it is not any more. It may be spared, and all before it, for the sake of an end of that."""
        while self.standings and ancestor is not None:
            if ancestor in self.standings:
                group, _ = self.standings[ancestor]
                for spared in group:
                    self.judge(spared)
                group.clear()
            ancestor = family.parents.get(ancestor)

    def move_group(self, end: ChunkKey, new_end: ChunkKey) -> None:
        """What was spared for the sake of `end` is so for what follows it."""
        group = self.groups.pop(end, None) if self.groups else None
        if group is not None:
            if new_end not in self.groups:
                self.groups[new_end] = group
            else:
                for key in group:
                    self.judge(key)
