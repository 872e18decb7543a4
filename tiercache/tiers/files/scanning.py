"""The state of one open directory, and the scan that fills its index while the tier serves.

`Directory` holds a `ChunkFiles` with its index and resolves the races between scans, lookups and deletions. `scan` lists the
directory in worker threads, merges the result into the index in short steps on the event loop, and corrects the capacity
counter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import xxhash

from tiercache.core.index import CappedIndex, pause_s
from tiercache.core.keys import ChunkKey
from tiercache.core.tombstones import Tombstones
from tiercache.memory.workers import Workers
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directory import TOP_LEVELS, Scanned, Victims

logger = logging.getLogger("tiercache.disk")

Items = TypeVar("Items", bound=Any)

_STEP = 1024
"""Chunks merged into the index per step, about a millisecond on the loop."""
_BREATH_S = 0.001
"""Sleep between two steps. A loop that never sleeps starves the threads, since it takes Python's lock back before they
wake.
"""
_LEAST_PAUSE_S = 1.0
_REFUSED_KEPT = 4096
_DOUBT_SHARE = 32
"""A counter is doubtful if it exceeds the known bytes by more than the cap divided by this."""


class Directory:
    """A directory, its index, and the operations in flight on them. Belongs to the event loop."""

    def __init__(self, files: ChunkFiles, index: CappedIndex) -> None:
        self.files = files
        self.index = index
        self.scanned = False
        """True if a scan has seen every file of the directory."""
        self.scanning: asyncio.Task[None] | None = None
        self.trimming = asyncio.Lock()
        self._changes = Tombstones()
        """Keys that changed lately or that a read found missing or bad, perhaps during lookups and listings."""
        self.refused: dict[ChunkKey, None] = {}
        """Chunks that a read found bad, which may stay in a read-only directory."""
        self._leaving: dict[ChunkKey, asyncio.Event] = {}
        """Evicted keys whose files may still exist, with the end of their deletion."""
        self.next_scan_s = 0.0
        self.explained_bytes = 0
        """Counted bytes that the last scan found outside the index: directories and others' writes."""
        self.replacing = asyncio.Lock()
        self.seed = xxhash.xxh3_64_intdigest(str(files.root).encode())

    def begin_anew(self, files: ChunkFiles, index: CappedIndex) -> None:
        """Use another directory with an empty index."""
        known, self.index = self.index, index
        self.scanned, self.explained_bytes = False, 0
        self.files = files
        index.on_change = known.on_change
        if index.on_change is not None:
            for key in known.keys:
                index.on_change(key)

    @property
    def is_doubtful(self) -> bool:
        """True if the counter exceeds the bytes that are known to exist."""
        unexplained_bytes = self.files.capacity.used_bytes - self.index.used_bytes - self.explained_bytes
        return unexplained_bytes > self.files.cap_bytes // _DOUBT_SHARE

    def looking(self) -> Callable[[ChunkKey], bool]:
        """Begin a lookup, a write or a listing, and return a function. It returns True if the result for a key is
        obsolete: the key has changed since this call, is being deleted, or was found missing or bad.
        """
        epoch = self._changes.epoch
        return lambda key: key in self._leaving or key in self.refused or self._changes.forgot(key, epoch)

    def add(self, key: ChunkKey, occupied_bytes: int) -> None:
        """Add a stored or found chunk."""
        self.index.add(key, occupied_bytes)
        self._changes.forget(key)

    def removed(self, key: ChunkKey) -> None:
        """Remove a chunk that was deleted, or that a read found missing or bad."""
        self.index.remove(key)
        self._changes.forget(key)

    def refuse(self, key: ChunkKey) -> None:
        """Remove a chunk that a read found bad, and do not add it before a read or a write of it has succeeded."""
        self.removed(key)
        self.refused[key] = None
        if len(self.refused) > _REFUSED_KEPT:
            del self.refused[next(iter(self.refused))]

    @contextmanager
    def leaving(self, victims: Victims) -> Iterator[None]:
        """Mark evicted chunks while their files are deleted: scans do not add them again, and a write of one waits, so that
        the deletion cannot hit the new file.
        """
        end = asyncio.Event()
        keys = [key for key, _ in victims]
        self._leaving.update(dict.fromkeys(keys, end))
        try:
            yield
        finally:
            end.set()
            for key in keys:
                if self._leaving.get(key) is end:
                    del self._leaving[key]
                self._changes.forget(key)

    async def until_deleted(self, key: ChunkKey) -> None:
        """Wait until the chunk is not being deleted."""
        while (end := self._leaving.get(key)) is not None:
            await end.wait()


