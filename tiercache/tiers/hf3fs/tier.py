"""The 3FS tier: a file tier on a 3FS mount whose header and payload bytes are moved by rings instead of FUSE.

Metadata calls (open, rename, unlink, stat, the capacity counter) use the mount, in worker threads. The header and the
payload of a chunk use a ring, with many chunks in flight. Threads verify and, if the arena is not registered itself,
copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tiercache.core.header import HEADER_BYTES, PACKED_BYTES, Header, aligned, file_bytes, payload_checksum
from tiercache.core.keys import ChunkKey
from tiercache.errors import ConfigError, CorruptChunk, TierUnavailable
from tiercache.memory.arena import Arena
from tiercache.memory.workers import Workers
from tiercache.tiers.compression import unpacked
from tiercache.tiers.files.access import ABSENT
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directories import ChunkIO, Directories, FileSettings
from tiercache.tiers.files.directory import PendingFile
from tiercache.tiers.files.format import host_checksum, verify_chunk
from tiercache.tiers.files.io_posix import places_of
from tiercache.tiers.files.tier import FileTier
from tiercache.tiers.hf3fs.engine import DEAD_MOUNT, RingEngine, load_library
from tiercache.tiers.hf3fs.files import RegisteredFiles
from tiercache.tiers.hf3fs.ring import (
    Buffers,
    Piece,
    RegisteredMemory,
    RingSettings,
    Transfer,
    copy_with_checksum,
    registered_arena,
)

logger = logging.getLogger("tiercache.hf3fs")

T = TypeVar("T")

_IN_FLIGHT = 32
"""Limit of concurrent reads, and of writes. The same number of threads open, make and name files: such a call waits for
the metadata service while rings move other chunks.
"""
_CLOSE_S = 5.0
_OPEN_S = 60.0
_HEADERS_BYTES = 2 << 20
_MAYBE_BAD_FILE = frozenset({errno.EBADF, errno.EIO})
"""Ring errors for an unknown descriptor, or for a failure other than an RPC's."""


