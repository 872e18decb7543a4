"""The index of a directory, and how it follows changes by other processes.

`ProbingLookup` holds what this instance stored or found, and asks the directory for other keys. `RelistingLookup` answers
from memory. A `Refresher` follows a directory: it lists changed subdirectories periodically.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from tiercache.core.index import CappedIndex, Freshness, pause_s
from tiercache.core.keys import ChunkKey
from tiercache.errors import TierUnavailable
from tiercache.tiers.files.access import ABSENT
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directories import Directories
from tiercache.tiers.files.directory import TOP_LEVELS
from tiercache.tiers.files.scanning import Directory, merge

logger = logging.getLogger("tiercache.disk")

T = TypeVar("T")

_SETTLE_S = 1.0
_HURRY = 10
"""A hint can shorten the pause by this factor."""
_LONGEST_PAUSE_S = 60.0
"""So that calls of a mount that hung do not keep other processes' chunks unknown for long."""


def pauses_s(refresh_s: float, calls_s: Sequence[float]) -> tuple[float, float]:
    """Return the pause after a refresh with calls of these times, and how much longer to wait for a hint."""
    least_s = min(_LONGEST_PAUSE_S, max(refresh_s / _HURRY, pause_s(calls_s)))
    return least_s, max(0.0, refresh_s - least_s)


class Refresher:
    """Keeps a directory's index and counter fresh. Belongs to the event loop; `run` is its task."""

    def __init__(self, directories: Directories, directory: Directory, refresh_s: float) -> None:
        self.directory = directory
        self.refresh_s = refresh_s
        self._directories = directories
        self._index: object = None
        self._freshness = Freshness(_SETTLE_S)
        self._hint = asyncio.Event()
        self.begun = self.ended = 0
        """Number of refreshes."""

    def hint(self) -> None:
        """Refresh sooner, since a chunk was missed that may be new."""
        self._hint.set()

    async def run(self) -> None:
        """Refresh periodically until cancelled."""
        failing = False
        while True:
            self._hint.clear()
            self.begun += 1
            calls_s: list[float] = []  # failed calls do not lengthen the pause
            try:
                calls_s = await self._refresh()
                self._directories.trim_soon(self.directory)
                failing = False
            except (OSError, TierUnavailable) as error:
                if not failing:
                    logger.warning("%s could not be listed: %s", self.directory.files.root, error)
                failing = True
            self.ended += 1
            least_s, more_s = pauses_s(self.refresh_s, calls_s)
            await asyncio.sleep(least_s)
            try:
                async with asyncio.timeout(more_s):
                    await self._hint.wait()
            except TimeoutError:
                pass

    async def _refresh(self) -> list[float]:
        """Return the duration of each call."""
        loop, calls_s = asyncio.get_running_loop(), list[float]()
        files, index = self.directory.files, self.directory.index
        if index is not self._index:
            # The directory was opened or replaced.
            await self._directories.first_scan(self.directory)
            self._index, self._freshness = index, Freshness(_SETTLE_S)
        await self._ask(calls_s, files.capacity.refresh)
        if files.capacity.missing:
            # A missing directory is not made: a moved one may come back.
            await self._directories.replace(self.directory, files, may_make=False)
            if index is not self.directory.index:
                return []  # these calls were to the old directory, perhaps on a mount that hung
        times_ns = await self._ask(calls_s, directory_times_ns, files)
        for directory in self._freshness.stale(times_ns, loop.time()):
            began_s = loop.time()
            await self._list(files, index, directory, calls_s)
            if index is not self.directory.index:
                break
            self._freshness.listed(directory, began_s)
        return calls_s

    async def _list(self, files: ChunkFiles, index: CappedIndex, directory: int, calls_s: list[float]) -> None:
        """Update the index from a subdirectory, except for keys whose listing is obsolete."""
        is_obsolete, before = self.directory.looking(), index.group(directory)
        found = await self._ask(calls_s, files.scan, TOP_LEVELS[directory], before)
        if index is self.directory.index:
            await merge(index, found, before, is_obsolete)
            self._directories.io.listed(found.kept)

    async def _ask(self, calls_s: list[float], call: Callable[..., T], *arguments: object) -> T:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        answer = await self._directories.metadata.background.submit(call, *arguments)
        calls_s.append(loop.time() - began_s)
        return answer


