"""The disk tier: one file per chunk in one or several directories, under a physical cap.

This class is the asynchronous half: it decides (index, victims, when to rescan) and hands whole operations to worker
threads. `volume.py` is the half that blocks.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiofiles
import numpy as np
import xxhash

from tiercache.core.admission import REMEMBERED_KEYS, Governor, make_admission
from tiercache.core.eviction import make_order
from tiercache.core.header import file_bytes
from tiercache.core.index import CappedIndex
from tiercache.core.keys import ChunkKey
from tiercache.errors import ConfigError, CorruptChunk, TierFull, TierUnavailable
from tiercache.memory.workers import Workers, to_the_end
from tiercache.tiers.base import Tier, TierStatistics, Traits
from tiercache.tiers.space import default_cap
from tiercache.tiers.volume import TOP_LEVELS, NothingFreed, Scanned, Volume

logger = logging.getLogger("tiercache.disk")

Victims = list[tuple[ChunkKey, int]]

FORMAT = 1
MANIFEST = "tiercache.json"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_RESCAN_PAUSE_S = 30.0
_ATTEMPTS = 4
_AGING_STEP = 2048
_REFUSED_KEPT = 4096
_CLOSE_S = 5.0
_PROBED = 1024
"""Keys that are looked for in one hand-over."""


@dataclass(frozen=True)
class DiskSettings:
    directories: tuple[Path, ...]
    cap_bytes: int
    """Of all directories together; each gets an equal share. 0 takes nine tenths of what is free (or ours already) when the
    tier opens."""
    threads: int = 4
    """For reads; as many again for writes. 1: one chunk after the other, in the order in which they were asked for."""
    direct: bool | None = None
    """O_DIRECT: True, False, or None to use it where it works."""
    durable: bool = True
    """fdatasync each file before it gets its name. Its name follows with the file system's next commit (seconds): a power
    cut can lose the newest chunks but never show half of one. Without, all that was written lately may be lost, and what is
    torn is found by verification. Neither matters for kill -9."""
    policy: str = "LRU"
    admission: str = "all"
    """Which chunks are worth writing, see tiercache.core.admission."""
    bytes_per_day: float = 0.0
    """The most that is written a day; 0: no limit."""


class Shelf:
    """A volume and what we know of it."""

    def __init__(self, volume: Volume, index: CappedIndex) -> None:
        self.volume = volume
        self.index = index
        self.scanned = False
        self.used_while_scanning: set[ChunkKey] = set()
        self.next_scan_s = 0.0
        self.seed = xxhash.xxh3_64_intdigest(str(volume.root).encode())


class DiskTier(Tier):
    name = "disk"
    option = "local_disk"
    """The configuration key that names the directories, for messages."""

    def __init__(self, settings: DiskSettings, fingerprint: bytes) -> None:
        self.settings = settings
        self.fingerprint = fingerprint
        # Two more than there are threads: a thread that is done finds its next job waiting, without a round by the loop.
        places = settings.threads + 2 if settings.threads > 1 else 1
        self.traits = Traits(durable=True, shared=True, read_concurrency=places, write_concurrency=places)
        self._readers = Workers(f"{self.name}-read", settings.threads)
        self._writers = Workers(f"{self.name}-write", settings.threads)
        self._metadata = Workers(f"{self.name}-metadata", 1)
        self._shelves: list[Shelf] = []
        self._scans: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Future[None]] = set()
        """Volumes that are being closed."""
        self._refused: dict[ChunkKey, None] = {}
        self.admission = make_admission(settings.admission, REMEMBERED_KEYS)
        self.governor = Governor(settings.bytes_per_day)
        self._statistics = TierStatistics()
        self._closed = False

    async def open(self) -> None:
        try:
            if not self.settings.cap_bytes:
                self.settings = replace(self.settings, cap_bytes=await self._default_cap())
            share_bytes = self.settings.cap_bytes // len(self.settings.directories)
            for directory in self.settings.directories:
                volume = self._make_volume(directory, share_bytes)
                await self._open_volume(volume)
                self._shelves.append(Shelf(volume, self._make_index()))
        except BaseException:
            await self.close()
            raise
        for shelf in self._shelves:
            self._begin_scan(shelf)

    async def close(self) -> None:
        for scan in list(self._scans):
            scan.cancel()
        await asyncio.gather(*self._scans, return_exceptions=True)
        for shelf in [] if self._closed else self._shelves:
            self._close_volume(shelf.volume)
        self._closed = True
        closing = list(self._closing)
        for workers in (self._readers, self._writers, self._metadata):
            workers.close()
        if closing:
            await asyncio.wait(closing, timeout=_CLOSE_S)

    def describe(self) -> str:
        places = ", ".join(str(directory) for directory in self.settings.directories)
        return f"{self.name} ({places}, at most {self.settings.cap_bytes / 2**30:.2f} GB)"

    def contains(self, key: ChunkKey) -> bool:
        return any(key in shelf.index for shelf in self._shelves)

    def prefix(self, keys: Sequence[ChunkKey]) -> int:
        if len(self._shelves) == 1:
            return self._shelves[0].index.prefix(keys)
        return super().prefix(keys)

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        position = self.prefix(keys)
        while position < len(keys):
            part = keys[position : position + _PROBED]
            unknown = [(self._places(key), key) for key in part if key not in self._refused]
            found = await self._metadata.submit(_existing, unknown)
            for (_, key), (shelf, occupied_bytes) in zip(unknown, found, strict=False):
                if key not in shelf.index:
                    shelf.index.add(key, occupied_bytes)
            there = self.prefix(part)
            position += there
            if there < len(part):
                break
        return position

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        return await self._read(key, lambda volume: self._readers.submit(volume.read, key, into))

    async def _read(self, key: ChunkKey, read: Callable[[Volume], asyncio.Future[int | None]]) -> int | None:
        """`read` begins what does as `Volume.read`."""
        length = None
        for shelf in self._places(key):
            length = await self._read_from(shelf, key, read)
            if length is not None:
                break
        if length is None:
            self._statistics.read_misses += 1
            return None
        self._statistics.reads += 1
        self._statistics.read_bytes += length
        return length

    async def _read_from(
        self, shelf: Shelf, key: ChunkKey, read: Callable[[Volume], asyncio.Future[int | None]]
    ) -> int | None:
        try:
            length = await to_the_end(read(shelf.volume))
        except CorruptChunk as error:
            shelf.index.remove(key)
            self._refuse(key)
            self._statistics.corrupt += 1
            logger.warning("a chunk failed verification and was quarantined: %s", error)
            raise
        if length is None:
            shelf.index.remove(key)
            return None
        if key in shelf.index:
            shelf.index.touch(key)
        if not shelf.scanned:
            shelf.used_while_scanning.add(key)
        return length

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        return await self._write(
            key,
            payload_bytes,
            lambda volume, victims: self._writers.submit(volume.write, key, payload, payload_bytes, victims),
        )

    async def _write(
        self, key: ChunkKey, payload_bytes: int, write: Callable[[Volume, Victims], asyncio.Future[int]]
    ) -> bool:
        """`write` begins what does as `Volume.write`, perhaps several times."""
        shelf = self._shelf(key)
        if key in shelf.index:
            shelf.index.touch(key)
            return True
        self.admission.used(key)
        needed_bytes = file_bytes(payload_bytes)
        if needed_bytes > shelf.volume.cap_bytes:
            return False
        if not shelf.scanned and not shelf.volume.ledger.trusted:
            # Files without a count: the cap cannot be kept before they are counted.
            return False
        now_s = asyncio.get_running_loop().time()
        if not self.admission.admits(key) or not self.governor.allows(needed_bytes, now_s):
            return False
        try:
            occupied_bytes = await self._write_evicting(shelf, needed_bytes, write)
        except BaseException:
            self.governor.give_back(needed_bytes)
            self._statistics.write_failures += 1
            raise
        self._refused.pop(key, None)
        shelf.index.add(key, occupied_bytes)
        self._statistics.writes += 1
        self._statistics.written_bytes += payload_bytes
        return True

    def used(self, keys: Sequence[ChunkKey]) -> Sequence[ChunkKey]:
        # Also what was hot: a chunk that leaves the hot cache after a hundred uses should not have left here long before.
        for shelf in self._shelves:
            shelf.index.touch_prefix(keys)
        if self.settings.admission == "all":
            return ()
        wanted = []
        for key in keys:
            self.admission.used(key)
            if self.admission.admits(key) and not self.contains(key):
                wanted.append(key)
        return wanted

    def continued(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self.admission.continued(key)

    async def remove(self, key: ChunkKey) -> bool:
        shelf = self._shelf(key)
        occupied_bytes = shelf.index.remove(key)
        if occupied_bytes is None:
            # Perhaps somebody else's, of whom we do not know.
            found = await self._metadata.submit(shelf.volume.exists, [key])
            if not found:
                return False
            occupied_bytes = found[0]
        return await to_the_end(self._metadata.submit(shelf.volume.delete, key, occupied_bytes))

    def statistics(self) -> TierStatistics:
        counters = TierStatistics(**vars(self._statistics))
        counters.resident = sum(len(shelf.index) for shelf in self._shelves)
        counters.occupied_bytes = sum(shelf.volume.ledger.used_bytes for shelf in self._shelves)
        return counters

    async def scanned(self) -> None:
        """Wait until the index is complete (for tests and tools; the tier serves before that)."""
        await asyncio.gather(*self._scans)

    def path(self, key: ChunkKey) -> str:
        """The file that holds `key`, or would."""
        return self._shelf(key).volume.path(key)

    def _shelf(self, key: ChunkKey) -> Shelf:
        """Where a chunk is, or is to be."""
        return self._places(key)[0]

    def _places(self, key: ChunkKey) -> list[Shelf]:
        """Where a chunk is known to be, else where it may be, the likeliest first.

        Directories are ranked by rendezvous hashing (Thaler and Ravishankar): each gets an equal share, and one that is
        added takes its own from all alike. What lies elsewhere since before is still found.
        """
        if len(self._shelves) == 1:
            return self._shelves
        for shelf in self._shelves:
            if key in shelf.index:
                return [shelf]
        return sorted(self._shelves, key=lambda shelf: xxhash.xxh3_64_intdigest(key, shelf.seed), reverse=True)

    def _refuse(self, key: ChunkKey) -> None:
        """Remember a bad chunk that may still lie there (read-only directory), so that a probe does not find it again."""
        self._refused[key] = None
        if len(self._refused) > _REFUSED_KEPT:
            del self._refused[next(iter(self._refused))]

    def _make_volume(self, directory: Path, cap_bytes: int) -> Volume:
        settings = self.settings
        return Volume(directory, cap_bytes, self.fingerprint, direct=settings.direct, durable=settings.durable)

    def _make_index(self) -> CappedIndex:
        return CappedIndex(make_order(self.settings.policy))

    async def _default_cap(self) -> int:
        try:
            return await self._metadata.submit(default_cap, self.settings.directories)
        except OSError as error:
            raise ConfigError(f"{self.option}: {error.filename} cannot be used: {error}") from error

    def _close_volume(self, volume: Volume) -> None:
        """In the thread, after an `open` that may still be at work there: the mount may hang, and the loop must not."""
        try:
            closing = self._metadata.submit(volume.close)
        except RuntimeError:  # the tier was closed meanwhile
            threading.Thread(target=volume.close, name=f"tiercache-{self.name}-late", daemon=True).start()
            return
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _open_volume(self, volume: Volume) -> None:
        root = volume.root
        try:
            await self._metadata.submit(volume.open)
            manifest = root / MANIFEST
            if await asyncio.to_thread(manifest.exists):
                async with aiofiles.open(manifest) as file:
                    found = json.loads(await file.read()).get("format")
                if found != FORMAT:
                    raise ConfigError(
                        f"{self.option}: {root} has format {found!r}, this version writes {FORMAT}; use another directory"
                    )
            else:
                async with aiofiles.open(manifest, "w") as file:
                    await file.write(json.dumps({"format": FORMAT, "what": "tiercache chunks"}) + "\n")
        except (OSError, ValueError, AttributeError) as error:
            self._close_volume(volume)
            raise ConfigError(f"{self.option}: {root} cannot be used: {error}") from error
        except BaseException:
            self._close_volume(volume)
            raise

    async def _write_evicting(
        self, shelf: Shelf, needed_bytes: int, write: Callable[[Volume, Victims], asyncio.Future[int]]
    ) -> int:
        deficit_bytes = shelf.volume.ledger.used_bytes + needed_bytes - shelf.volume.cap_bytes
        attempt = 0
        while attempt < _ATTEMPTS:
            victims = await self._make_room(shelf, needed_bytes, deficit_bytes)
            volume, index = shelf.volume, shelf.index
            try:
                return await to_the_end(write(volume, victims))
            except TierFull as error:
                # Victims that somebody else had deleted were no attempt, and are out of the index now.
                attempt += not (victims and isinstance(error, NothingFreed))
                deficit_bytes = max(needed_bytes, volume.ledger.used_bytes + needed_bytes - volume.cap_bytes)
            except FileNotFoundError:
                await self._reopen(shelf)
                deficit_bytes = 0
                attempt += 1
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                # The device is fuller than our cap allows for: make room at our own expense, then say so.
                attempt += 1
                if await self._close_deleted():
                    deficit_bytes = 0
                    continue
                deficit_bytes = needed_bytes << attempt - 1
                if not index.used_bytes:
                    raise TierFull(f"{volume.root}: {error.strerror}, and nothing of ours is left to evict") from error
                deficit_bytes = min(deficit_bytes, index.used_bytes)
        raise TierFull(f"{shelf.volume.root}: no room after {_ATTEMPTS} attempts")

    async def _close_deleted(self) -> int:
        """The device is full: deleted files that we keep open take its space. Closes them; how many there were."""
        return 0  # this tier keeps none open

    async def _make_room(self, shelf: Shelf, needed_bytes: int, deficit_bytes: int) -> Victims:
        """What the writer of `needed_bytes` has to delete first, when `deficit_bytes` (if above zero) are lacking.

        Raises TierFull.
        """
        volume, index = shelf.volume, shelf.index
        if deficit_bytes > index.used_bytes:
            known_bytes = volume.ledger.used_bytes
            await self._metadata.submit(volume.ledger.refresh)
            deficit_bytes -= known_bytes - volume.ledger.used_bytes
        if deficit_bytes > index.used_bytes:
            self._rescan_soon(shelf)
            raise TierFull(
                f"{volume.root}: {volume.ledger.used_bytes} of {volume.cap_bytes} bytes are in use and only "
                f"{index.used_bytes} of them are known chunks"
            )
        victims = index.evict(deficit_bytes)
        self._statistics.evicted += len(victims)
        return victims

    async def _reopen(self, shelf: Shelf) -> None:
        """The directory was emptied or replaced under us: what we knew is gone, begin anew."""
        old = shelf.volume
        if not await self._metadata.submit(old.root.is_dir):
            raise TierUnavailable(f"{old.root} is not there any more")
        logger.warning("%s was emptied by somebody else; starting it anew", old.root)
        fresh = self._make_volume(old.root, old.cap_bytes)
        try:
            await self._open_volume(fresh)
        except ConfigError as error:
            raise TierUnavailable(str(error)) from error
        shelf.volume = fresh
        shelf.index = self._make_index()
        await self._metadata.submit(old.close)
        self._begin_scan(shelf)

    def _rescan_soon(self, shelf: Shelf) -> None:
        """Other processes fill the directory too: look again what is there, but not all the time."""
        now_s = asyncio.get_running_loop().time()
        if shelf.scanned and now_s >= shelf.next_scan_s:
            self._begin_scan(shelf)

    def _begin_scan(self, shelf: Shelf) -> None:
        first = not shelf.scanned and shelf.next_scan_s == 0.0
        shelf.next_scan_s = asyncio.get_running_loop().time() + _RESCAN_PAUSE_S
        scan = asyncio.create_task(self._scan(shelf, first), name=f"tiercache-scan-{shelf.volume.root}")
        self._scans.add(scan)
        scan.add_done_callback(self._scans.discard)

    async def _scan(self, shelf: Shelf, first: bool) -> None:
        """Rebuild the index while serving; then put the oldest first and, if we are alone, correct the ledger."""
        volume = shelf.volume
        found = Scanned()
        try:
            lanes = self._metadata.threads
            for start in range(0, len(TOP_LEVELS), lanes):
                tops = TOP_LEVELS[start : start + lanes]
                for part in await asyncio.gather(*(self._metadata.submit(volume.scan, top) for top in tops)):
                    for _, key, occupied_bytes in part.chunks:
                        if key not in shelf.index and key not in self._refused:
                            shelf.index.add(key, occupied_bytes, cold=True)
                    found.chunks += part.chunks
                    found.counted_bytes += part.counted_bytes
                    found.strays += part.strays
                    found.foreign += part.foreign
            found.counted_bytes += await self._metadata.submit(volume.scan_quarantine)
        except OSError as error:
            logger.warning("%s could not be scanned: %s", volume.root, error)
            shelf.scanned = True
            return
        found.chunks.sort(key=lambda chunk: chunk[0], reverse=True)
        by_age = [key for _, key, _ in found.chunks if key not in shelf.used_while_scanning]
        for start in range(0, len(by_age), _AGING_STEP):
            shelf.index.age(by_age[start : start + _AGING_STEP])
            await asyncio.sleep(0)
        if first:
            await self._metadata.submit(volume.correct_count, found.counted_bytes)
        self._statistics.strays += found.strays + volume.strays_removed
        volume.strays_removed = 0
        shelf.scanned = True
        shelf.used_while_scanning.clear()
        logger.info(
            "%s: %d chunks found (%d strays removed, %d foreign files left alone)",
            volume.root,
            len(found.chunks),
            found.strays,
            found.foreign,
        )


def _existing(unknown: list[tuple[list[Shelf], ChunkKey]]) -> list[tuple[Shelf, int]]:
    """Where chunks are and the bytes they occupy, up to the first that is nowhere. For a worker thread."""
    found: list[tuple[Shelf, int]] = []
    for shelves, key in unknown:
        for shelf in shelves:
            if occupied := shelf.volume.exists([key]):
                found.append((shelf, occupied[0]))
                break
        else:
            break
    return found
