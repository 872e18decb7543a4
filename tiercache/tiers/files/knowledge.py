"""What is known of a directory: what this instance did and found there, or what all did, by listing it again and again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from tiercache.core.index import CappedIndex
from tiercache.core.keys import ChunkKey
from tiercache.core.sharing import SharedIndex
from tiercache.memory.workers import Workers
from tiercache.tiers.files.deletions import Deletions
from tiercache.tiers.files.listing import Refresher
from tiercache.tiers.files.parts import Knowledge
from tiercache.tiers.files.scanning import Shelf
from tiercache.tiers.files.shelves import Shelves

_PROBED = 1024
"""Keys that are looked for in one hand-over."""


class OwnIndex(Knowledge):
    """What others have stored is found by asking for it."""

    def __init__(self, shelves: Shelves) -> None:
        self._shelves = shelves

    def make_index(self) -> CappedIndex:
        return CappedIndex(self._shelves.settings.tenant_share_bytes)

    def follow_deletions(self, shelf: Shelf, on_stored: Callable[[ChunkKey], None] | None = None) -> None:
        deletions = Deletions(self._shelves, shelf, on_stored)
        self._shelves.begin(deletions.follow(), f"deletions-{shelf.volume.root}")

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        shelves = self._shelves
        position = shelves.prefix(keys)
        while position < len(keys):
            part = keys[position : position + _PROBED]
            await self._look_for(part, gaps=False)
            there = shelves.prefix(part)
            position += there
            if there < len(part):
                break
        return position

    async def probe_each(self, keys: Sequence[ChunkKey]) -> list[bool]:
        unknown = [key for key in keys if not self._shelves.contains(key)]
        for start in range(0, len(unknown), _PROBED):
            await self._look_for(unknown[start : start + _PROBED], gaps=True)
        return [self._shelves.contains(key) for key in keys]

    async def _look_for(self, keys: Sequence[ChunkKey], *, gaps: bool) -> None:
        """Put into the index what there is of `keys`; without `gaps`, up to the first that is nowhere."""
        shelves = self._shelves
        unknown = [(shelves.places(key), key) for key in keys if key not in shelves.refused]
        with contextlib.ExitStack() as looking:
            gone = {shelf: looking.enter_context(shelf.looking_around()) for shelf in shelves.all}
            found = await shelves.metadata.submit(_existing, unknown, gaps)
        for key, shelf, occupied_bytes in found:
            if key not in shelf.index and key not in gone[shelf]:
                shelf.add(key, occupied_bytes)


class FollowedIndex(OwnIndex):
    """A task keeps the index fresh, so that look-ups are answered from memory: for mounts where a question is dear."""

    def __init__(self, shelves: Shelves, refresh_s: float = 1.0) -> None:
        """`refresh_s`: how often it learns what other instances did, where the mount is quick enough."""
        super().__init__(shelves)
        self.refreshers: dict[Shelf, Refresher] = {}
        self._refresh_s = refresh_s
        self._watchers = Workers(f"{shelves.name}-refresh", len(shelves.settings.directories))

    def make_index(self) -> CappedIndex:
        return SharedIndex(self._shelves.settings.tenant_share_bytes)

    def follow_deletions(self, shelf: Shelf, on_stored: Callable[[ChunkKey], None] | None = None) -> None:
        """Its refresher does."""

    def begin(self, shelf: Shelf) -> None:
        shelves = self._shelves

        def refreshed() -> None:
            shelves.trim_soon(shelf)
            shelves.replace_soon(shelf)

        refresher = Refresher(shelf, self._watchers, self._refresh_s, shelves.refused, shelves.deleted, refreshed)
        self.refreshers[shelf] = refresher
        shelves.begin(self._follow(shelf, refresher), f"refresh-{shelf.volume.root}")

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        """Until the first scan has ended, memory does not know enough, and the mount is asked."""
        shelves = self._shelves
        position = shelves.prefix(keys)
        if position < len(keys):
            shelf = shelves.places(keys[position])[0]
            if not shelf.scanned:
                return await super().probe(keys)
            self.missed(shelf)
        return position

    async def probe_each(self, keys: Sequence[ChunkKey]) -> list[bool]:
        shelves = self._shelves
        first = {shelves.places(key)[0] for key in keys if not shelves.contains(key)}
        if not all(shelf.scanned for shelf in first):
            return await super().probe_each(keys)
        for shelf in first:
            self.missed(shelf)
        return [shelves.contains(key) for key in keys]

    def missed(self, shelf: Shelf) -> None:
        self.refreshers[shelf].hint()

    async def refreshed(self) -> None:
        await asyncio.gather(*(refresher.refreshed() for refresher in self.refreshers.values()))

    def close(self) -> None:
        self._watchers.close()

    async def _follow(self, shelf: Shelf, refresher: Refresher) -> None:
        await self._shelves.first_scan(shelf)
        await refresher.run()


def _existing(unknown: list[tuple[list[Shelf], ChunkKey]], gaps: bool) -> list[tuple[ChunkKey, Shelf, int]]:
    """Where chunks are and the bytes they occupy; without `gaps`, up to the first that is nowhere. For a worker thread."""
    found: list[tuple[ChunkKey, Shelf, int]] = []
    for shelves, key in unknown:
        for shelf in shelves:
            if occupied_bytes := shelf.volume.occupied_by(key):
                found.append((key, shelf, occupied_bytes))
                break
        else:
            if not gaps:
                break
    return found
