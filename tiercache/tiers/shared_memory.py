"""The shared memory tier: chunk files in a directory on tmpfs, which all engines of a host map and read where they lie.

The disk tier's files and rules, so its counts, locks and recovery. But a get copies nothing: it maps a file, verifies it
once, and hands out leases on the pages that all processes have together.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
from collections.abc import Callable, Container, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercache.core.budget import PREFETCH, READ, Purpose
from tiercache.core.header import file_bytes
from tiercache.core.keys import ChunkKey
from tiercache.errors import ConfigError, TierCacheError
from tiercache.tiers.base import MappedTier, Tier, TierStatistics
from tiercache.tiers.files.mapped_file import MappedFile, map_chunk_file
from tiercache.tiers.files.mounts import mount_of
from tiercache.tiers.files.scanning import Shelf
from tiercache.tiers.files.settings import FileSettings
from tiercache.tiers.files.shelves import Shelves
from tiercache.tiers.files.threads import ThreadMover
from tiercache.tiers.files.tier import FileTier
from tiercache.tiers.files.volume import Volume
from tiercache.tiers.leases import Lease
from tiercache.tiers.mapping_ahead import MappingAhead
from tiercache.tiers.mappings import Mappings

logger = logging.getLogger("tiercache.shared_memory")

MEMORY_KINDS = ("tmpfs",)
"""Not hugetlbfs, which has no write(2); not ramfs, whose size nobody bounds."""
_LOOP_S = 1.0
"""How long a thread waits for the loop."""
_AHEAD_PART = 4
"""Of the cap, so much at most is mapped that nobody here has used: what others evict takes memory until all have let go."""


@dataclass(frozen=True)
class SharedMemorySettings(FileSettings):
    direct: bool | None = False
    durable: bool = False
    """Nothing survives the power anyway."""
    beside: bool = False
    """The kernel tells all engines what happens in the directories of chunks: half-made files are no news."""


class MappingMover(ThreadMover):
    """Writes as plain files; reads by mapping them. What is deleted while it is mapped takes its memory until it is not."""

    def __init__(self, shelves: Shelves, mappings: Mappings) -> None:
        super().__init__(shelves)
        self._mappings = mappings
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def keeps_files_open(self) -> bool:
        return True

    async def prepare(self) -> None:
        self._loop = asyncio.get_running_loop()
        settings = self._shelves.settings
        await self._shelves.metadata.submit(require_memory, settings.directories[0], settings.cap_bytes)

    def map(self, volume: Volume, key: ChunkKey, mapped: list[MappedFile]) -> asyncio.Future[int | None]:
        """As `read`, with the mapping of the file in `mapped`."""
        return self._precedence.read(self._readers.submit(self._map, volume, key, mapped))

    def map_ahead(self, volume: Volume, key: ChunkKey, mapped: list[MappedFile]) -> asyncio.Future[int | None]:
        """As `map`, of a chunk that nobody waits for: while others are being mapped it is not begun, but for a moment."""
        return self._precedence.prefetch(
            key, lambda pause: self._prefetchers.submit(self._map, volume, key, mapped, pause)
        )

    def _map(
        self, volume: Volume, key: ChunkKey, mapped: list[MappedFile], pause: Callable[[], None] | None = None
    ) -> int | None:
        def by(path: str) -> int:
            file = map_chunk_file(path, key, self._shelves.fingerprint, volume.access)
            mapped.append(file)
            return file.payload_bytes

        if pause is not None:
            pause()
        return volume.read_by(key, by)

    def forget(self, path: str) -> None:
        """Unmap the chunk unless its file is still there, and was merely looked for."""
        key = bytes.fromhex(os.path.basename(path))
        file = self._mappings.file(key)
        if file is None or not file.is_at(path):
            self._on_loop(self._gone, path, key, file)

    def _gone(self, path: str, key: ChunkKey, seen: MappedFile | None) -> None:
        """`seen` is what was mapped when the file at `path` was not found."""
        if self._mappings.file(key) in (None, seen):
            self._mappings.gone(key)
        else:  # it was mapped since, maybe from a file that is there
            self._shelves.metadata.later(self.forget, path)

    def close_deleted(self) -> int:
        """Unmap what others have deleted and nobody holds."""
        gone = []
        for key, file in self._mappings.files():
            if not file.is_at(self._shelves.path(key)):
                gone.append(key)
        if not gone:
            return 0
        taken: concurrent.futures.Future[list[MappedFile]] = concurrent.futures.Future()
        self._on_loop(lambda: taken.set_result(self._mappings.take_gone(gone)))
        try:
            files = taken.result(_LOOP_S)
        except TimeoutError:  # it is busy, or over; they go all the same
            return 0
        return len(files)

    def _on_loop(self, call: Callable[..., object], *arguments: object) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(call, *arguments)


class SharedMemoryTier(FileTier, MappedTier):
    def __init__(self, settings: SharedMemorySettings, fingerprint: bytes) -> None:
        self.mappings = Mappings(settings.cap_bytes, most_mappings(), self._unmap)
        self.mappings.on_gone = self._changed
        self._mover: MappingMover
        super().__init__("shared_memory", "shared_memory_path", settings, fingerprint, self._make_mover)
        self._listener: Callable[[ChunkKey], None] | None = None
        self._ahead = MappingAhead(self._map_ahead)

    def _make_mover(self, shelves: Shelves) -> MappingMover:
        self._mover = MappingMover(shelves, self.mappings)
        return self._mover

    async def open(self) -> None:
        self.mappings.open()
        await super().open()
        self.mappings.most_bytes = self.settings.cap_bytes
        self.mappings.most_ahead_bytes = self.settings.cap_bytes // _AHEAD_PART
        for shelf in self.shelves.all:
            shelf.index.on_change = self._changed
            # Also where nobody is told of it: memory of a chunk that another process evicts is to go with it.
            self.shelves.knowledge.follow_deletions(shelf, self._stored)
        self.shelves.begin(self._ahead.follow(), "map-ahead")

    async def close(self) -> None:
        self.mappings.close()
        await super().close()

    def contains(self, key: ChunkKey) -> bool:
        return super().contains(key) or key in self.mappings

    def offered(self) -> Sequence[Container[ChunkKey]]:
        return [*super().offered(), self.mappings] if self.traffic.refuses_none else super().offered()

    def prefix(self, keys: Sequence[ChunkKey]) -> int:
        return Tier.prefix(self, keys)  # asks `contains`, which also knows what is mapped

    def tell(self, on_change: Callable[[ChunkKey], None]) -> None:
        self._listener = on_change

    def lease(self, key: ChunkKey, *, counted: bool = False) -> Lease | None:
        lease = self.mappings.find(key, READ)
        if lease is not None:
            self._statistics.reads += 1
            self._statistics.read_bytes += lease.payload_bytes
            if not counted:
                self.shelves.all[0].index.touch(key)
        return lease

    def pin(self, key: ChunkKey) -> Lease | None:
        return self.mappings.find(key, PREFETCH)

    async def map(self, key: ChunkKey, purpose: Purpose) -> Lease | None:
        mapped: list[MappedFile] = []
        return await self._keep(
            key, mapped, self._read(key, lambda volume: self._mover.map(volume, key, mapped)), purpose
        )

    def _stored(self, key: ChunkKey) -> None:
        """What this process writes itself it has in memory, as a rule. Not what it reads or knows already."""
        shelf = self.shelves.all[0]
        if self.maps_ahead and key not in shelf.index and not shelf.is_looked_for(key):
            self._ahead.stored(key)

    async def _map_ahead(self, key: ChunkKey) -> None:
        shelf = self.shelves.all[0]
        if key in self.mappings or shelf.is_looked_for(key) or self.traffic.refuses(key):
            return
        mapped: list[MappedFile] = []
        read = self._read_from(shelf, key, lambda volume: self._mover.map_ahead(volume, key, mapped))
        self.traffic.begin(key)
        try:
            lease = await self._keep(key, mapped, read, PREFETCH, is_ahead=True)
        except (TierCacheError, OSError) as error:  # who asks for it will hear of it
            logger.debug("a chunk could not be mapped ahead: %s", error)
        else:
            if lease is not None:
                lease.release()
        finally:
            self.traffic.end(key)

    async def _keep(
        self,
        key: ChunkKey,
        mapped: list[MappedFile],
        read: Coroutine[Any, Any, int | None],
        purpose: Purpose,
        *,
        is_ahead: bool = False,
    ) -> Lease | None:
        """A lease on what `read` has put into `mapped`, and others find it from now on unless it went meanwhile."""
        mappings, shelf = self.mappings, self.shelves.all[0]
        operation = mappings.tombstones.begin()
        in_doubt = mappings.deletions.begin()
        try:
            length = await read
            if length is None:
                return None
            (file,), is_there = mapped, True
            while is_there and in_doubt.forgot(key):
                # The news may be of an earlier file, or of none: directories that are not watched yet are looked through.
                mappings.deletions.end(in_doubt)
                in_doubt = mappings.deletions.begin()
                is_there = await self.shelves.metadata.submit(file.is_at, self.path(key))
            findable = is_there and not operation.forgot(key)
            if findable and key not in shelf.index:
                # What is mapped is known, so that one hears of its deletion.
                shelf.add(key, file_bytes(length))
                self._look_again(shelf, key, file)
            return mappings.add(key, file, purpose, findable=findable, is_ahead=is_ahead)
        finally:
            mappings.tombstones.end(operation)
            mappings.deletions.end(in_doubt)

    def _look_again(self, shelf: Shelf, key: ChunkKey, file: MappedFile) -> None:
        """Where it was deleted before it was known here, nobody will say so."""
        work = self.shelves.metadata.submit(file.is_at, self.path(key))
        began = shelf.look_for(key)

        def seen(work: asyncio.Future[bool]) -> None:
            if shelf.looked(key, began) and not work.cancelled() and work.exception() is None and not work.result():
                shelf.index.remove(key)

        work.add_done_callback(seen)

    async def remove(self, key: ChunkKey) -> bool:
        self.mappings.forget(key)
        return await super().remove(key)

    def statistics(self) -> TierStatistics:
        counters = super().statistics()
        counters.mapped_bytes = self.mappings.mapped_bytes
        counters.unlinked_bytes = self.mappings.unlinked_bytes
        return counters

    def _changed(self, key: ChunkKey) -> None:
        """A key has come to the index or gone from it, or is not mapped any more."""
        if key in self.mappings and not super().contains(key):
            self.mappings.gone(key)
        if self._listener is not None:
            self._listener(key)

    def _unmap(self, files: list[MappedFile]) -> None:
        self.shelves.metadata.later(files.clear)


def most_mappings(limit: Path = Path("/proc/sys/vm/max_map_count")) -> int:
    """Half of what a process may have."""
    try:
        return int(limit.read_text()) // 2
    except (OSError, ValueError):
        return 65530 // 2


def require_memory(directory: Path, cap_bytes: int) -> None:
    """Raises ConfigError unless that is a directory in memory, with room for so much. Blocks."""
    mount = mount_of(directory)
    if mount.kind not in MEMORY_KINDS:
        raise ConfigError(
            f"shared_memory_path: {directory} lies on {mount.kind}, which is no memory (tmpfs); name a directory below "
            "/dev/shm, or use local_disk for this one"
        )
    space = os.statvfs(mount.point)
    size_bytes = space.f_blocks * space.f_frsize
    if 0 < size_bytes < cap_bytes:
        raise ConfigError(
            f"max_shared_memory_size: {mount.point} has {size_bytes / 2**30:.2f} GB in all, less than the "
            f"{cap_bytes / 2**30:.2f} GB that are asked for; lower it, or enlarge that (mount -o remount,size=..., or "
            "--shm-size of a container)"
        )
