"""How room is made: by whoever writes, or by one of many instances for all."""

from __future__ import annotations

import logging

from tiercache.errors import TierFull
from tiercache.memory.workers import Workers
from tiercache.tiers.files.changes import Victims
from tiercache.tiers.files.evictor import Evictor, EvictorSettings
from tiercache.tiers.files.parts import Room
from tiercache.tiers.files.scanning import Shelf
from tiercache.tiers.files.shelves import Shelves

logger = logging.getLogger("tiercache.disk")

_TRIM_STEP = 256
"""Chunks that are evicted in one hand-over where a cap was lowered."""
_OVER_THE_CAP = 8
"""So many chunks more than the cap: it was lowered. Writes then make room for themselves, and the rest goes in the
background."""
_DELETING_THREADS = 8
_FIRST_FOUND_S = 2.0
"""How long a write to a full directory waits for the first scan to find what can go for it."""


def give_up_bytes(lacking_bytes: int, needed_bytes: int) -> int:
    """How much of what is above a cap, or a tenant's quota, one write makes room for itself."""
    return 2 * needed_bytes if lacking_bytes > _OVER_THE_CAP * needed_bytes else max(0, lacking_bytes)


class OwnRoom(Room):
    """Who writes deletes what this instance has used least."""

    def __init__(self, shelves: Shelves) -> None:
        self._shelves = shelves
        self._evicted = 0

    @property
    def evicted(self) -> int:
        return self._evicted

    async def make(self, shelf: Shelf, needed_bytes: int, deficit_bytes: int) -> Victims:
        volume, index, shelves = shelf.volume, shelf.index, self._shelves
        if not shelf.scanned:
            # What is known is not all that lies there yet, which says nothing against the count.
            await shelf.knows(give_up_bytes(deficit_bytes, needed_bytes), _FIRST_FOUND_S)
        elif deficit_bytes > 0 and shelf.is_doubtful:
            if 2 * index.used_bytes > volume.cap_bytes:
                shelves.scan_soon(shelf)
            elif await shelves.scanned_soon(shelf):
                deficit_bytes = min(deficit_bytes, volume.ledger.used_bytes + needed_bytes - volume.cap_bytes)
        deficit_bytes = give_up_bytes(deficit_bytes, needed_bytes)
        if deficit_bytes > index.used_bytes and shelf.volume is volume:
            known_bytes = volume.ledger.used_bytes
            await shelves.metadata.submit(volume.ledger.refresh)
            deficit_bytes -= known_bytes - volume.ledger.used_bytes
        if deficit_bytes > index.used_bytes and shelf.volume is volume and await shelves.scanned_soon(shelf):
            deficit_bytes = min(deficit_bytes, volume.ledger.used_bytes + needed_bytes - volume.cap_bytes)
        if shelf.volume is not volume:
            return Victims()  # it was replaced meanwhile, and what is there now says what it lacks
        if deficit_bytes > index.used_bytes:
            raise TierFull(
                f"{volume.root}: {volume.ledger.used_bytes} of {volume.cap_bytes} bytes are in use and only "
                f"{index.used_bytes} of them are known chunks"
            )
        return self._evict(shelf, deficit_bytes)

    async def trim(self, shelf: Shelf) -> None:
        """A step at a time, so that writes get their turn."""
        volume = shelf.volume
        while shelf.volume is volume:
            excess_bytes = max(volume.ledger.used_bytes - volume.cap_bytes, shelf.index.excess_bytes)
            victims = self._evict(shelf, excess_bytes, _TRIM_STEP)
            if not victims:
                return
            with shelf.leaving(victims):
                done = await self._shelves.metadata.background.submit(volume.delete_all, victims)
            self._shelves.catch_up_soon(shelf)
            if done.error is not None:
                logger.warning("%s: chunks could not be evicted: %s", volume.root, done.error)
                for key, occupied_bytes in done.left:
                    shelf.index.add(key, occupied_bytes)
                return

    def _evict(self, shelf: Shelf, needed_bytes: int, most: int | None = None) -> Victims:
        victims = Victims(shelf.index.evict(needed_bytes, most))
        self._evicted += len(victims)
        return victims


class ElectedRoom(Room):
    """One of all instances that share a directory evicts, in the background. Who writes waits for it; he deletes nothing but
    what is above the quota of the tenant he writes for."""

    def __init__(self, shelves: Shelves, settings: EvictorSettings | None = None, wait_s: float = 5.0) -> None:
        """`wait_s`: how long a write waits for room."""
        self.evictors: dict[Shelf, Evictor] = {}
        self._shelves = shelves
        self._settings = settings or EvictorSettings()
        self._wait_s = wait_s
        self._deleters = Workers(f"{shelves.name}-evict", _DELETING_THREADS)

    @property
    def evicted(self) -> int:
        return sum(evictor.evicted for evictor in self.evictors.values())

    def begin(self, shelf: Shelf) -> None:
        shelves = self._shelves
        evictor = Evictor(
            shelf, self._deleters, self._settings, shelves.deleted, lambda: shelves.scan_soon(shelf)
        )
        self.evictors[shelf] = evictor
        shelves.begin(evictor.run(), f"evict-{shelf.volume.root}")

    async def make(self, shelf: Shelf, needed_bytes: int, deficit_bytes: int) -> Victims:
        volume, evictor = shelf.volume, self.evictors[shelf]
        if deficit_bytes <= 0 or volume.ledger.missing:  # who writes finds out what became of the directory
            evictor.evict_if_due()
            return Victims()
        goal_bytes = volume.cap_bytes - needed_bytes
        if volume.ledger.used_bytes <= goal_bytes:
            # Not the cap was in the way but the device.
            goal_bytes = max(0, volume.ledger.used_bytes - deficit_bytes)
        if not await evictor.room(goal_bytes, self._wait_s):
            raise TierFull(
                f"{volume.root}: {volume.ledger.used_bytes} of {volume.cap_bytes} bytes are in use, and for "
                f"{self._wait_s:.1f} s no instance made room"
            )
        return Victims()

    async def trim(self, shelf: Shelf) -> None:
        """The elected instance does that; it may have waited for the count to be right."""
        self.evictors[shelf].look_again()

    def evict_if_due(self, shelf: Shelf) -> None:
        self.evictors[shelf].evict_if_due()

    def close(self) -> None:
        self._deleters.close()
