"""What tiers on files owe to those who use them, asked when all faults are over."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator, Sequence

from tests.torture.simulation.inodes import File
from tests.torture.simulation.node import Node
from tests.torture.simulation.oracle import Violation
from tests.torture.simulation.places import Place, is_good
from tests.torture.simulation.plan import FILE_BYTES
from tiercache.cache import TierCache
from tiercache.errors import TierUnavailable
from tiercache.tiers.files.index import RelistingLookup
from tiercache.tiers.files.scanning import Directory
from tiercache.tiers.files.tier import FileTier
from tiercache.tiers.hf3fs.tier import RingIO
from tiercache.tiers.shared_memory import MappingIO

_SCANNED_S = 5.0
_TRIMMED_S = 1.0
"""The time after the first scan by which a cap that was lowered is kept."""
_ATTEMPTS, _ATTEMPTS_BESIDE_OPEN_FILES = 2, 8
"""Puts of chunks of which none is stored: the first may count as the first touch only. An evicted file frees no space
while another process has it open, which closes it before the next put."""
_RECOUNTED_S = 30.0
"""How long a process may keep all from writing for the sake of a recount, and a scan."""
_SWEPT_S = 6.0
"""How long an instance may keep a file mapped that another one has removed."""
_PREFETCHED_S = 2.0
_LISTED_S = 120.0
_NOTICED_S = 10.0
"""How long a 3FS tier may take to notice that its daemon died, and to make new rings."""
_LOWEST_FILL, _LOWEST_SHARED_FILL = 31 / 32, 0.85
_PUTS_IN_QUIET = 12
"""A full directory may count a 32nd of the cap more than there is, and a shared one what its instances have reserved and do
not use."""


def file_tiers(cache: TierCache) -> Iterator[tuple[str, FileTier]]:
    """Those whose places are looked at, by the names of their configuration."""
    for tier in cache.tiers:
        if isinstance(tier, FileTier):
            yield tier.name, tier


def is_followed(tier: FileTier) -> bool:
    """Return True if the index follows what lies in the directories."""
    return isinstance(tier.lookup, RelistingLookup)


def directories(cache: TierCache) -> list[Directory]:
    return [directory for _, tier in file_tiers(cache) for directory in tier.directories.all]


def place_of(directory: Directory, places: Sequence[Place]) -> Place:
    return next(place for place in places if place.disk.owns(str(directory.files.root)))


async def scans_end(node: Node) -> None:
    """A write may have begun one a moment ago."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + _SCANNED_S
    while scanning := [directory.files.root for directory in directories(node.cache) if directory.scanning is not None]:
        if loop.time() > until_s:
            raise Violation(f"a scan that does not end: {scanning}")
        await asyncio.sleep(0.01)


def check_directories(node: Node, places: Sequence[Place], *, faultless: bool, alone: bool) -> None:
    """Of an open cache in which nothing is under way."""
    for directory in directories(node.cache):
        capacity, place = directory.files.capacity, place_of(directory, places)
        found = place.look()
        writing = capacity._in_flight_bytes
        pending = found.pending.get(directory.files._owner.name, 0)
        if writing > pending:
            raise Violation(f"{place.disk.root}: {writing} bytes are reserved for files, of which {pending} are there")
        if capacity._deleting_bytes:
            raise Violation(f"{place.disk.root}: {capacity._deleting_bytes} bytes are still about to be deleted")
        tier = next(tier for _, tier in file_tiers(node.cache) if directory in tier.directories.all)
        known = set(directory.index.keys)
        if (faultless and alone) or is_followed(tier):
            there = found.chunks.keys() - directory.refused.keys()
            if known - directory.refused.keys() != there:
                raise Violation(
                    f"{place.disk.root}: not there, but in the index: {known - there}; not in it: {there - known}"
                )
        if faultless and alone:
            place.check_count(capacity._unused_bytes)


async def check_promises(node: Node, others: Sequence[Node], places: Sequence[Place], key: int) -> None:
    """What one process stores is found by all; what it forgets is found by none, and can be stored by another."""
    await store(node, [key], places)
    for reader in (node, *others):
        await reader.on_loop(lambda reader=reader: _rings_serve(reader, key))  # type: ignore[misc]
        await reader.on_loop(lambda reader=reader: _read(reader, key, there=True))  # type: ignore[misc]
    await node.on_loop(lambda: _forget(node, key))
    left = [place.disk.root for place in places if node.keys[key] in place.look().chunks]
    if left:
        raise Violation(f"key {key} was removed, and lies in {left}")
    for other in others:
        await other.on_loop(lambda other=other: _listed(other))  # type: ignore[misc]
    await _swept(node)
    for reader in (node, *others):
        await reader.on_loop(lambda reader=reader: _read(reader, key, there=False))  # type: ignore[misc]
    await store((*others, node)[0], [key], places)


