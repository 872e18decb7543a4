"""The state of one open directory, and the scan that fills its index while the tier serves.

`Directory` holds a `ChunkFiles` with its index and resolves the races between scans, lookups and deletions. `scan` lists the
directory in worker threads, merges the result into the index in short steps on the event loop, and corrects the capacity
counter.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import xxhash

from tiercache.core.index import PARTS, CappedIndex, pause_s
from tiercache.core.keys import ChunkKey
from tiercache.memory.workers import Workers
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directory import Scanned, Victims

logger = logging.getLogger("tiercache.disk")

Items = TypeVar("Items", bound=Any)

_STEP = 1024
"""Chunks merged into the index per step, about a millisecond on the loop."""
_BREATH_S = 0.001
"""Sleep between two steps. A loop that never sleeps starves the threads, since it takes Python's lock back before they
wake."""
_LEAST_PAUSE_S = 1.0
_DOUBT_SHARE = 32
"""A counter is doubtful if it exceeds the known bytes by more than the cap divided by this."""


class Directory:
    """A directory, its index, and the operations in flight on them. Belongs to the event loop."""

    def __init__(self, files: ChunkFiles, index: CappedIndex) -> None:
        self.files = files
        self.index = index
        self.on_other_files: Callable[[], None] | None = None
        """Called when another directory or mount has replaced the open one."""
        self.scanned = False
        """True if a scan has seen every file of the directory."""
        self._found_more = asyncio.Event()
        self.scanning: asyncio.Task[None] | None = None
        self.catching_up: asyncio.Task[None] | None = None
        self.trimming: asyncio.Task[None] | None = None
        self.noted_while_scanning: set[ChunkKey] = set()
        """Keys that were read, written or deleted since the scan began; its result may be older."""
        self._looking_around: dict[int, set[ChunkKey]] = {}
        """For each running listing, the keys deleted since it began."""
        self._leaving: dict[ChunkKey, Victims] = {}
        """Evicted keys whose files may still exist."""
        self._looking: dict[ChunkKey, list[int]] = {}
        """For each key with running lookups: their number, and the number of its changes since the first began."""
        self.next_scan_s = 0.0
        self.explained_bytes = 0
        """Counted bytes that the last scan found outside the index: directories, quarantine and others' writes."""
        self.replacing = asyncio.Lock()
        self.seed = xxhash.xxh3_64_intdigest(str(files.root).encode())

    def begin_anew(self, files: ChunkFiles, index: CappedIndex) -> None:
        """Use another directory with an empty index."""
        known, self.index = self.index, index
        self.scanned, self.explained_bytes = False, 0
        self.take(files)
        index.on_change = known.on_change
        if index.on_change is not None:
            for key in known.keys:
                index.on_change(key)

    def take(self, files: ChunkFiles) -> ChunkFiles:
        """Use another directory. Return the one it replaces."""
        taken, self.files = self.files, files
        if self.on_other_files is not None:
            self.on_other_files()
        return taken

    @property
    def is_doubtful(self) -> bool:
        """True if the counter exceeds the bytes that are known to exist."""
        unexplained_bytes = self.files.capacity.used_bytes - self.index.used_bytes - self.explained_bytes
        return unexplained_bytes > self.files.cap_bytes // _DOUBT_SHARE

    def trimmed(self, task: asyncio.Task[None]) -> None:
        """Clear `trimming` when the task ends."""
        self.trimming = None

    def note(self, key: ChunkKey) -> None:
        if self.scanning is not None:
            self.noted_while_scanning.add(key)

    def look_for(self, key: ChunkKey) -> int:
        """Begin a lookup of a key. Pass the result to `looked`."""
        looking = self._looking.setdefault(key, [0, 0])
        looking[0] += 1
        return looking[1]

    def is_looked_for(self, key: ChunkKey) -> bool:
        return key in self._looking

    def looked(self, key: ChunkKey, since: int) -> bool:
        """End a lookup. Return True if its result still holds: no change of the key since, and no deletion in flight."""
        looking = self._looking[key]
        looking[0] -= 1
        if not looking[0]:
            del self._looking[key]
        return looking[1] == since and key not in self._leaving

    def add(self, key: ChunkKey, occupied_bytes: int) -> None:
        """Add a stored or found chunk. Invalidates running lookups of it."""
        self.index.add(key, occupied_bytes)
        self._changed(key)

    def removed(self, key: ChunkKey) -> None:
        """Remove a deleted chunk. Invalidates running lookups and listings of it."""
        self.index.remove(key)
        self._goes([key])
        self._changed(key)

    @contextmanager
    def looking_around(self) -> Iterator[set[ChunkKey]]:
        """Begin a listing of many files. Yields the set of keys whose deletion makes their listing obsolete."""
        gone = self._all_leaving()
        self._looking_around[id(gone)] = gone
        try:
            yield gone
        finally:
            del self._looking_around[id(gone)]

    def begin_scan(self) -> None:
        self.noted_while_scanning = self._all_leaving()

    def scan_found(self, *, all_of_it: bool = False) -> None:
        """Wake the waiters of `knows` after a part of a scan, or after its end (`all_of_it`)."""
        if all_of_it:
            self.scanned, self.scanning = True, None
            self.noted_while_scanning.clear()
        self._found_more.set()
        self._found_more = asyncio.Event()

    async def knows(self, known_bytes: int, timeout_s: float) -> None:
        """Wait until the first scan has found `known_bytes` or has ended, at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.scanned and self.index.used_bytes < known_bytes:
                    await self._found_more.wait()

    @contextmanager
    def leaving(self, victims: Victims) -> Iterator[None]:
        """Mark evicted chunks while their files are deleted: scans do not add them again, and a write of one waits, so that
        the deletion cannot hit the new file."""
        keys = [key for key, _ in victims]
        self._leaving.update(dict.fromkeys(keys, victims))
        self._goes(keys)
        try:
            yield
        finally:
            victims.deleted()
            for key in keys:
                if self._leaving.get(key) is victims:
                    self._has_left(key)

    async def until_deleted(self, key: ChunkKey) -> None:
        """Wait until the chunk is not being deleted."""
        while self._is_leaving(key):
            loop = asyncio.get_running_loop()
            end = asyncio.Event()
            self._leaving[key].when_deleted(lambda: _tell(loop, end))  # noqa: B023 - waited for right here
            await end.wait()

    def _is_leaving(self, key: ChunkKey) -> bool:
        victims = self._leaving.get(key)
        if victims is None or not victims.are_deleted:
            return victims is not None
        self._has_left(key)
        return False

    def _all_leaving(self) -> set[ChunkKey]:
        return {key for key, victims in self._leaving.items() if not victims.are_deleted}

    def _has_left(self, key: ChunkKey) -> None:
        del self._leaving[key]
        self._changed(key)

    def _goes(self, keys: Sequence[ChunkKey]) -> None:
        if self.scanning is not None:
            self.noted_while_scanning.update(keys)
        for gone in self._looking_around.values():
            gone.update(keys)

    def _changed(self, key: ChunkKey) -> None:
        looking = self._looking.get(key)
        if looking is not None:
            looking[1] += 1


def _tell(loop: asyncio.AbstractEventLoop, end: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(end.set)


async def scan(directory: Directory, workers: Workers, ignored: Collection[ChunkKey], *, first: bool) -> Scanned | None:
    """Update the index from the files and correct the counter. Return None if the directory was replaced meanwhile.

    `first`: order the index by file times. Later scans keep its order, and insert new chunks as the least recently used.
    Raises OSError, TierUnavailable.
    """
    files, index = directory.files, directory.index
    loop = asyncio.get_running_loop()
    calls_s: list[float] = []
    directory.begin_scan()
    known = await _keys(index)
    found = Scanned()
    try:
        began_s = loop.time()
        mark, directories = await workers.submit(files.begin_scan)
        calls_s.append(loop.time() - began_s)
        for start in range(0, len(directories), workers.threads):
            tops = directories[start : start + workers.threads]
            began_s = loop.time()
            parts = await asyncio.gather(*(workers.submit(files.scanner.scan, top) for top in tops))
            calls_s.append(loop.time() - began_s)
            for part in parts:
                if first:
                    await _add(directory, index, part, np.arange(len(part.keys)), ignored)
                    directory.scan_found()
                found.add(part)
        began_s = loop.time()
        found.counted_bytes += await workers.submit(files.quarantined.occupied_bytes)
        calls_s.append(loop.time() - began_s)
        newest_first = await workers.submit(found.newest_first)
        new, gone, explained_bytes = await _compare(found, newest_first, known, ignored)
        if directory.files is not files:
            return None  # the replacement has its own scan
        if first:
            await _age(directory, index, found, new)
        else:
            await _add(directory, index, found, new, ignored)
        await _forget(directory, index, gone)
        changed_bytes = await workers.submit(files.recount, mark, found.counted_bytes)
    finally:
        if not first:
            directory.next_scan_s = loop.time() + max(_LEAST_PAUSE_S, pause_s(calls_s))
    # Only bytes that were seen explain the counter: what other processes have reserved they give back later.
    directory.explained_bytes = max(0, min(explained_bytes, files.capacity.used_bytes - index.used_bytes))
    found.strays += files.strays_removed
    files.strays_removed = 0
    logger.info(
        "%s: %d chunks found (%d strays removed, %d foreign files left alone)",
        files.root, len(found.keys), found.strays, found.foreign,
    )  # fmt: skip
    if changed_bytes and not first:
        logger.info("%s: the capacity counter was corrected by %d bytes", files.root, changed_bytes)
    return found


async def _keys(index: CappedIndex) -> list[ChunkKey]:
    """Return the known keys. Concurrent changes may be missing."""
    keys: list[ChunkKey] = []
    paused_at = 0
    for first_byte in range(PARTS):
        keys += index.keys.part(first_byte)
        if len(keys) - paused_at > _STEP:
            paused_at = len(keys)
            await asyncio.sleep(0)
    return keys


async def _compare(
    found: Scanned, newest_first: np.ndarray, known: list[ChunkKey], ignored: Collection[ChunkKey]
) -> tuple[np.ndarray, list[ChunkKey], int]:
    """Return the positions of new chunks, newest first, the keys that have disappeared, and the bytes outside the index."""
    keys, sizes = found.keys, found.sizes
    if not known and not ignored:
        return newest_first, [], found.counted_bytes - int(np.asarray(sizes).sum())
    unseen: set[ChunkKey] = set()
    new, gone = array("q"), list[ChunkKey]()
    taken_up_bytes = 0

    def see(positions: np.ndarray) -> None:
        nonlocal taken_up_bytes
        for position in positions.tolist():
            key = keys[position]
            if key not in ignored:
                taken_up_bytes += sizes[position]
            if key in unseen:
                unseen.discard(key)
            else:
                new.append(position)

    def miss(step: Sequence[ChunkKey]) -> None:
        gone.extend(key for key in step if key in unseen)

    await _in_steps(known, unseen.update)
    await _in_steps(newest_first, see)
    await _in_steps(known if unseen else (), miss)
    return np.asarray(new), gone, found.counted_bytes - taken_up_bytes


async def _add(
    directory: Directory, index: CappedIndex, found: Scanned, positions: np.ndarray, ignored: Collection[ChunkKey]
) -> None:
    keys, sizes = found.keys, found.sizes

    def add(step: np.ndarray) -> None:
        noted = directory.noted_while_scanning
        for position in step.tolist():
            key = keys[position]
            if key not in index and key not in ignored and key not in noted:
                index.add(key, sizes[position], cold=True)

    await _in_steps(positions, add)


async def _age(directory: Directory, index: CappedIndex, found: Scanned, positions: np.ndarray) -> None:
    keys = found.keys

    def age(step: np.ndarray) -> None:
        noted = directory.noted_while_scanning
        index.age([key for position in step.tolist() if (key := keys[position]) not in noted])

    await _in_steps(positions, age)


async def _forget(directory: Directory, index: CappedIndex, keys: Sequence[ChunkKey]) -> None:
    def forget(step: Sequence[ChunkKey]) -> None:
        for key in step:
            if key not in directory.noted_while_scanning:
                index.remove(key)

    await _in_steps(keys, forget)


async def _in_steps(items: Items, work: Callable[[Items], None]) -> None:
    """Apply `work` to slices of a sequence, with a short sleep in between.

    It runs on the loop, since a computing thread releases Python's lock only every 5 ms and would delay each call of a read.
    """
    for start in range(0, len(items), _STEP):
        if start:
            await asyncio.sleep(_BREATH_S)
        work(items[start : start + _STEP])
