"""What all eviction orders have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from tiercache.core.eviction.family import Family
from tiercache.core.eviction.recent import Recent
from tiercache.core.eviction.spared import Spared
from tiercache.core.keys import ChunkKey

V = TypeVar("V")


class EvictionOrder(ABC, Generic[V]):
    """Residents, and the order in which they would be evicted.

    Prefixes stay whole: where parents are given, a chunk never goes while one that follows it is resident. When its turn has
    come, the last of those behind it goes instead, and the others after that one, from the tail up to the chunk itself. A
    chunk without the ones before it is of no use to anybody, however lately it was used.

    What was just used is not judged: the prefixes and single chunks that were stored or read last (`Recent`), up to `SPARED`
    of all residents, go after everything else, whatever the policy thinks of them. Where the last prefix alone is larger
    than the cache, its head stays: first its end goes, and then what continues it, as it comes.
    """

    SPARED = 0.8
    """The part of all residents that may be too recent to be judged. The latest prefix always is."""

    entries: dict[ChunkKey, V]

    def __init__(self) -> None:
        self._family = Family()
        self._recent = Recent()
        self._most = 0
        """Residents there were at once; and so many of them may be spared for having been used lately."""
        self._most_recent = 0
        self._path: list[ChunkKey] = []
        self._spared = Spared(self._spare, self._restore)
        self._returning = False
        self._full = False
        """Whether the prefix that was used last needed more room than there is, and has lost its end for that."""
        self._awaited = False
        """Whether a prefix is being used of which nothing is here yet: the latest that is known has had its turn."""
        self._strays: dict[ChunkKey, None] = {}
        self.victims_parent: ChunkKey | None = None
        """What the last victim followed: `readmit` wants to know, if it could not go."""

    @abstractmethod
    def insert(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        """Add a resident that was just used. `key` must not be resident.

        `parent` is the chunk before it in its prefix, where the caller knows it. One that is not resident is ignored, unless
        the prefix that was used last had to lose its end: what continues it is of no use then, and goes first.
        """

    def insert_all(self, residents: Mapping[ChunkKey, V], parents: Mapping[ChunkKey, ChunkKey]) -> None:
        """`insert` each, in their order."""
        for key, value in residents.items():
            self.insert(key, value, parents.get(key))

    @abstractmethod
    def insert_cold(self, key: ChunkKey, value: V) -> None:
        """Add a resident of unknown age (found on disk after a restart): first in line to go."""

    def age(self, key: ChunkKey) -> None:
        """Put a resident behind all others, as one of unknown age; nothing where it is not resident."""
        if (value := self.discard(key)) is not None:
            self.insert_cold(key, value)

    def touch(self, key: ChunkKey) -> None:
        """Note a use of a resident key."""
        if key in self._spared.standings:
            self._spared.judge(key)
        self._use(key)
        self._awaited = False
        ends = self._recent.ends
        parent = self._family.parents.get(key)
        if parent is not None and parent in ends:
            self._grew(key, parent)
        else:
            self._recent.used(key)
        self._trim()

    def follow(self, keys: Sequence[ChunkKey]) -> None:
        """Learn that `keys`, which were just used, follow one another in a prefix, as far as they are resident.

        Of what was said of them at other times, that is forgotten which contradicts it: what follows what is as it was said
        last. A key that is named twice stands where it was named first.
        """
        entries, parents, ends = self.entries, self._family.parents, self._recent.ends
        places: dict[ChunkKey, int] = {}
        parent = None
        gap = False
        for key in keys:
            if key not in entries:
                gap = True
                continue
            if parent is not None and parent != key and not (gap and key in self._strays):
                known = parents.get(key)
                # If it is known to follow another one, that was an earlier one, while this one was not here.
                if known is None or (known != parent and not gap):
                    if self._family.may_be_behind(parent, key):
                        places = places or self._straighten(keys)
                    if not places or places[parent] < places[key]:
                        self._adopt(key, parent)
                if not gap and parent in ends and key not in ends:
                    self._grew(key, parent, counted=True)  # its beginning came after it, and stands for all of it
            parent, gap = key, False
        self._trim()

    def touch_prefix(self, keys: Sequence[ChunkKey]) -> None:
        """Note one use of all that are resident of `keys`, which follow one another from the first chunk of a prefix.

        The last is used first: of one request's chunks the tail is then colder than the head. Learns who follows whom, as
        `follow` does.
        """
        entries, use, spared, family = self.entries, self._use, self._spared.standings, self._family
        parents, recent_ends = family.parents, self._recent.ends
        places: dict[ChunkKey, int] = {}
        self._full = False
        ends: list[tuple[ChunkKey, int]] = []
        length, stale = 0, False  # `stale`: the first chunk of a part follows something, which may be in a later part
        end: ChunkKey | None = None
        after: ChunkKey | None = None
        tail: ChunkKey | None = None  # the next end of a prefix behind `after`, if it is known: no walk for each chunk
        for key in reversed(keys):
            if key not in entries:
                if end is not None:
                    ends.append((end, length))
                    stale = stale or after in parents
                end, length, after, tail = None, 0, None, None
                continue
            if key in spared:
                self._spared.judge(key)
            use(key)
            if after is None:
                end = key
            elif parents.get(after) != key and after != key:
                if family.may_be_behind(key, after):
                    places, tail = places or self._straighten(keys), None
                tail = self._adopt(after, key, tail) if not places or places[key] < places[after] else None
            length += 1
            after = key
            if key in recent_ends:
                tail = key
        if end is not None:
            ends.append((end, length))
            stale = stale or after in parents
        gaps = len(ends) > 1 or after is None
        if stale and gaps and not places:
            self._straighten(keys)  # else what fills the gaps would make a circle, and be cut off for that
        self._awaited = not ends
        if self._strays:
            for key in keys:
                if key not in entries:
                    break
                self._strays.pop(key, None)
        # What stands behind a gap is of use only when that is filled.
        for part in ends:
            self._recent.used(*part, exactly=gaps)
        self._trim()

    def renew(self, key: ChunkKey) -> None:
        """A resident is expected to be used soon: as far from going as one that was used just now. No use is counted."""
        self._spared.judge(key)
        self._renew(key)

    def coldest(self) -> ChunkKey | None:
        """Which resident `pop_victim` would return now; None when there is none."""
        key = self._chosen() if self.entries else None
        if key is not None and self._path:
            self._path.append(key)
        return key

    def discard(self, key: ChunkKey) -> V | None:
        """Remove a key; None when it is not resident."""
        if key not in self.entries:
            self._forget(key)
            return None
        self._path.clear()
        self._leave(key)
        return self._remove(key)

    def pop_victim(self) -> tuple[ChunkKey, V]:
        """Remove and return the resident that should go first; KeyError when empty."""
        if not self.entries:
            raise KeyError("nothing is resident")
        key = self._chosen()
        self.victims_parent = self._family.parents.get(key)
        self._leave(key)
        return key, self._evict(key)

    def evict(self, key: ChunkKey) -> V:
        """Remove a resident that another order has chosen as a victim."""
        self._path.clear()
        self._leave(key)
        return self._evict(key)

    def readmit(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        """Take back a victim that could not go."""
        self._returning = True
        self._take_back(key, value, parent if parent in self.entries else None)  # it may be one that could not go either
        self._returning = False
        if self._full and parent is not None and parent not in self.entries:
            self._strays[key] = None

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, key: object) -> bool:
        return key in self.entries

    # What a policy says

    @abstractmethod
    def _coldest(self) -> ChunkKey | None:
        """Which resident the policy would like to see go; None where all that are left are spared."""

    @abstractmethod
    def _use(self, key: ChunkKey) -> None:
        """Note a use of a resident that is not spared."""

    def _renew(self, key: ChunkKey) -> None:
        self._use(key)

    @abstractmethod
    def _spare(self, key: ChunkKey) -> Any:
        """Do not think of a resident until `_restore`, which gets what this returns."""

    @abstractmethod
    def _restore(self, key: ChunkKey, standing: Any) -> None:
        """A resident that was spared is one of many again."""

    def _take_back(self, key: ChunkKey, value: V, parent: ChunkKey | None) -> None:
        self.insert(key, value, parent)

    def _hasten(self, key: ChunkKey) -> None:
        """A resident that was spared goes before those that still are, where `_restore` left it behind them."""

    @abstractmethod
    def _remove(self, key: ChunkKey) -> V:
        """Take a resident out of whatever it stands in."""

    def _evict(self, key: ChunkKey) -> V:
        """As `_remove`, for a victim, of which the policy may keep the name."""
        return self._remove(key)

    def _grown(self, residents: int) -> None:
        """There are more than there ever were."""
        self._most, self._most_recent = residents, int(self.SPARED * residents)

    def _forget(self, key: ChunkKey) -> None:
        """A key that is not resident is not wanted back in the place that it had."""

    def _straighten(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, int]:
        """Nothing follows what is behind it in `keys`; returns their places. Whoever makes one of `keys` follow one before
        it then makes no circle.

        Chained keys can be in one order only, others may be named in any. A circle would have no tail to go first.
        """
        places, wrong = self._family.places(keys)
        for key in wrong:
            self._cut(key)
        return places

    def _cut(self, key: ChunkKey) -> None:
        """`key` does not follow any more what it was known to follow."""
        parent = self._family.leave(key)
        self._path.clear()  # which may go that way
        self._spared.judge_before(parent, self._family)

    def _adopt(self, key: ChunkKey, parent: ChunkKey, tail: ChunkKey | None = None) -> ChunkKey | None:
        """Learn the parent of a resident, in place of the one that it has; both are resident, and `parent` is not behind
        `key`. `tail` is the next end of a prefix from `key` on, where it is known; returns it, where it is known then."""
        if key in self._family.parents:
            self._cut(key)
        self._family.add(key, parent)
        self._strays.pop(key, None)
        ends = self._recent.ends
        if parent not in ends:
            return tail
        end = tail or key
        while end not in ends and (child := self._family.child(end)) is not None:
            end = child
        if end in ends:
            self._spared.move_group(parent, end)
            self._recent.joined(end, parent)
        return end if end in ends else None

    # What was just used

    def _join(self, key: ChunkKey, parent: ChunkKey | None) -> None:
        """`key` is resident now, and was just used (unless it was all the time, and is taken back)."""
        if len(self.entries) > self._most:
            self._grown(len(self.entries))
        if parent is not None and parent in self.entries and parent != key:
            self._family.add(key, parent)
            if parent in self._strays:
                self._strays[key] = None
                return
            if self._returning and parent not in self._recent.ends:
                return
            self._grew(key, parent)
        elif self._returning:
            return
        elif parent is not None and self._full:
            self._strays[key] = None
            return
        else:
            self._awaited = False
            self._recent.used(key)
        self._trim()

    def _grew(self, key: ChunkKey, parent: ChunkKey, *, counted: bool = False) -> None:
        if not self._returning:
            self._awaited = False
        self._spared.move_group(parent, key)
        self._recent.grew(key, parent, counted=counted)

    def _trim(self) -> None:
        recent = self._recent
        while recent.chunks > self._most_recent and len(recent.ends) > 1:
            oldest = recent.drop_oldest()
            if self._spared.groups:
                self._spared.judge_group(oldest)

    # Victims

    def _chosen(self) -> ChunkKey:
        if self._strays:
            self._path.clear()
            return next(reversed(self._strays))
        recent = self._recent
        while True:
            key = self._coldest()
            if key is None:
                self._path.clear()
                if len(recent.ends) > 1 or (self._awaited and recent.ends):
                    for spared in self._spared.judge_group(recent.drop_oldest()):
                        self._hasten(spared)
                    continue
                return self._last_of_all()
            found = self._tail_behind(key)
            if found is not None:
                return found

    def _last_of_all(self) -> ChunkKey:
        """Nothing is left but the prefix that was used last."""
        self._full = True
        key = self._recent.latest
        while (child := self._family.child(key)) is not None:
            key = child  # it was said in between to stand before what it is now spared for
        return key

    def _tail_behind(self, key: ChunkKey) -> ChunkKey | None:
        """The end of the prefix that `key` is in; None if that was just used, and `key` is spared with all behind it.

        The way there is kept: it is walked once, not once for each victim.
        """
        ends, spared, children = self._recent.ends, self._spared, self._family.children
        path = self._path
        if path and (path[0] != key or path[-1] not in self.entries):
            path.clear()
        if not path:
            if key not in children and key not in ends:
                return key
            path.append(key)
        while (child := self._family.child(path[-1]) if path[-1] in children else None) is not None:
            if child in spared.standings:
                spared.add(path, spared.standings[child][0])
                path.clear()
                return None
            path.append(child)
        if path[-1] in ends:
            spared.add(path, spared.groups.setdefault(path[-1], []))
            path.clear()
            return None
        return path.pop()

    def _leave(self, key: ChunkKey) -> None:
        """`key` is about to leave."""
        if key in self._spared.standings:
            self._spared.judge(key)
        family = self._family
        if key in family.children:
            parent = family.remove(key)
            self._spared.judge_before(parent, family)
        else:
            parent = family.leave(key) if family.parents else None
        self._strays.pop(key, None)
        length = self._recent.left(key) if key in self._recent.ends else 0
        if length:
            if length > 1 and parent is not None:
                self._recent.used(parent, length - 1)
                self._spared.move_group(key, parent)
            else:
                self._spared.judge_group(key)
