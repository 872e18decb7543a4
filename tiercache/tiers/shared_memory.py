"""The shared memory tier: chunk files on tmpfs, which all engines of a host map and read in place.

It stores the files of the disk tier, with the same capacity counter, locks and recovery. A get copies nothing: it maps
a file, verifies it once, and returns a lease on pages that all processes share.

A mapping never leads to bytes of another file: a file never changes, and a deleted one never gets its name back. After
a chunk was mapped, and after each change of its subdirectory, a thread compares the file at that path with the mapped
one. If they differ, the mapping is dropped at once, or when its last lease ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tiercache.core.compression import Codec
from tiercache.core.header import HEADER_BYTES, PACKED_BYTES, file_bytes
from tiercache.core.keys import ChunkKey
from tiercache.errors import CacheClosed, ConfigError, CorruptChunk
from tiercache.memory.slots import ONE, PREFETCH, READ, Lease, LeaseOwner, Purpose, pins_in
from tiercache.tiers.base import Tier, TierStatistics
from tiercache.tiers.files.access import mount_of, open_file
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directories import Directories, FileSettings
from tiercache.tiers.files.format import host_checksum, verify_chunk
from tiercache.tiers.files.index import ProbingLookup
from tiercache.tiers.files.io_posix import PosixIO
from tiercache.tiers.files.tier import FileTier

logger = logging.getLogger("tiercache.shared_memory")

MEMORY_KINDS = ("tmpfs",)
"""File systems in memory. hugetlbfs lacks write(2), and ramfs lacks a size limit."""
_REFRESH_S = 0.1
"""Time between two listings without a miss in between. They take at most a tenth of the time."""
_STEP = 1024
"""Names looked up per call in a thread, about a millisecond of the event loop."""


@dataclass(frozen=True)
class SharedMemorySettings(FileSettings):
    direct: bool | None = False
    durable: bool = False
    """A power failure clears tmpfs in any case."""
    beside: bool = False
    """A temporary file beside a chunk would make all engines list that directory once more."""


_libc = ctypes.CDLL(None, use_errno=True)
_map, _unmap = _libc.mmap, _libc.munmap
_map.restype = ctypes.c_void_p
_map.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(3 * [ctypes.c_int]), ctypes.c_int64]
_unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value

Inode = tuple[int, int]
"""Device and inode number."""


class _Pages:
    """The pages of a file until their last view is gone. Python's `mmap` would keep a descriptor per file.

    The kernel chooses the address, so that it can map huge pages.
    """

    __slots__ = ("__array_interface__",)

    def __init__(self, descriptor: int, length_bytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {}
        address = _map(None, length_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        read_only = True
        self.__array_interface__ |= {
            "version": 3, "typestr": "|u1", "shape": (length_bytes,), "data": (address, read_only)
        }  # fmt: skip

    def __del__(self, unmap: Callable[[int, int], int] = _unmap) -> None:
        if found := self.__array_interface__:
            unmap(found["data"][0], *found["shape"])


class Mapped:
    """A mapped chunk file that was verified; see `Leased`. It stays mapped until `memory` and all its views are gone.

    The file never changes, and its pages outlive its deletion. If another program shortens it, the kernel kills this
    process with SIGBUS at the next access.
    """

    __slots__ = ("hot", "inode", "key", "leases", "length_bytes", "memory", "payload_bytes", "unlinked")

    def __init__(self, key: ChunkKey, memory: np.ndarray, payload_bytes: int, inode: Inode) -> None:
        self.key = key
        self.memory: np.ndarray | None = memory
        """uint8, read-only: the header of 4096 bytes, the payload, and padding. None once the chunk is unmapped."""
        self.length_bytes = memory.nbytes
        self.payload_bytes = payload_bytes
        self.inode = inode
        self.leases = 0
        self.hot = True
        self.unlinked = False
        """True once the file has lost its name."""


def map_chunk_file(path: Path | str, key: ChunkKey, fingerprint: bytes) -> Mapped:
    """Map and verify the chunk at `path`. Blocks. Raises like `read_chunk_file`, and OSError (ENOMEM) if mapping fails."""
    descriptor = open_file(path, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        length_bytes = status.st_size
        if length_bytes <= HEADER_BYTES:
            raise CorruptChunk(f"{path}: length: expected more than {HEADER_BYTES} bytes, found {length_bytes}")
        memory = np.asarray(_Pages(descriptor, length_bytes))
    finally:
        os.close(descriptor)
    checksum = host_checksum(memory[HEADER_BYTES:])
    header = verify_chunk(path, memory[:PACKED_BYTES].data, key, fingerprint, length_bytes, length_bytes, checksum)
    if header.codec is not Codec.PLAIN:
        # Only another tier compresses. Its file is deleted, so that the chunk can be stored again.
        raise CorruptChunk(f"{path}: it is compressed, and cannot be read in place")
    return Mapped(key, memory, header.payload_bytes, (status.st_dev, status.st_ino))


class Mappings(LeaseOwner):
    """The mapped chunks of a tier, and the owner of the leases on them.

    Keeps at most `most_bytes` and `most_chunks` of chunks without a lease, and unmaps the least recently used first.
    All methods belong to the event loop. `unmap` drops a list of mapped files in a thread, since that takes time.
    """

    def __init__(self, unmap: Callable[[list[np.ndarray]], None]) -> None:
        super().__init__()
        self.most_bytes = 0
        self.most_chunks = max_mappings()
        self.mapped_bytes = 0
        self.unlinked_bytes = 0
        """Mapped bytes of deleted files, which no capacity counter includes. They are freed with their last leases."""
        self.on_gone: Callable[[ChunkKey], None] | None = None
        """Called when a chunk can no longer be found here."""
        self._entries: OrderedDict[ChunkKey, Mapped] = OrderedDict()
        self._unmap = unmap
        self._unmapping: list[np.ndarray] = []
        self._closed = self._is_over = False

    def open(self, most_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.most_bytes = most_bytes

    def close(self, *, is_over: bool = True) -> None:
        """Drop all chunks. Leased chunks stay mapped until their leases end; `is_over`: the cache is closed, and their
        leases give no views any more.
        """
        self._closed, self._is_over = True, is_over
        self.clear()
        self.hand_over()

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def keys(self) -> list[ChunkKey]:
        """Return the keys of the chunks that can be found."""
        return list(self._entries)

    def get(self, key: ChunkKey) -> Mapped | None:
        """Return a mapped chunk, or None. Not an access."""
        return self._entries.get(key)

    # Leases

    def find(self, key: ChunkKey, purpose: Purpose) -> Lease | None:
        """Return a lease on a mapped chunk, or None; an access."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return self.serve(entry, purpose, counted=False)

    def add(self, entry: Mapped, purpose: Purpose, *, findable: bool) -> Lease:
        """Add a chunk that was just mapped and return its first lease. If it is not `findable`, no lookup finds it."""
        before = self._entries.get(entry.key) if findable else None
        if before is not None and before.inode == entry.inode:  # another read has mapped it too
            self._unmap_soon(entry)
            entry = before
        else:
            if before is not None:
                self._remove(before)
            entry.hot = findable and not self._closed
            self.mapped_bytes += entry.length_bytes
            if entry.hot:
                self._entries[entry.key] = entry
            else:
                self._mark(entry)
        lease = self.begin_lease(entry, purpose)
        self._trim()
        return lease

    def view(self, entry: Mapped, length_bytes: int) -> np.ndarray:
        """Return the first bytes of a chunk: uint8, read-only. Raises CacheClosed."""
        if self._is_over or entry.memory is None:
            raise CacheClosed("the cache is closed, and its memory given back")
        return entry.memory[HEADER_BYTES : HEADER_BYTES + length_bytes]

    def begin_lease(self, entry: Mapped, purpose: Purpose) -> Lease:
        entry.leases += ONE[purpose]
        return Lease(self, entry, purpose)

    def end_lease(self, entry: Mapped, purpose: Purpose) -> None:
        entry.leases -= ONE[purpose]
        if not entry.leases and (entry.unlinked or not entry.hot):
            self._drop(entry)

    # Removal of chunks

    def lost(self, key: ChunkKey, *, replaced: bool = False) -> bool:
        """Record that the file of a chunk has lost its name. Return True if the chunk has no lease, so that it is
        unmapped.

        A leased chunk keeps its memory in any case, so it can be found until its leases end, unless another file has
        `replaced` its own.
        """
        entry = self._entries.get(key)
        if entry is None:
            return False
        if replaced or not entry.leases:
            self._remove(entry)
        else:
            self._mark(entry)
        return not entry.leases

    def forget(self, key: ChunkKey) -> None:
        """Make a chunk invisible at once."""
        self.lost(key, replaced=True)

    def clear(self) -> None:
        """Drop all chunks; leased chunks are unmapped when their leases end."""
        for entry in list(self._entries.values()):
            self._drop(entry)

    def hand_over(self) -> None:
        """Pass dropped files to `unmap` now."""
        taken, self._unmapping = self._unmapping, []
        if taken:
            self._unmap(taken)

    def _remove(self, entry: Mapped) -> None:
        self._mark(entry)
        self._drop(entry)
        if pins_in(entry.leases) and self.on_forget is not None:
            self.on_forget(entry.key)

    def _mark(self, entry: Mapped) -> None:
        if not entry.unlinked:
            entry.unlinked = True
            self.unlinked_bytes += entry.length_bytes

    def _drop(self, entry: Mapped) -> None:
        """Make a chunk invisible, and unmap it once it has no lease."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            if self.on_gone is not None:
                self.on_gone(entry.key)
        entry.hot = False
        if not entry.leases and entry.memory is not None:
            self.mapped_bytes -= entry.length_bytes
            self.unlinked_bytes -= entry.length_bytes if entry.unlinked else 0
            self._unmap_soon(entry)

    def _trim(self) -> None:
        for _ in range(len(self._entries)):
            if self.mapped_bytes <= self.most_bytes and len(self._entries) <= self.most_chunks:
                return
            key, entry = next(iter(self._entries.items()))
            if not entry.leases:
                self._drop(entry)
            else:
                self._entries.move_to_end(key)

    def _unmap_soon(self, entry: Mapped) -> None:
        if not self._unmapping and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon(self.hand_over)  # with the others dropped in this iteration
        assert entry.memory is not None
        self._unmapping.append(entry.memory)
        entry.memory = None


class MappingIO(PosixIO):
    """Writes chunks as plain files and reads them by mapping. Unmaps the chunks whose files have lost their names."""

    def __init__(self, directories: Directories) -> None:
        super().__init__(directories)
        self.prefetch_places = None
        self.mappings = Mappings(lambda files: directories.metadata.later(files.clear))
        self._doubted: dict[ChunkKey, None] = {}
        """Mapped chunks whose names have to be checked."""
        self._checking: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        settings = self._directories.settings
        await self._directories.metadata.submit(require_memory, settings.directories[0], settings.cap_bytes)

    def map(self, files: ChunkFiles, key: ChunkKey, mapped: list[Mapped]) -> asyncio.Future[int | None]:
        """Map and verify a chunk, with the result of `read`, and append it to `mapped`."""

        def by(path: str) -> int:
            chunk = map_chunk_file(path, key, self._directories.fingerprint)
            mapped.append(chunk)
            return chunk.payload_bytes

        return self._readers.submit(files.read_by, key, by)

    def listed(self, kept: Sequence[ChunkKey]) -> None:
        """Check soon if the files of mapped keys among `kept` still have their names."""
        self._doubted.update((key, None) for key in kept if key in self.mappings)
        if self._doubted and self._checking is None and not self._directories.closed:
            self._checking = self._directories.begin(self._check(), "check-mappings")

    async def _check(self) -> None:
        try:
            while self._doubted:
                keys, self._doubted = list(self._doubted), {}
                await self._unmap_lost(keys)
        finally:
            self._checking = None

    async def unmap_deleted(self) -> int:
        unmapped = await self._unmap_lost(self.mappings.keys())
        if unmapped:
            self.mappings.hand_over()
            await self._directories.metadata.submit(int)  # the single thread has unmapped them before this
        return unmapped

    async def _unmap_lost(self, keys: Sequence[ChunkKey]) -> int:
        """Unmap the keys whose files have lost their names. Return how many are unmapped; others are leased."""
        directory, mappings, unmapped = self._directories.all[0], self.mappings, 0
        for start in range(0, len(keys), _STEP):
            entries = [entry for key in keys[start : start + _STEP] if (entry := mappings.get(key)) is not None]
            is_obsolete = directory.looking()
            inodes = await self._directories.metadata.submit(
                _inodes, directory.files, [entry.key for entry in entries]
            )
            for entry, inode in zip(entries, inodes, strict=True):
                if inode != entry.inode and mappings.get(entry.key) is entry:
                    unmapped += mappings.lost(entry.key, replaced=inode is not None)
                if inode is None and not is_obsolete(entry.key):
                    directory.index.remove(entry.key)
        return unmapped


class SharedMemoryTier(FileTier):
    """Maps chunk files. A mapped chunk is leased without waiting, and nothing is copied to the hot cache."""

    def __init__(self, settings: SharedMemorySettings, fingerprint: bytes) -> None:
        super().__init__(
            "shared_memory",
            "shared_memory_path",
            settings,
            fingerprint,
            MappingIO,
            lambda directories: ProbingLookup(directories, _REFRESH_S),
        )
        io = self.directories.io
        assert isinstance(io, MappingIO)
        self._io = io
        self.mappings = io.mappings
        self.mappings.on_gone = self._changed

    async def open(self) -> None:
        await super().open()
        self.mappings.open(self.settings.cap_bytes)
        directory = self.directories.all[0]
        directory.index.on_change = self._changed
        # Needed without a listener too: a chunk that another process evicts is unmapped.
        self.lookup.follow()

    def take_over(self, before: Tier) -> None:
        super().take_over(before)
        assert isinstance(before, SharedMemoryTier)
        self.mappings.on_pinned_access = before.mappings.on_pinned_access
        self.mappings.on_forget = before.mappings.on_forget

    def limit(self, cap_bytes: int, tenant_bytes: int) -> None:
        super().limit(cap_bytes, tenant_bytes)
        self.mappings.most_bytes = cap_bytes

    async def close(self) -> None:
        self.mappings.close(is_over=not self.traffic.detached)
        await super().close()

    def contains(self, key: ChunkKey) -> bool:
        return super().contains(key) or key in self.mappings

    def offered(self) -> Sequence[Container[ChunkKey]]:
        return [*super().offered(), self.mappings] if self.traffic.refuses_none else super().offered()

    def tell(self, on_change: Callable[[ChunkKey], None]) -> None:
        self._on_change = on_change

    def lease(self, key: ChunkKey, *, counted: bool = False) -> Lease | None:
        """Return a reader's lease on a mapped chunk, or None. Counts as an access unless that is `counted` already."""
        lease = self.mappings.find(key, READ)
        if lease is not None:
            self._statistics.reads += 1
            self._statistics.read_bytes += lease.payload_bytes
            if not counted:
                self.directories.all[0].index.touch(key)
        return lease

    def pin(self, key: ChunkKey) -> Lease | None:
        """Pin a mapped chunk for a future reader, or return None."""
        return self.mappings.find(key, PREFETCH)

    async def map(self, key: ChunkKey, purpose: Purpose) -> Lease | None:
        """Map the chunk and verify it in place. Return a lease of that purpose, or None for a miss. Raises the errors of
        `read`. A cancelled call raises CancelledError when its thread has ended.
        """
        mappings, directory = self.mappings, self.directories.all[0]
        mapped: list[Mapped] = []

        def begin(files: ChunkFiles) -> asyncio.Future[int | None]:
            return self._io.map(files, key, mapped)

        length = await self._read(key, begin)
        if length is None:
            return None
        findable = not self.traffic.refuses(key)  # else it was forgotten meanwhile
        if findable and key not in directory.index:
            directory.add(key, file_bytes(length))  # a listing finds the deletion of known chunks only
        lease = mappings.add(mapped[0], purpose, findable=findable)
        self._io.listed([key])
        return lease

    async def remove(self, key: ChunkKey) -> bool:
        self.mappings.forget(key)
        return await super().remove(key)

    def statistics(self) -> TierStatistics:
        counters = super().statistics()
        counters.mapped_bytes = self.mappings.mapped_bytes
        counters.unlinked_bytes = self.mappings.unlinked_bytes
        return counters

    def _changed(self, key: ChunkKey) -> None:
        """Called when a key has entered or left the index, and when a chunk can no longer be found among the mappings."""
        entry = self.mappings.get(key)
        if entry is not None:
            is_known = super().contains(key)
            if not is_known or entry.unlinked:
                self.mappings.lost(key, replaced=is_known)
        if self._on_change is not None:
            self._on_change(key)


def max_mappings(limit: Path = Path("/proc/sys/vm/max_map_count")) -> int:
    """Return half of the number of mappings that a process may have."""
    try:
        return int(limit.read_text()) // 2
    except (OSError, ValueError):
        return 65530 // 2


def require_memory(directory: Path, cap_bytes: int) -> None:
    """Raise ConfigError unless the directory is in memory with room for `cap_bytes`. Blocks."""
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


def _inodes(files: ChunkFiles, keys: Sequence[ChunkKey]) -> list[Inode | None]:
    """Return the current inodes of these chunks' names, None if missing. Blocks.

    A mapped file keeps its inode number, so an equal one is the same file.
    """
    found: list[Inode | None] = []
    for key in keys:
        try:
            status = os.lstat(files.path(key))
            found.append((status.st_dev, status.st_ino))
        except OSError:
            found.append(None)
    return found
