"""Replay requests one after another, through the cache and through the simulator, and compare the sources of the
chunks.

A request looks up its chunks, gets the hot chunks in one batch and the others one by one, and puts the missing chunks
one by one. Nothing runs concurrently: if reads overlapped, the machine's speed would decide when room is made and which
chunks are leased at that moment, and eviction would vary from run to run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from tiercache.cache import TierCache
from tiercache.core.keys import ChunkKey
from tiercache.errors import TierCacheError
from tiercache.replay.formats import Request
from tiercache.replay.real.contents import Contents
from tiercache.replay.real.place import DISK, disk_of
from tiercache.replay.setting import Setting
from tiercache.replay.simulator import Simulator


class ReplayFailed(TierCacheError):
    """The cache failed: a chunk had wrong contents, or could not be stored."""


@dataclass
class Counts:
    """Counts in blocks."""

    ram_blocks: int = 0
    """Blocks hit in RAM, within the contiguous prefix."""
    flash_blocks: int = 0
    """Blocks read from flash, within the contiguous prefix."""
    inserted_blocks: int = 0
    """Blocks inserted into RAM."""
    flash_written_blocks: int = 0

    def since(self, before: Counts) -> Counts:
        """Return the counts since `before`."""
        return Counts(*(now - then for now, then in zip(asdict(self).values(), asdict(before).values(), strict=True)))


@dataclass
class Serial:
    """Results of the serial part, measured and simulated."""

    requests: int
    blocks: int
    measured: Counts
    simulated: Counts
    differs: str = ""
    """The first difference between the two; empty if there is none."""


class OneByOne(Simulator):
    """A simulator that gets the chunks of a request in the same steps as `play`."""

    def _arrive(self, request: Request) -> None:
        keys, now_s = request.keys, request.time_s
        hot = self.ram.prefix(keys)
        found = self._found(keys, hot)
        self._note_uses(request, found)
        self._deliver(keys, 0, hot)
        loaded, place = 0, hot
        while place < found and (keys[place] in self.ram or (self.flash is not None and keys[place] in self.flash)):
            loaded += keys[place] not in self.ram
            self._deliver([keys[place]], 0, 1)
            self.ram.link(keys[max(0, place - 1) : place + 1])
            place += 1
        for position in range(place, len(keys)):
            self._put(keys[position : position + 1], 0)
            self.ram.link(keys[max(0, position - 1) : position + 1])
        self.ram.link(keys)
        self._count(request, place, loaded, now_s, now_s)


async def play_serial(
    cache: TierCache, contents: Contents, requests: Iterable[Request], setting: Setting, block_tokens: int
) -> Serial:
    """Replay `requests` through the cache and the simulator, and compare them.

    Raises ReplayFailed for wrong contents, and for a chunk that could not be stored.
    """
    simulator = OneByOne(setting, block_tokens)
    found = Serial(0, 0, Counts(), Counts())
    for request in requests:
        before = found.measured, found.simulated
        simulator.run([request])
        await play(cache, contents, request)
        found.requests += 1
        found.blocks += len(request.keys)
        found.measured, found.simulated = counted(cache), simulated(simulator)
        measured, expected = found.measured.since(before[0]), found.simulated.since(before[1])
        if measured != expected and not found.differs:
            found.differs = f"request {found.requests}: measured {measured}, simulated {expected}"
    return found


async def play(cache: TierCache, contents: Contents, request: Request) -> None:
    """Run one request to its end. A cancelled request leaves only the chunks that it has already stored."""
    keys = request.keys
    found = (await cache.lookup_keys(keys)).chunks
    note_session(cache, keys, found)
    hot = cache.lookup_hot(keys[:found])
    delivered = await cache.get_to(keys[:hot], [contents.sink(key) for key in keys[:hot]])
    await _flushed(cache)
    while delivered < found and await cache.get_to([keys[delivered]], [contents.sink(keys[delivered])]):
        cache.cpu.link(keys[max(0, delivered - 1) : delivered + 1])
        delivered += 1
        await _flushed(cache)
    previous = keys[:delivered][-1:]
    for key in keys[delivered:]:
        if not await cache.put_from([(key, contents.chunk_bytes, contents.source(key))]):
            raise ReplayFailed("a chunk could not be put: no room came free in the hot cache")
        cache.cpu.link([*previous, key])
        previous = [key]
        await _flushed(cache)
    cache.cpu.link(keys)
    check(contents)


def note_session(cache: TierCache, keys: list[ChunkKey], found: int) -> None:
    """Record for `live_session` admission that the session continues, as the simulator does."""
    disk = disk_of(cache)
    if disk is not None and disk.admission.policy == "live_session" and found > 1:
        for key in keys:
            disk.admission.continued(key)


def check(contents: Contents) -> None:
    """Raise ReplayFailed if wrong contents were delivered."""
    if contents.wrong:
        raise ReplayFailed(f"wrong KV was delivered for {len(contents.wrong)} chunks, first {contents.wrong[0].hex()}")


def counted(cache: TierCache) -> Counts:
    """Return the counts since the cache was opened."""
    known = cache.statistics()
    disk = known.tiers.get(DISK)
    hits = known.reader.hits
    return Counts(hits["cpu"], hits.get(DISK, 0), known.tiers["cpu"].writes, disk.writes if disk is not None else 0)


def simulated(simulator: Simulator) -> Counts:
    figures = simulator.figures
    return Counts(
        figures.ram_blocks, figures.flash_blocks, figures.inserted_blocks, figures.flash_written_blocks
    )


async def _flushed(cache: TierCache) -> None:
    if not (await cache.flush()).complete:
        raise ReplayFailed("the disk tier did not write what it was given within a minute")
