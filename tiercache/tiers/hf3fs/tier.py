"""The 3FS tier: the disk tier's files and rules on a 3FS mount, with payloads moved by rings instead of FUSE.

Metadata (open, rename, unlink, stat, the ledger) goes through the mount, in worker threads. A chunk's header and payload go
through a ring, all pieces of many chunks at once; threads only verify and, where the arena is not registered itself, copy.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tiercache.core.header import (
    HEADER_BYTES,
    PACKED_BYTES,
    Header,
    aligned,
    file_bytes,
    payload_checksum,
)
from tiercache.core.keys import ChunkKey
from tiercache.errors import ConfigError, CorruptChunk, TierUnavailable
from tiercache.memory.arena import Arena
from tiercache.tiers.base import Traits
from tiercache.tiers.chunk_file import verify_chunk
from tiercache.tiers.disk import DiskSettings, DiskTier, Victims
from tiercache.tiers.hf3fs.engine import RingEngine, RingSettings, StillInUse
from tiercache.tiers.hf3fs.files import RegisteredFile, RegisteredFiles
from tiercache.tiers.hf3fs.library import load_library
from tiercache.tiers.hf3fs.segments import Buffers, Piece, Segment, arena_segment, transfer_bytes
from tiercache.tiers.volume import Unborn, Volume

logger = logging.getLogger("tiercache.hf3fs")

_IN_FLIGHT = 32
_HEADERS_BYTES = 2 << 20


@dataclass(frozen=True)
class Hf3fsSettings(DiskSettings):
    """`cap_bytes` of all base paths together."""

    mount: Path | None = None
    """None: the mount that the directories lie on."""
    iov_bytes: int = 200 << 20
    chunk_bytes: int = 0
    """The largest payload."""
    rings: RingSettings = field(default_factory=RingSettings)


class Hf3fsTier(DiskTier):
    name = "hf3fs"
    option = "hf3fs_base_path"

    def __init__(self, settings: Hf3fsSettings, fingerprint: bytes, *, name: str = "hf3fs") -> None:
        super().__init__(settings, fingerprint)
        self.name = name
        self.settings: Hf3fsSettings = settings
        self._arena: Arena | None = None
        self.engine: RingEngine | None = None
        self.files: RegisteredFiles

    def use_arena(self, arena: Arena) -> None:
        """Before `open`: payloads lie in this arena. Where it is shared memory, rings move them with no copy."""
        self._arena = arena

    async def open(self) -> None:
        library = load_library()
        mount = await self._metadata.submit(self._find_mount, library)
        arena = arena_segment(self._arena) if self._arena is not None else None
        self.files = RegisteredFiles(library)
        place_bytes = HEADER_BYTES if arena is not None else transfer_bytes(self.settings.chunk_bytes)
        size_bytes = _HEADERS_BYTES if arena is not None else self.settings.iov_bytes

        def make_buffers() -> Buffers:
            return Buffers(size_bytes, place_bytes, "headers" if arena is not None else "chunks")

        engine = RingEngine(library, mount, self.settings.rings, make_buffers, arena)
        try:
            await engine.open()
        except OSError as error:
            raise ConfigError(f"{self.option}: 3FS at {mount} refuses rings: {error}") from error
        self.engine = engine
        places = max(1, min(_IN_FLIGHT, engine.buffers.count // 2))
        self.traits = Traits(durable=True, shared=True, read_concurrency=places, write_concurrency=places)
        await super().open()

    async def close(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            await engine.close()
            self._metadata.submit(self.files.close)
        await super().close()

    def describe(self) -> str:
        copies = "no copy" if self.engine is not None and self.engine.arena is not None else "one copy"
        return f"{super().describe()[:-1]}, rings, {copies})"

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        return await self._read(key, lambda volume: asyncio.ensure_future(self._ring_read(volume, key, into)))

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        return await self._write(
            key,
            payload_bytes,
            lambda volume, victims: asyncio.ensure_future(
                self._ring_write(volume, key, payload, payload_bytes, victims)
            ),
        )

    async def remove(self, key: ChunkKey) -> bool:
        if self.engine is not None:
            await self._metadata.submit(self.files.forget, self.path(key))
        return await super().remove(key)

    def _find_mount(self, library: object) -> Path:
        if self.settings.mount is not None:
            return self.settings.mount
        found = set()
        for directory in self.settings.directories:
            place = directory
            while not place.exists():
                place = place.parent
            mount = library.extract_mount_point(str(place))  # type: ignore[attr-defined]
            if mount is None:
                raise ConfigError(f"{self.option}: {directory} does not lie on a 3FS mount (type fuse.hf3fs)")
            found.add(mount)
        if len(found) > 1:
            raise ConfigError(f"{self.option}: expected one 3FS mount, found {', '.join(sorted(found))}")
        return Path(found.pop())

    def _engine(self) -> RingEngine:
        if self.engine is None:
            raise TierUnavailable(f"{self.name} is closed")
        return self.engine

    # Reading

    async def _ring_read(self, volume: Volume, key: ChunkKey, into: np.ndarray) -> int | None:
        path = volume.path(key)
        try:
            file = await self._readers.submit(self.files.open_to_read, path)
        except FileNotFoundError:
            if not await self._metadata.submit(volume.root.is_dir):
                raise
            return None
        try:
            return await self._transfer_in(volume, key, path, file, into)
        except (OSError, CorruptChunk) as error:
            await self._metadata.submit(self.files.forget, path)
            if isinstance(error, CorruptChunk):
                await self._metadata.submit(volume.quarantine, key)
                # Anew: the first one's frames hold views of the rings' memory, and whoever keeps it would keep that.
                raise CorruptChunk(str(error)) from None
            raise
        finally:
            self._readers.submit(self.files.release, file)

    async def _transfer_in(
        self, volume: Volume, key: ChunkKey, path: str, file: RegisteredFile, into: np.ndarray
    ) -> int:
        engine = self._engine()
        length = file.length_bytes
        room = HEADER_BYTES + into.nbytes
        if not file_bytes(1) <= length <= room:
            raise CorruptChunk(f"{path}: length: expected {file_bytes(1)} to {room} bytes, found {length}")
        buffers = engine.buffers
        place = buffers.take()
        payload_bytes = length - HEADER_BYTES
        direct = _inside(engine.arena, into, payload_bytes)
        pieces = _pieces(buffers, place, direct, payload_bytes)
        try:
            moved = await engine.transfer(file.descriptor, pieces, read=True)
        except StillInUse:
            if direct is not None:
                # The daemon may yet write into the arena: the slot stays with this read until it cannot any more.
                await engine.gone.wait()
            raise
        except BaseException:
            buffers.give_back(place)
            raise

        def verify() -> int:
            view = buffers.view(place)
            if not view.nbytes:
                raise TierUnavailable("the rings were closed meanwhile")
            payload = into
            if direct is None:
                payload = view[HEADER_BYTES : HEADER_BYTES + payload_bytes]
            found = verify_chunk(
                path, view[:PACKED_BYTES].data, key, self.fingerprint, payload, sum(moved), length
            )
            if direct is None:
                np.copyto(into[:found], payload[:found])
            return found

        try:
            return await self._readers.submit(verify)
        finally:
            buffers.give_back(place)

    # Writing

    async def _ring_write(
        self, volume: Volume, key: ChunkKey, payload: np.ndarray, payload_bytes: int, victims: Victims
    ) -> int:
        engine = self._engine()
        for victim, _ in victims:
            self._metadata.submit(self.files.forget, volume.path(victim))
        buffers = engine.buffers
        place = buffers.take()
        padded = payload[: aligned(payload_bytes)]
        direct = _inside(engine.arena, padded, padded.nbytes)

        def begin() -> tuple[Unborn, RegisteredFile]:
            unborn = volume.begin_write(key, payload_bytes, victims)
            try:
                view = buffers.view(place)
                checksum = payload_checksum(padded[:payload_bytes])
                packed = Header(key, self.fingerprint, payload_bytes, checksum).pack()
                view[:PACKED_BYTES] = np.frombuffer(packed, dtype=np.uint8)
                view[PACKED_BYTES:HEADER_BYTES] = 0
                if direct is None:
                    np.copyto(view[HEADER_BYTES : HEADER_BYTES + padded.nbytes], padded)
                return unborn, self.files.create(unborn.path)
            except BaseException:
                volume.abandon_write(unborn)
                raise

        try:
            unborn, file = await self._writers.submit(begin)
            try:
                moved = await engine.transfer(
                    file.descriptor, _pieces(buffers, place, direct, padded.nbytes), read=False
                )
                if sum(moved) != file_bytes(payload_bytes):
                    raise OSError(errno.EIO, f"short write: {sum(moved)} of {file_bytes(payload_bytes)} bytes", unborn.path)
            except BaseException:
                await self._writers.submit(self._abandon, volume, unborn, file)
                raise
            return await self._writers.submit(self._finish, volume, unborn, file)
        finally:
            buffers.give_back(place)

    def _finish(self, volume: Volume, unborn: Unborn, file: RegisteredFile) -> int:
        try:
            if self.settings.durable:
                os.fsync(file.descriptor)
            occupied_bytes = os.fstat(file.descriptor).st_blocks * 512
        except BaseException:
            self._abandon(volume, unborn, file)
            raise
        self.files.release(file)
        return volume.finish_write(unborn, occupied_bytes or unborn.charged_bytes)

    def _abandon(self, volume: Volume, unborn: Unborn, file: RegisteredFile) -> None:
        self.files.release(file)
        volume.abandon_write(unborn)


def _inside(arena: Segment | None, memory: np.ndarray, length_bytes: int) -> Piece | None:
    """Where `memory` lies in the registered arena; None where it does not."""
    if arena is None:
        return None
    start = memory.ctypes.data - arena.memory.ctypes.data
    if not 0 <= start <= arena.memory.nbytes - length_bytes:
        return None
    return arena, start, length_bytes


def _pieces(buffers: Buffers, place: int, direct: Piece | None, payload_bytes: int) -> list[tuple[Piece, int]]:
    """A chunk file as pieces of shared memory, with their offsets in the file."""
    if direct is None:
        return [(buffers.piece(place, 0, HEADER_BYTES + payload_bytes), 0)]
    return [(buffers.piece(place, 0, HEADER_BYTES), 0), (direct, HEADER_BYTES)]


