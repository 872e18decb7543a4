"""What all eviction orders have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence
from typing import Generic, TypeVar

from tiercache.core.eviction.family import Family
from tiercache.core.keys import ChunkKey

V = TypeVar("V")


class EvictionOrder(ABC, Generic[V]):
    """Residents, and the order in which they would be evicted.

    Prefixes stay whole: where parents are given, a chunk never goes while one that follows it is resident. When its turn has
    come, the last of those behind it goes instead, and the others after that one, from the tail up to the chunk itself. A
    chunk without the ones before it is of no use to anybody, however lately it was used.
    """

    entries: MutableMapping[ChunkKey, V]

    def __init__(self) -> None:
        self._family = Family()
        self._path: list[ChunkKey] = []
        self.victims_parent: ChunkKey | None = None
        """What the last victim followed: `readmit` wants to know, if it could not go."""

    @abstractmethod
    def insert(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        """Add a resident that was just used. `key` must not be resident.

        `parent` is the chunk before it in its prefix, where the caller knows it and it is resident (else it is ignored).
        """

    @abstractmethod
    def insert_cold(self, key: ChunkKey, value: V) -> None:
        """Add a resident of unknown age (found on disk after a restart): first in line to go."""

    @abstractmethod
    def touch(self, key: ChunkKey) -> None:
        """Note a use of a resident key."""

    def follow(self, keys: Sequence[ChunkKey]) -> None:
        """Learn that `keys` follow one another in a prefix, as far as they are resident."""
        entries, family = self.entries, self._family
        parent = None
        for key in keys:
            if key in entries:
                if parent is not None and family.parent(key) is None and parent != key:
                    self._adopt(key, parent)
                parent = key

    def touch_prefix(self, keys: Sequence[ChunkKey]) -> None:
        """Note one use of all that are resident of `keys`, which follow one another from the first chunk of a prefix.

        The last is used first: of one request's chunks the tail is then colder than the head.
        """
        entries, touch = self.entries, self.touch
        for key in reversed(keys):
            if key in entries:
                touch(key)

    def renew(self, key: ChunkKey) -> None:
        """A resident is expected to be used soon: as far from going as one that was used just now. No use is counted."""
        self.touch(key)

    def coldest(self) -> ChunkKey | None:
        """Which resident `pop_victim` would return now; None when there is none."""
        if not self.entries:
            return None
        key = self._coldest()
        if len(self._family):
            key = self._tail_behind(key)
            self._path.append(key)
        return key

    def discard(self, key: ChunkKey) -> V | None:
        """Remove a key; None when it is not resident."""
        if key not in self.entries:
            self._forget(key)
            return None
        if len(self._family):
            self._family.remove(key)
        return self._remove(key)

    def pop_victim(self) -> tuple[ChunkKey, V]:
        """Remove and return the resident that should go first; KeyError when empty."""
        if not self.entries:
            raise KeyError("nothing is resident")
        key = self._coldest()
        self.victims_parent = None
        if len(self._family):
            key = self._tail_behind(key)
            self.victims_parent = self._family.parent(key)
            self._family.remove(key)
        return key, self._evict(key)

    def readmit(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        """Take back a victim that could not go."""
        self.insert(key, value, parent)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, key: object) -> bool:
        return key in self.entries

    @abstractmethod
    def _coldest(self) -> ChunkKey:
        """Which resident the policy would like to see go; there is at least one."""

    @abstractmethod
    def _remove(self, key: ChunkKey) -> V:
        """Take a resident out of whatever it stands in."""

    def _evict(self, key: ChunkKey) -> V:
        """As `_remove`, for a victim, of which the policy may keep the name."""
        return self._remove(key)

    def _forget(self, key: ChunkKey) -> None:
        """A key that is not resident is not wanted back in the place that it had."""

    def _adopt(self, key: ChunkKey, parent: ChunkKey) -> None:
        """Learn the parent of a resident; both are resident."""
        self._family.add(key, parent)

    def _join(self, key: ChunkKey, parent: ChunkKey | None) -> None:
        if parent is not None and parent in self.entries and parent != key:
            self._family.add(key, parent)

    def _tail_behind(self, key: ChunkKey) -> ChunkKey:
        """The end of the prefix that `key` is in. The way there is kept: it is walked once, not once for each victim."""
        path = self._path
        if path and (path[0] != key or path[-1] not in self.entries):
            path.clear()
        if not path:
            path.append(key)
        while (child := self._family.child(path[-1])) is not None:
            path.append(child)
            if len(path) > len(self.entries):
                # Somebody said that a chunk follows itself. Chained keys cannot, others may; forget who follows whom.
                self._family = Family()
                path.clear()
                return key
        return path.pop()