async def store(node: Node, keys: Sequence[int], places: Sequence[Place]) -> None:
    """Put keys that nobody has, one after the other, and see that the last of them is written."""

    def lies(key: int) -> list[bool]:
        return [_lies(node, tier, key, places) for _, tier in file_tiers(node.cache)]

    async def work() -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _RECOUNTED_S
        attempts = attempts_left = _ATTEMPTS_BESIDE_OPEN_FILES if _keeps_files_open(node) else _ATTEMPTS
        left = keys
        while attempts_left:
            for key in left:
                await node.cache.put(node.keys[key], node.truth.payload(key))
                report = await node.cache.flush(10.0)
                if not report.complete:
                    raise Violation(f"all is well, and key {key} is not written in 10 s: {report}")
                node.cache.clear_hot()
            missing = [name for (name, _), there in zip(file_tiers(node.cache), lies(keys[-1]), strict=True) if not there]
            if not missing:
                return
            await _swept(node)
            if loop.time() < until_s and not all(one.files.capacity.trusted for one in directories(node.cache)):
                await asyncio.sleep(0.5)
                continue
            stored = max((at for at, key in enumerate(left, 1) if all(lies(key))), default=0)
            left, attempts_left = left[stored:], attempts if stored else attempts_left - 1
        raise Violation(f"all is well, and key {keys[-1]} is not written to {missing}: {node.cache.statistics()}")

    await node.on_loop(work)


def _lies(node: Node, tier: FileTier, key: int, places: Sequence[Place]) -> bool:
    return any(node.keys[key] in place_of(directory, places).look().chunks for directory in tier.directories.all)


async def _swept(node: Node) -> None:
    """Wait until no process has a file open that another process deleted before this call."""
    if _keeps_files_open(node):
        gc.collect()  # the error of a copy keeps its frames, and these a mapped file; the simulation collects nothing
        await asyncio.sleep(_SWEPT_S)


async def _listed(node: Node) -> None:
    """Wait until the index contains all that happened before. The pause after a listing is ten times as long as that."""
    for name, tier in file_tiers(node.cache):
        try:
            async with asyncio.timeout(_LISTED_S):
                for refresher in tier.lookup.refreshers.values():
                    wanted = refresher.begun + 1
                    refresher.hint()
                    while refresher.ended < wanted:
                        await asyncio.sleep(0.01)
        except TimeoutError:
            raise Violation(f"{name} did not list its directory within {_LISTED_S:.0f} s") from None


def _keeps_files_open(node: Node) -> bool:
    backends = [tier.directories.io for _, tier in file_tiers(node.cache)]
    return any(isinstance(io, MappingIO) for io in backends)


async def _rings_serve(node: Node, key: int) -> None:
    """Wait until a 3FS tier reads a chunk that is there. That the daemon of idle rings died is noticed by the next transfer
    only, which fails."""
    until_s = asyncio.get_running_loop().time() + _NOTICED_S
    has_rings = any(isinstance(tier.directories.io, RingIO) for _, tier in file_tiers(node.cache))
    while has_rings and asyncio.get_running_loop().time() < until_s:
        node.cache.clear_hot()
        async with node.cache.get(node.keys[key]) as lease:
            if lease is not None:
                return
        await asyncio.sleep(1.0)


async def _read(node: Node, key: int, *, there: bool) -> None:
    node.cache.clear_hot()
    async with node.cache.get(node.keys[key]) as lease:
        if (lease is not None) != there:
            raise Violation(f"key {key}: expected {'a hit' if there else 'a miss'} in every process")
        if lease is not None:
            node.truth.check(key, lease.view, node.truth.floor[key])
    node.cache.clear_hot()


async def _forget(node: Node, key: int) -> None:
    node.truth.forget_begins(key)
    generation = node.truth.newest[key]
    try:
        await node.cache.forget([node.keys[key]], deadline_s=10.0)
    except TierUnavailable as error:
        raise Violation(f"all is well, and key {key} is not removed: {error}") from error
    node.truth.forget_ended(key, generation)