class RingIO(ChunkIO):
    """Moves chunks by rings."""

    sees_remounts = True
    perhaps_files = ChunkIO.perhaps_files - {errno.EREMOTEIO}  # a failed RPC of a ring does not indicate a bad file

    def __init__(self, directories: Directories, mount: Path | None, rings: RingSettings, iov_bytes: int) -> None:
        """`mount` None means the mount of the directories."""
        threads = directories.settings.threads
        self._directories = directories
        self.places = places_of(threads)
        self._readers = Workers(f"{directories.name}-read", threads)
        """Threads that verify chunks."""
        self.arena: Arena | None = None
        """Arena of the payloads, set before `prepare`. If it is shared memory, rings move payloads without a copy."""
        self.engine: RingEngine | None = None
        self.detached = False
        """True if the cache, and with it the arena, stays open when the tier closes."""
        self.files: RegisteredFiles
        self.active: set[asyncio.Task[Any]] = set()
        self.file_threads = Workers(f"{directories.name}-files", _IN_FLIGHT)
        self._mount = mount
        if rings.io_depth > 1:
            logger.warning(
                "hf3fs_io_depth: with %d 3FS would issue whole batches only and leave partial ones waiting; using 0, which "
                "issues every request at once",
                rings.io_depth,
            )
            rings = replace(rings, io_depth=0)
        self._rings = rings
        self._iov_bytes = iov_bytes
        self._hashing = threading.BoundedSemaphore(threads)
        """Limits how many of the threads that make files hash and copy concurrently."""

    async def prepare(self) -> None:
        directories = self._directories
        library = load_library()
        if self.arena is not None and self.arena.lent:
            raise ConfigError(
                f"{directories.option}: 3FS may still write to memory for reads of the detached tier; try again when its "
                "daemon has answered them or has ended"
            )
        try:
            mount = await directories.metadata.submit(self._find_mount, library)
        except OSError as error:
            raise ConfigError(f"{directories.option}: {error}") from error
        arena = registered_arena(self.arena) if self.arena is not None else None
        self.files = RegisteredFiles(library)
        place_bytes = HEADER_BYTES if arena is not None else file_bytes(directories.settings.chunk_bytes)
        size_bytes = _HEADERS_BYTES if arena is not None else self._iov_bytes

        def make_buffers() -> Buffers:
            return Buffers(size_bytes, place_bytes, "headers" if arena is not None else "chunks")

        engine = RingEngine(library, mount, self._rings, make_buffers, arena, revive=directories.remount)
        try:
            await engine.open()
        except OSError as error:
            hint = "; this 3FS may take no negative hf3fs_io_depth" if self._rings.io_depth < 0 else ""
            raise ConfigError(f"{directories.option}: 3FS at {mount} refuses rings: {error}{hint}") from error
        self.engine = engine
        self.places = max(1, min(_IN_FLIGHT, engine.buffers.count // 2))

    async def close(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            await engine.close(detached=self.detached)
            if self.active:
                await asyncio.wait(self.active, timeout=_CLOSE_S)
        for workers in (self.file_threads, self._readers):
            workers.close()

    def describe(self) -> str:
        return f"rings, {'no copy' if self.engine is not None and self.engine.arena is not None else 'one copy'}"

    def read(self, files: ChunkFiles, key: ChunkKey, into: np.ndarray) -> asyncio.Future[int | None]:
        return self._begin(self._ring_read(files, key, into))

    def write(
        self, files: ChunkFiles, key: ChunkKey, payload: np.ndarray, payload_bytes: int
    ) -> asyncio.Future[int]:
        return self._begin(self._ring_write(files, key, payload, payload_bytes))

    def suspect(self, error: OSError | None = None) -> None:
        """Examine the daemon after a call that failed as on a dead mount, which idle rings do not detect, and after a
        directory was replaced, which may be on another mount.
        """
        if self.engine is not None and (error is None or error.errno in DEAD_MOUNT):
            self.engine.suspect()

    def _find_mount(self, library: Any) -> Path:
        """Return the mount of all directories.

        Blocks. Raises ConfigError if it is not a 3FS mount or differs between them.
        """
        option, found = self._directories.option, {}
        for directory in self._directories.settings.directories:
            place = directory
            while not place.exists():
                place = place.parent
            found[library.extract_mount_point(str(place))] = directory
        expected = self._mount or next(iter(found))
        for mount, directory in found.items():
            if mount is None:
                raise ConfigError(f"{option}: {directory} does not lie on a 3FS mount (type fuse.hf3fs)")
            if Path(mount) != Path(os.path.realpath(expected)):
                raise ConfigError(f"{option}: expected all on the mount {expected}, found {directory} on {mount}")
        return Path(expected)

    def _engine(self) -> RingEngine:
        if self.engine is None:
            raise TierUnavailable(f"{self._directories.name} is closed")
        return self.engine

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=f"tiercache-{self._directories.name}")
        self.active.add(task)
        task.add_done_callback(self.active.discard)
        return task

    # Reads

    async def _ring_read(self, files: ChunkFiles, key: ChunkKey, into: np.ndarray) -> int | None:
        path = files.path(key)
        try:
            file = await self.file_threads.submit(self.files.open_to_read, path)
        except ABSENT:
            if await self._directories.metadata.submit(files.is_away):
                raise
            return None
        try:
            return await self._transfer_in(key, path, file, into)
        except CorruptChunk as error:
            doubt = str(error)
        except OSError as error:
            if error.errno not in _MAYBE_BAD_FILE:
                raise
            doubt = f"{path}: {error.strerror}, says the daemon"
        # The file is bad only if it is also bad when opened again, with its true length, and read without rings.
        logger.info("%s; reading it again through the mount", doubt)
        return await self._readers.submit(self._read_through_mount, files, key, path, into)

    def _read_through_mount(self, files: ChunkFiles, key: ChunkKey, path: str, into: np.ndarray) -> int | None:
        with contextlib.suppress(FileNotFoundError):
            self.files.refresh(path)
        return files.read(key, into)

    async def _transfer_in(self, key: ChunkKey, path: str, file: int, into: np.ndarray) -> int:
        """Read by a ring as many bytes as fit, since `stat` may lag, and verify them. Closes `file`."""
        buffers, place, transfer = None, -1, None
        try:
            engine = self._engine()
            buffers = engine.buffers
            place = await buffers.take(self._rings.timeout_s)
            direct = _place_in(engine.arena, into)
            room_bytes = into.nbytes if direct is not None else min(into.nbytes, buffers.place_bytes - HEADER_BYTES)
            transfer = engine.transfer(file, _pieces(buffers, place, direct, room_bytes), read=True)
            try:
                moved_bytes = await transfer.ended
            except TierUnavailable:
                if direct is not None:
                    # The daemon may still write into the slot, which stays reserved during this read.
                    await transfer.over
                raise
            view = buffers.view(place)
            return await self._readers.submit(self._verify, key, path, view, direct is not None, into, moved_bytes)
        finally:
            self._release_once_over(file, buffers, place, transfer)

    def _verify(
        self, key: ChunkKey, path: str, view: np.ndarray, in_place: bool, into: np.ndarray, moved_bytes: int
    ) -> int:
        """Verify a chunk and unpack it into `into`.

        `view` is a transfer buffer with the header and the payload; a payload that is `in_place` is in `into` instead.
        """
        if not view.nbytes:
            raise TierUnavailable(f"{self._directories.name} is closed")
        raw_header = view[:PACKED_BYTES].data
        if in_place:
            checksum = host_checksum(into)
        else:

            def checksum(payload_bytes: int) -> int:
                return copy_with_checksum(view[HEADER_BYTES:][:payload_bytes], into)

        header = verify_chunk(path, raw_header, key, self._directories.fingerprint, moved_bytes, moved_bytes, checksum)
        return unpacked(header, into)

    def _release_once_over(self, file: int, buffers: Buffers | None, place: int, transfer: Transfer | None) -> None:
        """Close the file and release the buffer of a transfer as soon as the daemon no longer uses them."""

        def release(_: object = None) -> None:
            if buffers is not None and place >= 0:
                buffers.give_back(place)
            self._directories.metadata.later(self.files.close, file, workers=self.file_threads)

        if transfer is None or transfer.over.done():
            release()
        else:
            transfer.over.add_done_callback(release)

    # Writes

    async def _ring_write(self, files: ChunkFiles, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> int:
        engine = self._engine()
        buffers = engine.buffers
        place = await buffers.take(self._rings.timeout_s)
        padded = payload[: aligned(payload_bytes)]
        direct = _place_in(engine.arena, padded)

        def begin() -> tuple[PendingFile, int]:
            pending = files.begin_write(key, payload_bytes)
            try:
                view = buffers.view(place)
                if not view.nbytes:
                    raise TierUnavailable(f"{self._directories.name} is closed")
                with self._hashing:
                    if direct is None:
                        target = view[HEADER_BYTES : HEADER_BYTES + padded.nbytes]
                        checksum = copy_with_checksum(padded[:payload_bytes], target)
                        target[payload_bytes:] = 0
                    else:
                        checksum = payload_checksum(padded[:payload_bytes])
                packed = Header(key, self._directories.fingerprint, payload_bytes, checksum).pack()
                view[:PACKED_BYTES] = np.frombuffer(packed, dtype=np.uint8)
                view[PACKED_BYTES:HEADER_BYTES] = 0
                return pending, files.make(pending, self.files.create)
            except BaseException:
                files.discard(pending)
                raise

        try:
            pending, file = await self.file_threads.submit(begin)
        except BaseException:
            buffers.give_back(place)
            raise
        transfer = None
        try:
            transfer = engine.transfer(file, _pieces(buffers, place, direct, padded.nbytes), read=False)
            moved_bytes, whole_bytes = await transfer.ended, file_bytes(payload_bytes)
            if moved_bytes != whole_bytes:
                raise OSError(errno.EIO, f"short write: {moved_bytes} of {whole_bytes} bytes", pending.path)
        except OSError:
            # The transfer is over. The next attempt may need the space of its file.
            buffers.give_back(place)
            await self.file_threads.submit(self._discard, files, pending, file)
            raise
        except BaseException:
            # The name is removed. The descriptor stays open while the daemon may write, to reserve its inode.
            self._directories.metadata.later(files.discard, pending)
            self._release_once_over(file, buffers, place, transfer)
            raise
        buffers.give_back(place)
        return await self.file_threads.submit(self._publish, files, pending, file)

    def _discard(self, files: ChunkFiles, pending: PendingFile, file: int) -> None:
        with contextlib.suppress(OSError):
            files.discard(pending)
        self.files.close(file)

    def _publish(self, files: ChunkFiles, pending: PendingFile, file: int) -> int:
        """Close `file`, then give it its final name once no process can write to it any more."""
        try:
            occupied_bytes = self.files.settle(file, durable=self._directories.settings.durable)
        except BaseException:
            files.discard(pending)
            raise
        finally:
            self.files.close(file)
        return files.finish_write(pending, occupied_bytes or pending.reserved_bytes)


def _place_in(arena: RegisteredMemory | None, memory: np.ndarray) -> Piece | None:
    """Return the piece of the registered arena that `memory` is, or None if the arena is not registered."""
    if arena is None:
        return None
    start = memory.ctypes.data - arena.memory.ctypes.data
    assert 0 <= start <= arena.memory.nbytes - memory.nbytes, "a payload outside of the arena"
    return arena, start, memory.nbytes


def _pieces(buffers: Buffers, place: int, direct: Piece | None, payload_bytes: int) -> list[tuple[Piece, int]]:
    """Return the pieces of shared memory that hold a chunk file, with their offsets in the file."""
    if direct is None:
        return [(buffers.piece(place, 0, HEADER_BYTES + payload_bytes), 0)]
    return [(buffers.piece(place, 0, HEADER_BYTES), 0), (direct, HEADER_BYTES)]


@dataclass(frozen=True)
class Hf3fsSettings(FileSettings):
    """Settings of the 3FS tier. `cap_bytes` is the cap of all base paths together."""

    many_hosts: bool = True
    """Other hosts share the mount, see `FileSettings`."""
    mount: Path | None = None
    """None means the mount of the directories."""
    iov_bytes: int = 200 << 20
    rings: RingSettings = field(default_factory=RingSettings)


class Hf3fsTier(FileTier):
    open_s = _OPEN_S + 10.0
    """Longer than the deadline in `open`, whose message names the cause."""

    def __init__(self, settings: Hf3fsSettings, fingerprint: bytes, *, name: str = "hf3fs") -> None:
        super().__init__(
            name,
            "hf3fs_base_path",
            settings,
            fingerprint,
            lambda directories: RingIO(directories, settings.mount, settings.rings, settings.iov_bytes),
        )

    @property
    def io(self) -> RingIO:
        io = self.directories.io
        assert isinstance(io, RingIO)
        return io

    def use_arena(self, arena: Arena) -> None:
        self.io.arena = arena

    def load_library(self) -> None:
        load_library()

    async def close(self) -> None:
        self.io.detached = self.traffic.detached
        await super().close()

    async def open(self) -> None:
        try:
            async with asyncio.timeout(_OPEN_S):
                await super().open()
        except TimeoutError:
            # Finding the mount of a path asks all 3FS mounts of the machine, so any of them may hang.
            raise ConfigError(f"{self.option}: a 3FS mount did not answer for {_OPEN_S:.0f} s") from None
