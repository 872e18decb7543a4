"""Chunks whose turn to go came while somebody held them: out of the order until they may be evicted again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiercache.core.eviction import Order
from tiercache.core.keys import ChunkKey
from tiercache.tiers.leases import Entry


class Parked:
    """Of one order of eviction, which does not know them meanwhile: what it would be told of them is noted here."""

    def __init__(self, order: Order[Entry]) -> None:
        self._order = order
        self._count = 0

    def park(self, entry: Entry) -> None:
        """It was the order's last victim, and cannot go."""
        entry.parked = True
        entry.parent = self._order.victims_parent
        self._count += 1

    def take_back(self, entry: Entry) -> None:
        """It may be evicted again."""
        entry.parked = False
        self._count -= 1
        self._order.readmit(entry.key, entry, entry.parent)
        if entry.used_meanwhile:
            entry.used_meanwhile = False
            self._order.touch(entry.key)

    def note_use(self, entry: Entry) -> None:
        """Of any resident."""
        if entry.parked:
            entry.used_meanwhile = True
        else:
            self._order.touch(entry.key)

    def note_prefix(self, keys: Sequence[ChunkKey], entries: Mapping[ChunkKey, Entry]) -> None:
        """Those of `keys` were used that are parked; the order was told of the others."""
        if self._count:
            for key in keys:
                entry = entries.get(key)
                if entry is not None and entry.parked:
                    entry.used_meanwhile = True

    def discard(self, entry: Entry) -> None:
        """Any resident goes, and does not come back."""
        if entry.parked:
            entry.parked = False
            self._count -= 1
        else:
            self._order.discard(entry.key)