async def scan(directory: Directory, workers: Workers, *, first: bool) -> Scanned | None:
    """Update the index from the files and correct the counter. Return None if the directory was replaced meanwhile.

    New chunks become the least recently used, ordered by file times. `first`: do not delay the next scan. Raises OSError,
    TierUnavailable.
    """
    files, index = directory.files, directory.index
    loop = asyncio.get_running_loop()
    calls_s: list[float] = []
    found, new = Scanned(), Scanned()
    indexed_bytes = 0
    try:
        began_s = loop.time()
        is_obsolete = directory.looking()
        mark, existing = await workers.submit(files.begin_scan)
        calls_s.append(loop.time() - began_s)
        for top in set(TOP_LEVELS).difference(existing):
            if known := index.group(int(top, 16)):
                await merge(index, Scanned(), known, is_obsolete)
        for start in range(0, len(existing), workers.threads):
            tops = existing[start : start + workers.threads]
            before = [index.group(int(top, 16)) for top in tops]
            began_s = loop.time()
            is_obsolete = directory.looking()
            parts = await asyncio.gather(*(workers.submit(files.scan, top) for top in tops))
            calls_s.append(loop.time() - began_s)
            for part, known in zip(parts, before, strict=True):
                indexed_bytes += sum(part.sizes)
                new.add(await merge(index, part, known, is_obsolete, cold=True))
                found.count(part)
        newest_first = await workers.submit(new.newest_first)
        if directory.files is not files:
            return None  # the replacement has its own scan
        await _age(index, new, newest_first)
        changed_bytes = await workers.submit(files.capacity.recount, mark, found.counted_bytes)
    finally:
        if not first:
            directory.next_scan_s = loop.time() + max(_LEAST_PAUSE_S, pause_s(calls_s))
    # Only bytes that were seen explain the counter: other processes will return the bytes that they have reserved.
    outside_bytes = min(found.counted_bytes - indexed_bytes, files.capacity.used_bytes - index.used_bytes)
    directory.explained_bytes = max(0, outside_bytes)
    found.strays += files.strays_removed
    files.strays_removed = 0
    logger.info("%s: %d chunks found (%d strays removed)", files.root, found.chunks, found.strays)
    if changed_bytes and not first:
        logger.info("%s: the capacity counter was corrected by %d bytes", files.root, changed_bytes)
    return found


async def merge(
    index: CappedIndex,
    found: Scanned,
    before: Collection[ChunkKey],
    is_excluded: Callable[[ChunkKey], bool],
    *,
    cold: bool = False,
) -> Scanned:
    """Update the index from the listing of a subdirectory. `before` are its keys that the index had before the listing.

    Return the chunks that were added. Excluded keys stay as they are. `cold` chunks are
    evicted first.
    """
    new = Scanned()

    def add(step: range) -> None:
        for position in step:
            key = found.keys[position]
            if key not in index and not is_excluded(key):
                index.add(key, found.sizes[position], cold=cold)
                new.keys.append(key)
                new.times_s.append(found.times_s[position])

    def drop(step: Sequence[ChunkKey]) -> None:
        for key in step:
            if not is_excluded(key):
                index.remove(key)

    await _in_steps(range(len(found.keys)), add)
    if before:
        await _in_steps(sorted(set(before).difference(found.keys, found.kept)), drop)
    return new


async def _age(index: CappedIndex, new: Scanned, newest_first: np.ndarray) -> None:
    """Order new chunks by their file times, except those that were used since they were found."""

    def age(step: np.ndarray) -> None:
        keys = [new.keys[position] for position in step.tolist()]
        index.age([key for key in keys if (index.keys.time(key) or 0) < 0])

    await _in_steps(newest_first, age)


async def _in_steps(items: Items, work: Callable[[Items], None]) -> None:
    """Apply `work` to slices of a sequence, with a short sleep in between.

    It runs on the loop, since a computing thread releases Python's lock only every 5 ms and would delay each call of a read.
    """
    for start in range(0, len(items), _STEP):
        if start:
            await asyncio.sleep(_BREATH_S)
        work(items[start : start + _STEP])
