"""What is to be written to a volume, and what is to be deleted from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tiercache.core.keys import ChunkKey


class Victims(list[tuple[ChunkKey, int]]):
    """Evicted chunks, which are to be deleted, and the bytes that each occupies."""

    def __init__(self, chunks: Iterable[tuple[ChunkKey, int]] = ()) -> None:
        super().__init__(chunks)
        self.freed_bytes = 0
        """Of those that were there still; the others somebody else had deleted. Known once the write has ended or failed."""
        self.left: list[tuple[ChunkKey, int]] = []
        """Victims that this process may not delete."""
        self.are_deleted = False
        """Or will not be any more. A write goes on after that, and may take long."""
        self._when_deleted: list[Callable[[], None]] = []

    @property
    def were_gone(self) -> bool:
        return bool(self) and not self.freed_bytes

    def deleted(self) -> None:
        """From any thread, and as often as one likes."""
        self.are_deleted = True
        for tell in self._when_deleted:
            tell()

    def when_deleted(self, tell: Callable[[], None]) -> None:
        """`tell` is called at least once then, from any thread."""
        self._when_deleted.append(tell)
        if self.are_deleted:
            tell()


@dataclass
class PendingFile:
    """A chunk for which room is reserved, and a path at which its file may be made."""

    key: ChunkKey
    path: str
    reserved_bytes: int


@dataclass
class Deleted:
    """What `Volume.delete_all` did. Chunks that were gone already are in none of these."""

    chunks: int = 0
    freed_bytes: int = 0
    left: list[tuple[ChunkKey, int]] = field(default_factory=list)
    """Could not be deleted, for the reason in `error`."""
    error: OSError | None = None
