"""What all eviction orders have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence
from typing import Generic, TypeVar

from tiercache.core.keys import ChunkKey

V = TypeVar("V")


class EvictionOrder(ABC, Generic[V]):
    """Residents, and the order in which they would be evicted."""

    entries: MutableMapping[ChunkKey, V]

    @abstractmethod
    def insert(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        """Add a resident that was just used. `key` must not be resident.

        `parent` is the chunk before it in its prefix, where the caller knows it; what an order makes of that is its own.
        """

    @abstractmethod
    def insert_cold(self, key: ChunkKey, value: V) -> None:
        """Add a resident of unknown age (found on disk after a restart): first in line to go."""

    @abstractmethod
    def touch(self, key: ChunkKey) -> None:
        """Note a use of a resident key."""

    @abstractmethod
    def discard(self, key: ChunkKey) -> V | None:
        """Remove a key; None when it is not resident."""

    @abstractmethod
    def pop_victim(self) -> tuple[ChunkKey, V]:
        """Remove and return the resident that should go first; KeyError when empty."""

    def touch_prefix(self, keys: Sequence[ChunkKey]) -> None:
        """Note one use of all that are resident of `keys`, which follow one another from the first chunk of a prefix.

        The last is used first: among chunks of one request the tail is then colder than the head, so that what is evicted
        leaves a shorter prefix and not one with a hole at its beginning.
        """
        entries = self.entries
        touch = self.touch
        for key in reversed(keys):
            if key in entries:
                touch(key)

    def readmit(self, key: ChunkKey, value: V) -> None:
        """Take back a victim that could not go."""
        self.insert(key, value)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, key: object) -> bool:
        return key in self.entries
