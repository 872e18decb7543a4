"""The GDS tier: the disk tier's files, cap, eviction, restart and sharing, with chunks moved to and from device memory.

How they move is found out once, at the start: through cuFile where GPUDirect Storage works on this file system, through
pinned host memory where it does not, and without a GPU the tier serves host memory only.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from tiercache.core.keys import ChunkKey
from tiercache.device.device import Device
from tiercache.device.driver import DeviceError, Span
from tiercache.errors import ConfigError, CorruptChunk
from tiercache.memory.workers import to_the_end
from tiercache.tiers.base import DeviceTier
from tiercache.tiers.cufile import CuFileFiles
from tiercache.tiers.device_files import BounceFiles, DeviceFiles
from tiercache.tiers.disk import DiskSettings, DiskTier
from tiercache.tiers.gds_probe import probe_gds
from tiercache.tiers.volume import Victims, Volume

logger = logging.getLogger("tiercache.gds")

_TIDY_S = 5.0


@dataclass(frozen=True)
class GdsSettings(DiskSettings):
    """`cap_bytes` 0 takes nine tenths of what is free (or ours already) when the tier opens."""

    way: str = "auto"
    """auto: cuFile where it works. cufile: cuFile or ConfigError. posix: our own reads and writes through pinned memory."""
    chunk_bytes: int = 0
    """The largest payload. Needed with a device."""


class GdsTier(DiskTier, DeviceTier):
    name = "gds"
    option = "gds_path"

    def __init__(
        self,
        settings: GdsSettings,
        fingerprint: bytes,
        device: Device | None = None,
        files: DeviceFiles | None = None,
    ) -> None:
        """`files` skips the search for the best way."""
        super().__init__(settings, fingerprint)
        self.settings: GdsSettings = settings
        self.device = device
        self.files: DeviceFiles | None = None
        self._given_files = files
        self._tidying: asyncio.TimerHandle | None = None

    @property
    def serves_device(self) -> bool:
        return self.files is not None

    async def open(self) -> None:
        await super().open()
        try:
            await self._open_files()
        except BaseException:
            await self.close()
            raise
        self._tidy_later()

    async def close(self) -> None:
        if self._tidying is not None:
            self._tidying.cancel()
        files, self.files = self.files, None
        if files is not None:
            self._close_in_thread(files.close)
        await super().close()

    def describe(self) -> str:
        way = self.files.name if self.files is not None else "host memory only"
        return f"{super().describe()[:-1]}, {way})"

    async def read_device(self, key: ChunkKey, into: Span) -> int | None:
        files = self._files()

        def read(volume: Volume) -> int | None:
            try:
                return volume.read_by(
                    key, lambda path: files.read(path, key, self.fingerprint, into, direct=volume.direct)
                )
            except (CorruptChunk, OSError):
                files.forget(volume.path(key))
                raise

        return await self._read(key, lambda volume: self._readers.submit(read, volume))

    async def write_device(self, key: ChunkKey, payload: Span, payload_bytes: int) -> bool:
        files = self._files()

        def write(volume: Volume, victims: Victims) -> int:
            return volume.write_by(
                key,
                payload_bytes,
                victims,
                lambda path: files.write(
                    path, key, self.fingerprint, payload, payload_bytes, direct=volume.direct, durable=volume.durable
                ),
            )

        return await self._write(
            key, payload_bytes, lambda volume, victims: self._writers.submit(write, volume, victims)
        )

    def _make_volume(self, directory: Path, cap_bytes: int) -> Volume:
        volume = super()._make_volume(directory, cap_bytes)
        volume.on_delete = self._forget_file
        return volume

    def _forget_file(self, path: str) -> None:
        """In the thread that deleted it: closing a file may take its time."""
        if (files := self.files) is not None:
            files.forget(path)

    def _tidy_later(self) -> None:
        """Now and then also where nothing is written, as in an instance that only reads a shared directory."""
        if self.files is not None:
            self._tidying = asyncio.get_running_loop().call_later(_TIDY_S, self._tidy)

    def _tidy(self) -> None:
        if self.files is not None:
            self._metadata.submit(self.files.tidy)
            self._tidy_later()

    def _files(self) -> DeviceFiles:
        if self.files is None:
            raise DeviceError(f"{self.name}: there is no device; only host memory is served")
        return self.files

    async def _open_files(self) -> None:
        if self._given_files is not None:
            await self._take(self._given_files)
            return
        if self.device is None:
            logger.warning("%s: no GPU is in use here: chunks go through host memory, like the disk tier's", self.option)
            return
        driver, pool = self.device.driver, self.device.pool
        chunk_bytes, threads = self.settings.chunk_bytes, 2 * self.settings.threads
        reason = ""
        if self.settings.way != "posix":
            reason = await probe_gds(self.settings.directories, driver)
            if not reason:
                try:
                    await self._take(CuFileFiles(driver, pool.memory, chunk_bytes, threads))
                    return
                except (DeviceError, OSError, ImportError, RuntimeError) as error:
                    reason = str(error)
            if self.settings.way == "cufile":
                raise ConfigError(
                    f"{self.option}: GPUDirect Storage does not work with {self._where()}: {reason}. Set use_gds: false to "
                    "go through pinned host memory instead"
                )
            logger.warning("%s: no GPUDirect Storage (%s): going through pinned host memory", self.option, reason)
        await self._take(BounceFiles(driver, chunk_bytes, threads))

    async def _take(self, files: DeviceFiles) -> None:
        """Open them, and use them from now on. What they have taken when that fails or is cancelled goes again."""
        try:
            await to_the_end(self._metadata.submit(files.open))
        except BaseException:
            self._close_in_thread(files.close)
            raise
        self.files = files

    def _where(self) -> str:
        return ", ".join(map(str, self.settings.directories))
