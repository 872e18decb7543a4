"""The Weka tier: one directory on a mount that many instances share, as WekaFS and other parallel file systems offer it.

The disk tier's files and rules, for a mount where a round trip is dear and others add and remove chunks all the time:
look-ups are answered from memory, which a background task keeps fresh; the count is charged in large steps; one instance at
a time evicts; a chunk costs one write and one rename, and nothing else is written for it, ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiercache.core.eviction import make_order
from tiercache.core.index import CappedIndex
from tiercache.core.keys import ChunkKey
from tiercache.core.sharing import SharedIndex
from tiercache.device.device import Device
from tiercache.errors import TierFull
from tiercache.memory.workers import Workers
from tiercache.tiers.access import ACCESS
from tiercache.tiers.base import TierStatistics
from tiercache.tiers.device_files import DeviceFiles
from tiercache.tiers.evictor import Evictor, EvictorSettings
from tiercache.tiers.gds import GdsSettings, GdsTier
from tiercache.tiers.listing import Refresher
from tiercache.tiers.scanning import Shelf
from tiercache.tiers.volume import Victims, Volume

logger = logging.getLogger("tiercache.weka")

_LARGEST_ALLOWANCE_BYTES = 1 << 30
_SMALLEST_SHARE = 64
_METADATA_THREADS = 8


@dataclass(frozen=True)
class WekaSettings(GdsSettings):
    threads: int = 16
    direct: bool | None = True
    allowance_bytes: int | None = None
    """What this instance may have charged to the cap and not used yet; None: a 64th of the cap, at most 1 GiB."""
    refresh_s: float = 1.0
    """How often the index learns what other instances did, where the mount is quick enough."""
    eviction: EvictorSettings = field(default_factory=EvictorSettings)
    room_wait_s: float = 5.0
    """How long a write waits for the elected instance to make room."""


class _Shared:
    """What a shelf has more when others use its directory too."""

    def __init__(self, shelf: Shelf, tier: WekaTier) -> None:
        self.evictor = Evictor(
            shelf, tier._deleters, tier.settings.eviction, tier._forget, lambda: tier._scan_soon(shelf)
        )
        self.refresher = Refresher(
            shelf, tier._watchers, tier.settings.refresh_s, tier._refused, tier._forget, lambda: tier._look(shelf)
        )


class WekaTier(GdsTier):
    name = "weka"
    option = "weka_path"

    def __init__(
        self,
        settings: WekaSettings,
        fingerprint: bytes,
        device: Device | None = None,
        files: DeviceFiles | None = None,
    ) -> None:
        super().__init__(settings, fingerprint, device, files)
        self.settings: WekaSettings = settings
        self._metadata = Workers(f"{self.name}-metadata", _METADATA_THREADS)
        self._watchers = Workers(f"{self.name}-refresh", len(settings.directories))
        self._deleters = Workers(f"{self.name}-evict", _METADATA_THREADS)
        self._shared: dict[Shelf, _Shared] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        await super().open()
        for shelf in self._shelves:
            shared = self._shared[shelf] = _Shared(shelf, self)
            self._begin(self._keep_fresh(shelf, shared.refresher), f"tiercache-refresh-{shelf.volume.root}")
            self._begin(shared.evictor.run(), f"tiercache-evict-{shelf.volume.root}")

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watchers.close()
        self._deleters.close()
        await super().close()

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        """From memory. Until the first scan has ended, memory does not know enough, and the mount is asked."""
        position = self.prefix(keys)
        if position < len(keys):
            shelf = self._shelf(keys[position])
            if not shelf.scanned:
                return await super().probe(keys)
            self._shared[shelf].refresher.hint()
        return position

    def statistics(self) -> TierStatistics:
        counters = super().statistics()
        counters.evicted += sum(shared.evictor.evicted for shared in self._shared.values())
        return counters

    async def refreshed(self) -> None:
        """Wait until the index has what other instances did before this call (for tests and tools)."""
        await self.scanned()
        await asyncio.gather(*(shared.refresher.refreshed() for shared in self._shared.values()))

    async def _read(self, key: ChunkKey, read: Callable[[Volume], asyncio.Future[int | None]]) -> int | None:
        unknown = not self.contains(key)
        length = await super()._read(key, read)
        if unknown:
            self._shared[self._shelf(key)].refresher.hint()
        return length

    async def _make_room(self, shelf: Shelf, needed_bytes: int, deficit_bytes: int) -> Victims:
        """Nothing is deleted here: whoever is elected makes room, and this waits for it."""
        volume, evictor = shelf.volume, self._shared[shelf].evictor
        if deficit_bytes <= 0 or volume.ledger.missing:  # who writes finds out what became of the directory
            evictor.glance()
            return Victims()
        goal_bytes = volume.cap_bytes - needed_bytes
        if volume.ledger.used_bytes <= goal_bytes:
            # Not the cap was in the way but the device.
            goal_bytes = max(0, volume.ledger.used_bytes - deficit_bytes)
        if not await evictor.room(goal_bytes, self.settings.room_wait_s):
            raise TierFull(
                f"{volume.root}: {volume.ledger.used_bytes} of {volume.cap_bytes} bytes are in use, and for "
                f"{self.settings.room_wait_s:.1f} s no instance made room"
            )
        return Victims()

    def _make_volume(self, directory: Path, cap_bytes: int) -> Volume:
        settings, allowance_bytes = self.settings, self.settings.allowance_bytes
        if allowance_bytes is None:
            allowance_bytes = min(_LARGEST_ALLOWANCE_BYTES, cap_bytes // _SMALLEST_SHARE)
        volume = Volume(
            directory,
            cap_bytes,
            self.fingerprint,
            direct=settings.direct,
            durable=settings.durable,
            allowance_bytes=allowance_bytes,
            access=ACCESS[settings.file_access],
        )
        volume.on_delete = self._forget_file
        return volume

    def _make_index(self) -> CappedIndex:
        return SharedIndex(make_order(self.settings.policy))

    def _forget(self, keys: list[ChunkKey]) -> None:
        """Chunks are being deleted, or were, by us or by others: a file that is open still takes its space."""
        if self.files is not None:
            self._metadata.submit(_close_files, self.files, [self.path(key) for key in keys])

    async def _keep_fresh(self, shelf: Shelf, refresher: Refresher) -> None:
        while not shelf.scanned and self._scans:
            await asyncio.wait(self._scans)
        await refresher.run()

    def _look(self, shelf: Shelf) -> None:
        """Now and then, where the count is known as it is."""
        self._shared[shelf].evictor.glance()
        if shelf.volume.ledger.missing and not shelf.replacing.locked():
            # Also where nothing is written: what others count in is another count.
            # A directory that was moved away may come back, and who only looks does not need another one.
            replacing = self._replace(shelf, shelf.volume, may_make=False)
            self._begin(replacing, f"tiercache-replace-{shelf.volume.root}")

    async def _trim(self, shelf: Shelf) -> None:
        """The elected instance does that; it may have waited for the count to be right."""
        if (shared := self._shared.get(shelf)) is not None:
            shared.evictor.look_again()

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(_complain)
        task.add_done_callback(self._tasks.discard)
        self._tasks.add(task)


def _close_files(files: DeviceFiles, paths: list[str]) -> None:
    for path in paths:
        files.forget(path)


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s ended, which nobody foresaw", task.get_name(), exc_info=error)
