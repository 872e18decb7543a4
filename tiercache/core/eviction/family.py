"""Who follows whom: the chunks of prefixes as a forest, as far as they are resident."""

from __future__ import annotations

from collections import OrderedDict

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
        """`key` follows `parent`; both are resident. A chunk cannot follow itself or one that follows it."""
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

    def child(self, key: ChunkKey) -> ChunkKey | None:
        """One of the chunks that follow `key`; None when it is the last of its prefix."""
        children = self.children.get(key)
        return next(iter(children)) if isinstance(children, OrderedDict) else children

    def __len__(self) -> int:
        return len(self.parents)
