"""A directory as a tier knows it, and how it comes to know it: looking at everything, in the background, while serving."""

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
from tiercache.tiers.files.directory import Scanned, Victims
from tiercache.tiers.files.volume import Volume

logger = logging.getLogger("tiercache.disk")

Items = TypeVar("Items", bound=Any)

_STEP = 1024
"""Chunks that are taken up at a time: a millisecond of the loop."""
_BREATH_S = 0.001
"""Between two steps. A loop that is never idle keeps Python's lock from all threads: whoever gives it away for an instant
has taken it back before they are awake, and they ask for it in vain for as long as that goes on."""
_LEAST_PAUSE_S = 1.0
_DOUBT_SHARE = 32
"""A counter is in doubt that is by more than one part in so many of the cap above what is known to be there."""


class Shelf:
    """A volume and what we know of it. Belongs to the event loop."""

    def __init__(self, volume: Volume, index: CappedIndex) -> None:
        self.volume = volume
        self.index = index
        self.on_other_volume: Callable[[], None] | None = None
        """Called when another directory, or mount, has taken the place of the one that was open."""
        self.scanned = False
        """Whether all that lies there is known."""
        self._found_more = asyncio.Event()
        self.scanning: asyncio.Task[None] | None = None
        self.catching_up: asyncio.Task[None] | None = None
        self.trimming: asyncio.Task[None] | None = None
        self.noted_while_scanning: set[ChunkKey] = set()
        """Read or written since the scan began: what it found out about them may be older."""
        self._looking_around: dict[int, set[ChunkKey]] = {}
        """For each who looks at many files now: what was deleted meanwhile, and may have been seen still."""
        self._leaving: dict[ChunkKey, Victims] = {}
        """Evicted, and perhaps not deleted yet: whoever looks may see them still."""
        self._looking: dict[ChunkKey, list[int]] = {}
        """Of chunks that are looked for now: how many look, and how often it was stored, found or deleted since the first
        began."""
        self.next_scan_s = 0.0
        self.explained_bytes = 0
        """Of the count, what the last scan found and is not in the index: directories, quarantine, and others' writes."""
        self.replacing = asyncio.Lock()
        self.seed = xxhash.xxh3_64_intdigest(str(volume.root).encode())

    def begin_anew(self, volume: Volume, index: CappedIndex) -> None:
        """Nothing of what was known is there any more."""
        known, self.index = self.index, index
        self.scanned, self.explained_bytes = False, 0
        self.take(volume)
        index.on_change = known.on_change
        if index.on_change is not None:
            for key in known.keys:
                index.on_change(key)

    def take(self, volume: Volume) -> Volume:
        """It is open in the place of the one that is returned."""
        taken, self.volume = self.volume, volume
        if self.on_other_volume is not None:
            self.on_other_volume()
        return taken

    @property
    def is_doubtful(self) -> bool:
        """Whether more is counted than there is known to be."""
        unexplained_bytes = self.volume.capacity.used_bytes - self.index.used_bytes - self.explained_bytes
        return unexplained_bytes > self.volume.cap_bytes // _DOUBT_SHARE

    def trimmed(self, task: asyncio.Task[None]) -> None:
        """Callback of `trimming`."""
        self.trimming = None

    def note(self, key: ChunkKey) -> None:
        if self.scanning is not None:
            self.noted_while_scanning.add(key)

    def look_for(self, key: ChunkKey) -> int:
        """Somebody looks whether it is there, until `looked`, which gets what this returns."""
        looking = self._looking.setdefault(key, [0, 0])
        looking[0] += 1
        return looking[1]

    def is_looked_for(self, key: ChunkKey) -> bool:
        return key in self._looking

    def looked(self, key: ChunkKey, since: int) -> bool:
        """Whether nobody has stored, found or deleted it since, nor is about to delete it: what was seen holds."""
        looking = self._looking[key]
        looking[0] -= 1
        if not looking[0]:
            del self._looking[key]
        return looking[1] == since and key not in self._leaving

    def add(self, key: ChunkKey, occupied_bytes: int) -> None:
        """It is there: who looks for it and found nothing, looked before."""
        self.index.add(key, occupied_bytes)
        self._changed(key)

    def removed(self, key: ChunkKey) -> None:
        """It is gone, whatever somebody has seen before."""
        self.index.remove(key)
        self._goes([key])
        self._changed(key)

    @contextmanager
    def looking_around(self) -> Iterator[set[ChunkKey]]:
        """Somebody looks at many files; the chunks that may have been seen although they are gone."""
        gone = self._all_leaving()
        self._looking_around[id(gone)] = gone
        try:
            yield gone
        finally:
            del self._looking_around[id(gone)]

    def begin_scan(self) -> None:
        self.noted_while_scanning = self._all_leaving()

    def scan_found(self, *, all_of_it: bool = False) -> None:
        """More of what lies there is known, or all of it: let those who wait for it look again."""
        if all_of_it:
            self.scanned, self.scanning = True, None
            self.noted_while_scanning.clear()
        self._found_more.set()
        self._found_more = asyncio.Event()

    async def knows(self, known_bytes: int, timeout_s: float) -> None:
        """Wait until the first scan has found so much, or has ended, but not for longer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.scanned and self.index.used_bytes < known_bytes:
                    await self._found_more.wait()

    @contextmanager
    def leaving(self, victims: Victims) -> Iterator[None]:
        """While chunks that were evicted from the index are deleted: they are not taken up again because they are seen, and
        a write of one waits, so that it is not its file that is deleted."""
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

    async def left(self, key: ChunkKey) -> None:
        """Wait until it is not being deleted."""
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
    with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
        loop.call_soon_threadsafe(end.set)


async def scan(shelf: Shelf, workers: Workers, ignored: Collection[ChunkKey], *, first: bool) -> Scanned | None:
    """Bring the index up to what lies there and correct the count; None when that could not be done (it was logged).

    `first`: nothing was known before, so the order is that of the files' times. Later the order is what use has made it, and
    what is new comes before all that, the oldest first.
    """
    volume, index = shelf.volume, shelf.index
    loop = asyncio.get_running_loop()
    calls_s: list[float] = []
    shelf.begin_scan()
    known = await _keys(index)
    found = Scanned()
    try:
        began_s = loop.time()
        mark, directories = await workers.submit(volume.begin_scan)
        calls_s.append(loop.time() - began_s)
        for start in range(0, len(directories), workers.threads):
            tops = directories[start : start + workers.threads]
            began_s = loop.time()
            parts = await asyncio.gather(*(workers.submit(volume.surveyor.scan, top) for top in tops))
            calls_s.append(loop.time() - began_s)
            for part in parts:
                if first:
                    await _add(shelf, index, part, np.arange(len(part.keys)), ignored)
                    shelf.scan_found()
                found.add(part)
        began_s = loop.time()
        found.counted_bytes += await workers.submit(volume.quarantined.occupied_bytes)
        calls_s.append(loop.time() - began_s)
        newest_first = await workers.submit(found.newest_first)
        new, gone, explained_bytes = await _compare(found, newest_first, known, ignored)
        if shelf.volume is not volume:
            return None  # it was replaced meanwhile, and is scanned anew
        if first:
            await _age(shelf, index, found, new)
        else:
            await _add(shelf, index, found, new, ignored)
        await _forget(shelf, index, gone)
        changed_bytes = await workers.submit(volume.recount, mark, found.counted_bytes)
    finally:
        if not first:
            shelf.next_scan_s = loop.time() + max(_LEAST_PAUSE_S, pause_s(calls_s))
    # No more than what was seen or announced: a count that others' writes leave uncertain stays in doubt, and is not taken
    # for right just because it might be.
    explained_bytes += mark.others_bytes
    shelf.explained_bytes = max(0, min(explained_bytes, volume.capacity.used_bytes - index.used_bytes))
    found.strays += volume.strays_removed
    volume.strays_removed = 0
    logger.info(
        "%s: %d chunks found (%d strays removed, %d foreign files left alone)",
        volume.root, len(found.keys), found.strays, found.foreign,
    )  # fmt: skip
    if changed_bytes and not first:
        logger.info("%s: the count was corrected by %d bytes", volume.root, changed_bytes)
    return found


async def _keys(index: CappedIndex) -> list[ChunkKey]:
    """Return the known keys. What comes or goes meanwhile may be among them or not."""
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
    """The positions of the chunks that were found and not known, the newest first, the keys that were known and not found,
    and the bytes of all that is not to be in the index."""
    keys, sizes = found.keys, found.sizes
    if not known and not ignored:  # as after most starts
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
    shelf: Shelf, index: CappedIndex, found: Scanned, positions: np.ndarray, ignored: Collection[ChunkKey]
) -> None:
    keys, sizes = found.keys, found.sizes

    def add(step: np.ndarray) -> None:
        noted = shelf.noted_while_scanning
        for position in step.tolist():
            key = keys[position]
            if key not in index and key not in ignored and key not in noted:
                index.add(key, sizes[position], cold=True)

    await _in_steps(positions, add)


async def _age(shelf: Shelf, index: CappedIndex, found: Scanned, positions: np.ndarray) -> None:
    keys = found.keys

    def age(step: np.ndarray) -> None:
        noted = shelf.noted_while_scanning
        index.age([key for position in step.tolist() if (key := keys[position]) not in noted])

    await _in_steps(positions, age)


async def _forget(shelf: Shelf, index: CappedIndex, keys: Sequence[ChunkKey]) -> None:
    def forget(step: Sequence[ChunkKey]) -> None:
        for key in step:
            if key not in shelf.noted_while_scanning:
                index.remove(key)

    await _in_steps(keys, forget)


async def _in_steps(items: Items, work: Callable[[Items], None]) -> None:
    """Do it for all of them, a sequence, in steps with a breath between two.

    Here, and not in a thread: one that computes gives Python's lock away every 5 ms only, and a read meanwhile waits so
    long for each of its calls.
    """
    for start in range(0, len(items), _STEP):
        if start:
            await asyncio.sleep(_BREATH_S)
        work(items[start : start + _STEP])