async def check_fills(node: Node, places: Sequence[Place], keys: Sequence[int]) -> None:
    """What is counted and not there comes back: all of the cap can be used, or all of the device."""
    await store(node, keys, places)
    # Looked at anew in a quiet moment: beside writes, what they are about stays uncertain, and so does the counter while
    # another process is active. A put that finds room looks at nothing.
    scans_s = [directory.next_scan_s for directory in directories(node.cache)]
    await asyncio.sleep(max(0.0, max(scans_s) - asyncio.get_running_loop().time()))
    for number, key in enumerate(keys[:_PUTS_IN_QUIET]):
        if number >= 3 and not any(directory.is_doubtful for directory in directories(node.cache)):
            break
        await store(node, [key], places)
        await asyncio.sleep(2.0)
    # A key that found no room, since a deleted file was still mapped, is offered again, for as long as that stores more. No
    # more than there is room for: to make some on a full device, one put may evict many.
    while _not_full(node, places):
        before_bytes = sum(place.look().occupied_bytes for place in places)
        for key in keys:
            await store(node, [key], places)
            if not _not_full(node, places):
                break
        if sum(place.look().occupied_bytes for place in places) <= before_bytes:
            break
    for place in _not_full(node, places):
        found = place.look()
        raise Violation(
            f"{place.disk.root}: {place.cap_bytes} bytes may be used, and no more than {found.occupied_bytes} are: "
            f"{found.counted_bytes} are counted"
        )


def _not_full(node: Node, places: Sequence[Place]) -> list[Place]:
    found = []
    for _, tier in file_tiers(node.cache):
        lowest = _LOWEST_SHARED_FILL if is_followed(tier) else _LOWEST_FILL
        for directory in tier.directories.all:
            place = place_of(directory, places)
            has_room = place.disk.free_blocks * 4096 >= 3 * FILE_BYTES
            if has_room and place.look().occupied_bytes < place.cap_bytes * lowest - 3 * FILE_BYTES:
                found.append(place)
    return found


async def check_reopened(
    node: Node, places: Sequence[Place], truth_keys: dict[bytes, int], spoilt: set[tuple[str, int]]
) -> None:
    """A cache that was opened anew knows all that lies there, and it alone; good chunks are read and bad ones are put aside.
    `spoilt`: files that cannot be read, as `Weather.spoilt`."""
    loop = asyncio.get_running_loop()
    await scans_end(node)
    await asyncio.sleep(_TRIMMED_S)
    for place in places:
        place.is_certain, place.kept_from_s = True, 0.0
        place.check(loop.time())
    check_directories(node, places, faultless=True, alone=True)
    first: int | None = None
    for name, tier in file_tiers(node.cache):
        for directory in tier.directories.all:
            place = place_of(directory, places)
            for raw, file in sorted(place.look().chunks.items()):
                key = truth_keys[raw]
                good = (place.disk.root, file.number) not in spoilt and is_good(raw, file)
                if len(tier.directories.all) == 1 and node.cache.tiers[0].name == name:
                    await _read(node, key, there=True) if good else await _read_bad(node, key, place, file)
                    if good and first is None:
                        first = key
                        await _prefetch(node, key)
    check_directories(node, places, faultless=False, alone=True)


async def _prefetch(node: Node, key: int) -> None:
    """Nothing hinders a hint for one chunk that was just read from its tier: soon it is at hand."""
    if not node.cache.ahead.promotes:
        return
    node.cache.clear_hot()
    handle = node.cache.prefetch([node.keys[key]], deadline=0.0, ttl=_PREFETCHED_S)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PREFETCHED_S / 2):
            await handle
    if not node.cache.parts.reader.has_at_hand(node.keys[key]):
        raise Violation(f"key {key}: nothing hinders a prefetch, and the chunk is not at hand: {handle.progress}")


async def _read_bad(node: Node, key: int, place: Place, file: File) -> None:
    """Another tier may have it, and then the first one may get it anew."""
    node.cache.clear_hot()
    async with node.cache.get(node.keys[key]) as lease:
        if lease is not None:
            node.truth.check(key, lease.view, node.truth.floor[key])
            if len(node.cache.tiers) == 1:
                raise Violation(f"key {key} was read from a file that is damaged")
    if place.look().chunks.get(node.keys[key]) is file:
        raise Violation(f"key {key}: a damaged file stays where it was found")
