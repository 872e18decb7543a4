"""Which prefixes were used last: what nobody judges until others were."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from tiercache.core.keys import ChunkKey


class Recent:
    """The ends of the prefixes that were used last, the latest last, each with how many chunks of it were used.

    A chunk that follows nothing that is known is a prefix of one chunk. Whoever stands before an end belongs to it, so that
    a prefix of thousands costs one entry.
    """

    def __init__(self) -> None:
        self.ends: OrderedDict[ChunkKey, int] = OrderedDict()
        self.chunks = 0

    def used(self, end: ChunkKey, chunks: int = 1, *, exactly: bool = False) -> None:
        """`chunks` up to `end` were used; and `exactly` no more: what stands before them was at another time, if ever."""
        ends = self.ends
        before = ends.get(end, 0)
        if before:
            ends.move_to_end(end)
        if chunks > before or exactly:
            ends[end] = chunks
            self.chunks += chunks - before

    def came(self, keys: Collection[ChunkKey]) -> None:
        """Each of them, which are new, is a prefix of one chunk."""
        self.ends.update(dict.fromkeys(keys, 1))
        self.chunks += len(keys)

    def grew(self, key: ChunkKey, parent: ChunkKey, *, counted: bool = False) -> None:
        """`key` was used, which follows `parent`; it is `counted` where it was for an end behind it."""
        ends = self.ends
        length = ends.pop(parent, 0)
        if length:
            self.chunks -= length
        before = ends.pop(key, 0)
        self._set(key, before, length + (before or not counted))

    def joined(self, key: ChunkKey, parent: ChunkKey) -> None:
        """The prefix that ends with `key` was found to begin with the one that ends with `parent`; neither was used."""
        before = self.ends.get(key)
        length = self.ends.get(parent)
        if before and length:
            is_latest = parent == self.latest
            self.left(parent)
            self._set(key, before, before + length)
            if is_latest:
                self.ends.move_to_end(key)

    def left(self, end: ChunkKey) -> int:
        """`end` is none any more; returns how many chunks were used up to it, 0 if it was none."""
        length = self.ends.pop(end, 0)
        self.chunks -= length
        return length

    def drop_oldest(self) -> ChunkKey:
        """The prefix that was used before all others is none of them any more."""
        end, length = self.ends.popitem(last=False)
        self.chunks -= length
        return end

    @property
    def latest(self) -> ChunkKey:
        return next(reversed(self.ends))

    def _set(self, end: ChunkKey, before: int, chunks: int) -> None:
        self.ends[end] = chunks
        self.chunks += chunks - before
