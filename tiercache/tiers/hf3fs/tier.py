"""The 3FS tier: the disk tier's files and rules on a 3FS mount, with payloads moved by rings instead of FUSE.

Metadata (open, rename, unlink, stat, the ledger) goes through the mount, in worker threads. A chunk's header and payload go
through a ring, all pieces of many chunks at once; threads only verify and, where the arena is not registered itself, copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

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
from tiercache.memory.workers import Workers
from tiercache.tiers.access import ACCESS
from tiercache.tiers.base import Traits
from tiercache.tiers.chunk_file import host_checksum, verify_chunk
from tiercache.tiers.disk import DiskSettings, DiskTier
from tiercache.tiers.hf3fs.engine import DEAD_MOUNT, RingEngine, StillInUse
from tiercache.tiers.hf3fs.files import RegisteredFile, RegisteredFiles
from tiercache.tiers.hf3fs.library import load_library
from tiercache.tiers.hf3fs.ring import RingSettings, Transfer
from tiercache.tiers.hf3fs.segments import Buffers, Piece, Segment, arena_segment, copy_with_checksum, transfer_bytes
from tiercache.tiers.manifest import MANIFEST
from tiercache.tiers.scanning import Shelf
from tiercache.tiers.volume import PendingFile, Victims, Volume

logger = logging.getLogger("tiercache.hf3fs")

T = TypeVar("T")

_IN_FLIGHT = 32
_FILE_THREADS = _IN_FLIGHT
"""For opening, making and naming files: calls that wait for the metadata service, each 0.5 to 2 ms, while the rings move
other chunks. So many are enough for writes of 2 MiB (four such calls, one after the other) at 3 GB/s."""
_LARGEST_ALLOWANCE_BYTES = 1 << 30
_SMALLEST_SHARE = 64
_OPEN_S = 60.0
_END_S = 5.0
_SWEEP_S = 5.0
"""How long a file may stay open, and allocated, that another instance deleted."""
_HEADERS_BYTES = 2 << 20
_PERHAPS_THE_FILE = frozenset({errno.EBADF, errno.EIO})
"""Results of a ring: the daemon does not know the descriptor, or something is wrong that is no RPC."""


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
    open_s = _OPEN_S + 10.0
    """Its own deadline comes first, and knows more."""
    perhaps_files = DiskTier.perhaps_files - {errno.EREMOTEIO}  # an RPC of a ring that failed says nothing about the file

    def __init__(self, settings: Hf3fsSettings, fingerprint: bytes, *, name: str = "hf3fs") -> None:
        super().__init__(settings, fingerprint)
        self.name = name
        self.settings: Hf3fsSettings = settings
        self._arena: Arena | None = None
        self.engine: RingEngine | None = None
        self.files: RegisteredFiles
        self._active: set[asyncio.Task[Any]] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._file_threads = Workers(f"{name}-files", _FILE_THREADS)
        self._hashing = threading.BoundedSemaphore(settings.threads)
        """Of the threads that make files, so many hash and copy at a time: the others wait for 3FS, not for a CPU."""

    def use_arena(self, arena: Arena) -> None:
        """Before `open`: payloads lie in this arena. Where it is shared memory, rings move them with no copy."""
        self._arena = arena

    async def open(self) -> None:
        try:
            async with asyncio.timeout(_OPEN_S):
                await self._open_engine()
                # A mount that hangs from now on is as bad as one that has hung before.
                await super().open()
            self._sweep_later()
        except TimeoutError:
            await self.close()
            # Any mount of 3FS that hangs on this machine: looking for ours asks all of them.
            raise ConfigError(f"{self.option}: a 3FS mount did not answer for {_OPEN_S:.0f} s") from None
        except BaseException:
            await self.close()
            raise

    async def _open_engine(self) -> None:
        library = load_library()
        try:
            mount = await self._metadata.submit(self._find_mount, library)
        except OSError as error:
            raise ConfigError(f"{self.option}: {error}") from error
        arena = arena_segment(self._arena) if self._arena is not None else None
        self.files = RegisteredFiles(library)
        place_bytes = HEADER_BYTES if arena is not None else transfer_bytes(self.settings.chunk_bytes)
        size_bytes = _HEADERS_BYTES if arena is not None else self.settings.iov_bytes

        def make_buffers() -> Buffers:
            return Buffers(size_bytes, place_bytes, "headers" if arena is not None else "chunks")

        rings = self.settings.rings
        engine = RingEngine(library, mount, rings, make_buffers, arena, revive=self._revive)
        try:
            await engine.open()
        except OSError as error:
            hint = "; this 3FS may take no negative hf3fs_io_depth" if rings.io_depth < 0 else ""
            raise ConfigError(f"{self.option}: 3FS at {mount} refuses rings: {error}{hint}") from error
        self.engine = engine
        places = max(1, min(_IN_FLIGHT, engine.buffers.count // 2))
        self.traits = Traits(durable=True, shared=True, read_concurrency=places, write_concurrency=places)

    async def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        engine, self.engine = self.engine, None
        if engine is not None:
            await engine.close()
            if self._active:
                await asyncio.wait(self._active, timeout=_END_S)
            self._later(self.files.close, str(self.settings.directories[0] / MANIFEST))
        self._file_threads.close()
        await super().close()

    def describe(self) -> str:
        copies = "no copy" if self.engine is not None and self.engine.arena is not None else "one copy"
        return f"{super().describe()[:-1]}, rings, {copies})"

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        return await self._noticing(self._read(key, lambda volume: self._begin(self._ring_read(volume, key, into))))

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        return await self._noticing(
            self._write(
                key,
                payload_bytes,
                lambda volume, victims: self._begin(self._ring_write(volume, key, payload, payload_bytes, victims)),
            )
        )

    async def remove(self, key: ChunkKey) -> bool:
        return await self._noticing(super().remove(key))

    def _find_mount(self, library: Any) -> Path:
        """The one mount that all directories lie on. Blocks."""
        found = {}
        for directory in self.settings.directories:
            place = directory
            while not place.exists():
                place = place.parent
            found[library.extract_mount_point(str(place))] = directory
        expected = self.settings.mount or next(iter(found))
        for mount, directory in found.items():
            if mount is None:
                raise ConfigError(f"{self.option}: {directory} does not lie on a 3FS mount (type fuse.hf3fs)")
            if Path(mount) != Path(os.path.realpath(expected)):
                raise ConfigError(f"{self.option}: expected all on the mount {expected}, found {directory} on {mount}")
        return Path(expected)

    def _make_volume(self, directory: Path, cap_bytes: int) -> Volume:
        # An allowance: two locked changes of the count for each chunk are as many calls of 3FS as the rest of a write takes.
        settings, allowance_bytes = self.settings, min(_LARGEST_ALLOWANCE_BYTES, cap_bytes // _SMALLEST_SHARE)
        volume = Volume(
            directory,
            cap_bytes,
            self.fingerprint,
            direct=settings.direct,
            durable=settings.durable,
            allowance_bytes=allowance_bytes,
            beside=True,
            access=ACCESS[settings.file_access],
        )
        volume.on_delete = self.files.forget
        return volume

    def _engine(self) -> RingEngine:
        if self.engine is None:
            raise TierUnavailable(f"{self.name} is closed")
        return self.engine

    def _out_of_reach(self, memory: np.ndarray) -> bool:
        """Where the arena is registered there are no places for payloads that lie elsewhere: the mount moves those."""
        arena = self._engine().arena
        return arena is not None and _inside(arena, memory, memory.nbytes) is None

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=f"tiercache-{self.name}")
        self._active.add(task)
        task.add_done_callback(self._active.discard)
        return task

    async def _noticing(self, work: Coroutine[Any, Any, T]) -> T:
        """A call that failed because the mount is dead is the first to know, perhaps the only one: rings may be idle."""
        try:
            return await work
        except OSError as error:
            if error.errno in DEAD_MOUNT and self.engine is not None:
                self.engine.suspect()
            raise

    def _sweep_later(self) -> None:
        """What others delete is not to stay allocated because we keep it open, least of all while nobody uses us."""
        self._sweep = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep_now)

    def _sweep_now(self) -> None:
        self._metadata.submit(self.files.close_deleted).add_done_callback(self._swept)

    def _swept(self, sweep: asyncio.Future[int]) -> None:
        if not sweep.cancelled() and (error := sweep.exception()) is not None:
            logger.info("%s: could not close deleted files: %s", self.name, error)
        if self.engine is not None:
            for shelf in self._shelves:
                self._catch_up_soon(shelf)  # what failed in `_later`
            self._sweep_later()

    async def _close_deleted(self) -> int:
        return await self._metadata.submit(self.files.close_deleted)

    def _later(self, call: Callable[..., object], *arguments: object) -> None:
        """Clean up in a worker thread, which a tier that was closed meanwhile does not have any more."""

        def clean_up() -> None:
            try:
                call(*arguments)
            except OSError as error:
                logger.info("%s: could not clean up: %s", self.name, error)

        try:
            self._metadata.submit(clean_up)
        except RuntimeError:
            threading.Thread(target=clean_up, name=f"tiercache-{self.name}-late", daemon=True).start()

    async def _is_replaced(self, volume: Volume, error: OSError) -> bool:
        """The rings are made anew with it, by `_revive`."""
        return False

    async def _reopen(self, shelf: Shelf, stale: Volume) -> None:
        """What looks like another directory may be another mount."""
        self._engine().suspect()
        await super()._reopen(shelf, stale)

    async def _revive(self) -> None:
        """Another daemon serves the mount: what was open on it is of no use any more. Chunks are where they were."""
        await self._metadata.submit(self.files.forget_all)
        for shelf in self._shelves:
            async with shelf.replacing:
                fresh = self._make_volume(shelf.volume.root, shelf.volume.cap_bytes)
                await self._open_volume(fresh)
                old, shelf.volume = shelf.volume, fresh
                self._later(old.close)
                # Writes that died with the daemon are still counted. A scan corrects that.
                self._begin_scan(shelf, first=False)

    # Reading

    async def _ring_read(self, volume: Volume, key: ChunkKey, into: np.ndarray) -> int | None:
        path = volume.path(key)
        if self._out_of_reach(into):
            return await self._readers.submit(volume.read, key, into)
        file = self.files.kept(path)
        if file is None:
            try:
                file = await self._file_threads.submit(self.files.open_to_read, path)
            except FileNotFoundError:
                if not await self._metadata.submit(volume.is_here_or_deleted):
                    raise
                return None
        try:
            return await self._transfer_in(key, path, file, into)
        except CorruptChunk as error:
            doubt = str(error)
        except OSError as error:
            if error.errno not in _PERHAPS_THE_FILE:
                raise
            doubt = f"{path}: {error.strerror}, says the daemon"
        # The file is to blame only when it is found bad by another way too: anew, with its true length, and without a ring.
        logger.info("%s; reading it again through the mount", doubt)
        return await self._readers.submit(self._read_through_mount, volume, key, path, into)

    def _read_through_mount(self, volume: Volume, key: ChunkKey, path: str, into: np.ndarray) -> int | None:
        self.files.forget(path)
        with contextlib.suppress(FileNotFoundError):
            self.files.refresh(path)
        return volume.read(key, into)

    async def _transfer_in(self, key: ChunkKey, path: str, file: RegisteredFile, into: np.ndarray) -> int:
        """As much as there is room for: a read ends at the end of the file, whatever `stat` would say. Releases `file`."""
        buffers, place, transfer = None, -1, None
        try:
            engine = self._engine()
            buffers = engine.buffers
            place = await buffers.take(self.settings.rings.hang_s)
            direct = _inside(engine.arena, into, into.nbytes)
            room_bytes = into.nbytes if direct is not None else min(into.nbytes, buffers.place_bytes - HEADER_BYTES)
            transfer = engine.transfer(file.descriptor, _pieces(buffers, place, direct, room_bytes), read=True)
            try:
                moved_bytes = await transfer.ended
            except StillInUse:
                if direct is not None:
                    # The daemon may yet write into the arena: the slot stays with this read until it cannot any more.
                    await transfer.over
                raise
            view = buffers.view(place)
            return await self._readers.submit(self._verify, key, path, view, direct is not None, into, moved_bytes)
        finally:
            self._let_go(file, buffers, place, transfer)

    def _verify(
        self, key: ChunkKey, path: str, view: np.ndarray, in_place: bool, into: np.ndarray, moved_bytes: int
    ) -> int:
        """`view` is a place of the rings' memory: the header, and the payload after it if that is not in place already."""
        if not view.nbytes:
            raise TierUnavailable(f"{self.name}: the rings were closed meanwhile")
        raw_header = view[:PACKED_BYTES].data
        if in_place:
            checksum = host_checksum(into)
        else:

            def checksum(payload_bytes: int) -> int:
                return copy_with_checksum(view[HEADER_BYTES:][:payload_bytes], into)

        return verify_chunk(path, raw_header, key, self.fingerprint, moved_bytes, moved_bytes, checksum)

    def _let_go(self, file: RegisteredFile, buffers: Buffers | None, place: int, transfer: Transfer | None) -> None:
        """Of what a transfer uses, when nobody uses it any more."""

        def release(_: object = None) -> None:
            if buffers is not None and place >= 0:
                buffers.give_back(place)
            if self.files.drop(file):
                self._later(self.files.close_file, file)

        if transfer is None or transfer.over.done():
            release()
        else:
            transfer.over.add_done_callback(release)

    # Writing

    async def _ring_write(
        self, volume: Volume, key: ChunkKey, payload: np.ndarray, payload_bytes: int, victims: Victims
    ) -> int:
        if self._out_of_reach(payload):
            return await self._writers.submit(volume.write, key, payload, payload_bytes, victims)
        engine = self._engine()
        buffers = engine.buffers
        place = await buffers.take(self.settings.rings.hang_s)
        padded = payload[: aligned(payload_bytes)]
        direct = _inside(engine.arena, padded, padded.nbytes)

        def begin() -> tuple[PendingFile, RegisteredFile]:
            pending = volume.begin_write(key, payload_bytes, victims)
            try:
                view = buffers.view(place)
                if not view.nbytes:
                    raise TierUnavailable(f"{self.name}: the rings were closed meanwhile")
                with self._hashing:
                    if direct is None:
                        target = view[HEADER_BYTES : HEADER_BYTES + padded.nbytes]
                        checksum = copy_with_checksum(padded[:payload_bytes], target)
                        target[payload_bytes:] = 0
                    else:
                        checksum = payload_checksum(padded[:payload_bytes])
                packed = Header(key, self.fingerprint, payload_bytes, checksum).pack()
                view[:PACKED_BYTES] = np.frombuffer(packed, dtype=np.uint8)
                view[PACKED_BYTES:HEADER_BYTES] = 0
                return pending, volume.make(pending, self.files.create)
            except BaseException:
                volume.abandon_write(pending)
                raise

        try:
            pending, file = await self._file_threads.submit(begin)
        except BaseException:
            buffers.give_back(place)
            raise
        transfer = None
        try:
            transfer = engine.transfer(file.descriptor, _pieces(buffers, place, direct, padded.nbytes), read=False)
            moved_bytes, whole_bytes = await transfer.ended, file_bytes(payload_bytes)
            if moved_bytes != whole_bytes:
                raise OSError(errno.EIO, f"short write: {moved_bytes} of {whole_bytes} bytes", pending.path)
        except OSError:
            # Nobody writes to it any more, and its space may be what the next attempt needs.
            buffers.give_back(place)
            await self._file_threads.submit(self._discard, volume, pending, file)
            raise
        except BaseException:
            # Its name goes. Its descriptor stays while the daemon may write to it, so nobody else gets its inode.
            self._later(volume.abandon_write, pending)
            self._let_go(file, buffers, place, transfer)
            raise
        buffers.give_back(place)
        return await self._file_threads.submit(self._publish, volume, pending, file)

    def _discard(self, volume: Volume, pending: PendingFile, file: RegisteredFile) -> None:
        with contextlib.suppress(OSError):
            volume.abandon_write(pending)
        self.files.release(file)

    def _publish(self, volume: Volume, pending: PendingFile, file: RegisteredFile) -> int:
        """Releases `file`: it has its name only when nobody can write to it any more."""
        try:
            occupied_bytes = self.files.settle(file, durable=self.settings.durable)
        except BaseException:
            volume.abandon_write(pending)
            raise
        finally:
            self.files.release(file)
        return volume.finish_write(pending, occupied_bytes or pending.charged_bytes)


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