def directory_times_ns(files: ChunkFiles) -> list[int]:
    """Return the modification time of each of the 256 subdirectories; 0 if missing. Blocks."""
    times_ns = []
    root = str(files.root)
    for top in TOP_LEVELS:
        try:
            times_ns.append(os.stat(f"{root}/{top}").st_mtime_ns)
        except ABSENT:
            times_ns.append(0)
    return times_ns


_PROBED = 1024
"""Keys per call in a thread."""


class ProbingLookup:
    """Contains what this instance stored or found. A probe looks up other keys in the directory."""

    def __init__(self, directories: Directories, refresh_s: float = 1.0) -> None:
        """`refresh_s`: the shortest time between two refreshes of a followed directory without a hint."""
        self.refreshers: dict[Directory, Refresher] = {}
        self._directories = directories
        self._refresh_s = refresh_s

    def begin(self) -> None:
        """Called once the directories are open."""

    def follow(self) -> None:
        """Keep the indexes fresh: list the chunks that other processes store and delete."""
        for directory in self._directories.all:
            if directory not in self.refreshers:
                refresher = Refresher(self._directories, directory, self._refresh_s)
                self.refreshers[directory] = refresher
                self._directories.begin(refresher.run(), f"refresh-{directory.files.root}")

    def missed(self, directory: Directory) -> None:
        """Note a read of a chunk that was in no index."""
        if directory in self.refreshers:
            self.refreshers[directory].hint()

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        """See `Tier.probe`."""
        directories = self._directories
        position = directories.prefix(keys)
        while position < len(keys):
            part = keys[position : position + _PROBED]
            await self._look_for(part, gaps=False)
            there = directories.prefix(part)
            position += there
            if there < len(part):
                break
        return position

    async def probe_each(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See `Tier.probe_each`."""
        unknown = [key for key in keys if not self._directories.contains(key)]
        for start in range(0, len(unknown), _PROBED):
            await self._look_for(unknown[start : start + _PROBED], gaps=True)
        return [self._directories.contains(key) for key in keys]

    async def _look_for(self, keys: Sequence[ChunkKey], *, gaps: bool) -> None:
        """Add existing chunks of `keys` to the index; without `gaps`, stop at the first missing one."""
        directories = self._directories
        unknown = [(directories.places(key), key) for key in keys]
        is_obsolete = {directory: directory.looking() for directory in directories.all}
        for key, directory, size_bytes in await directories.metadata.submit(_existing, unknown, gaps):
            if key not in directory.index and not is_obsolete[directory](key):
                directory.add(key, size_bytes)


class RelistingLookup(ProbingLookup):
    """Follows all directories and answers lookups from memory, for mounts with slow metadata calls."""

    def begin(self) -> None:
        self.follow()

    async def _look_for(self, keys: Sequence[ChunkKey], *, gaps: bool) -> None:
        """Refresh soon instead of asking the mount, which is asked until the first scan has ended."""
        first = {self._directories.places(key)[0] for key in (keys if gaps else keys[:1])}
        if not all(directory.scanned for directory in first):
            await super()._look_for(keys, gaps=gaps)
            return
        for directory in first:
            self.missed(directory)


def _existing(unknown: list[tuple[list[Directory], ChunkKey]], gaps: bool) -> list[tuple[ChunkKey, Directory, int]]:
    """Return the directories and sizes of existing chunks; without `gaps`, stop at the first missing one. Blocks."""
    found: list[tuple[ChunkKey, Directory, int]] = []
    for directories, key in unknown:
        for directory in directories:
            if occupied_bytes := directory.files.occupied_by(key):
                found.append((key, directory, occupied_bytes))
                break
        else:
            if not gaps:
                break
    return found
