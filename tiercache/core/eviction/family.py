"""Who follows whom: the chunks of prefixes as a forest, as far as they are resident."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tiercache.core.keys import ChunkKey


class Family:
    """Parents and children among residents. Costs nothing for chunks whose parent is not known.

    Nearly every chunk has one child, which is kept as its bare key; a container is made for the second one. It has an
    order, so that equal uses give equal victims in every process: the child that came first goes first.
    """

    def __init__(self) -> None:
        self.parents: dict[ChunkKey, ChunkKey] = {}
        self.children: dict[ChunkKey, ChunkKey | OrderedDict[ChunkKey, None]] = {}

    def add(self, key: ChunkKey, parent: ChunkKey) -> None:
        """`key`, which has no parent, follows `parent`; both are resident. A chunk cannot follow itself, nor one behind it:
        where that may be (`may_be_behind`), the caller looks first (`places`)."""
        self.parents[key] = parent
        there = self.children.get(parent)
        if there is None:
            self.children[parent] = key
        elif isinstance(there, OrderedDict):
            there[key] = None
        else:
            self.children[parent] = OrderedDict.fromkeys((there, key))

    def remove(self, key: ChunkKey) -> ChunkKey | None:
        """`key` is resident no more. Its children have no parent then. Returns its own."""
        parent = self.leave(key)
        orphans = self.children.pop(key, None)
        if isinstance(orphans, OrderedDict):
            for orphan in orphans:
                del self.parents[orphan]
        elif orphans is not None:
            del self.parents[orphans]
        return parent

    def leave(self, key: ChunkKey) -> ChunkKey | None:
        """Forget what `key` follows; returns that."""
        parent = self.parents.pop(key, None)
        if parent is not None:
            siblings = self.children[parent]
            if isinstance(siblings, OrderedDict) and len(siblings) > 1:
                siblings.pop(key, None)
            else:
                del self.children[parent]
        return parent

    def may_be_behind(self, key: ChunkKey, other: ChunkKey) -> bool:
        """False where it is plain that `key` does not stand behind `other`; no way is walked for that."""
        parents = self.parents
        return key in parents and other in self.children and parents[key] != parents.get(other)

    def places(self, keys: Sequence[ChunkKey]) -> tuple[dict[ChunkKey, int], list[ChunkKey]]:
        """The place of each of `keys` (the first one, where it is there twice), and of each chunk that stands between two of
        them, which is that of the one before it; and which of `keys` stand behind one that has a later place.
        """
        parents = self.parents
        places: dict[ChunkKey, int] = {}
        wrong = []
        for place, key in enumerate(keys):
            places.setdefault(key, place)
        for key, place in list(places.items()):
            between = []
            ancestor = parents.get(key)
            while ancestor is not None and ancestor not in places:
                between.append(ancestor)
                ancestor = parents.get(ancestor)
            before = -1 if ancestor is None else places[ancestor]
            for other in between:  # no way is walked twice
                places[other] = before
            if before > place:
                wrong.append(key)
        return places, wrong

    def child(self, key: ChunkKey) -> ChunkKey | None:
        """One of the chunks that follow `key`; None when it is the last of its prefix."""
        children = self.children.get(key)
        return next(iter(children)) if isinstance(children, OrderedDict) else children

    def __len__(self) -> int:
        return len(self.parents)
