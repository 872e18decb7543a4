"""Chunks of a tier that are mapped into this process, and the leases on them.

A chunk is verified when it is mapped and trusted from then on, like a hot chunk. It is found as long as its file has its
name; the memory of a deleted file is unmapped when the last lease has ended.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from tiercache.core.budget import READ, Purpose
from tiercache.core.header import HEADER_BYTES
from tiercache.core.keys import ChunkKey
from tiercache.core.tombstones import Tombstones
from tiercache.errors import CacheClosed
from tiercache.tiers.files.mapped_file import MappedFile
from tiercache.tiers.leases import ONE, Lease, pins_in


class Mapped:
    """A mapped chunk, see `Leased`."""

    __slots__ = ("file", "hot", "is_ahead", "key", "leases", "length_bytes", "payload_bytes", "unlinked")

    def __init__(self, key: ChunkKey, file: MappedFile) -> None:
        self.key = key
        self.payload_bytes = file.payload_bytes
        self.leases = 0
        self.hot = True
        self.file: MappedFile | None = file
        """None once it is unmapped."""
        self.length_bytes = file.memory.nbytes
        self.unlinked = False
        """True once its file was deleted or replaced, by any process."""
        self.is_ahead = False
        """True while it is mapped for a future reader and was not used yet."""


class Mappings:
    """Keeps at most `most_bytes` and `most_chunks` of chunks without a lease; the least recently used one is unmapped first.

    All methods belong to the event loop. `unmap` gets memory that is not needed any more, to unmap it in a thread: that
    takes as long as copying a part of it.
    """

    on_device = False

    def __init__(self, most_bytes: int, most_chunks: int, unmap: Callable[[list[MappedFile]], None]) -> None:
        self.most_bytes = most_bytes
        self.most_chunks = most_chunks
        self.most_ahead_bytes = most_bytes
        """Limit of `ahead_bytes`; the chunk that was mapped first is unmapped first."""
        self.tombstones = Tombstones()
        """Chunks that were forgotten while others are being mapped."""
        self.deletions = Tombstones()
        """Chunks whose files were deleted while others are being mapped."""
        self.mapped_bytes = 0
        self.unlinked_bytes = 0
        """Mapped bytes of deleted files, which are in no capacity counter and are freed with their last leases."""
        self.ahead_bytes = 0
        """Mapped bytes of chunks that were not used yet."""
        self.on_pinned_access: Callable[[ChunkKey], None] | None = None
        """Called when a pinned chunk is read."""
        self.on_forget: Callable[[ChunkKey], None] | None = None
        """Called when a pinned chunk was removed."""
        self.on_gone: Callable[[ChunkKey], None] | None = None
        """Called when a chunk is not found here any more."""
        self._entries: OrderedDict[ChunkKey, Mapped] = OrderedDict()
        self._ahead: dict[ChunkKey, Mapped] = {}
        self._unmap = unmap
        self._unmapping: list[MappedFile] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Drop all chunks. Leased ones stay mapped until their leases end."""
        self._closed = True
        self.clear()
        self._hand_over()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def files(self) -> list[tuple[ChunkKey, MappedFile]]:
        """Return the mapped chunks. May be called from any thread."""
        return [(key, file) for key, entry in self._entries.copy().items() if (file := entry.file) is not None]

    def file(self, key: ChunkKey) -> MappedFile | None:
        """Return the mapping of a chunk, or None. May be called from any thread."""
        entry = self._entries.get(key)
        return entry.file if entry is not None else None

    # Leases

    def find(self, key: ChunkKey, purpose: Purpose) -> Lease | None:
        """Return a lease on a mapped chunk, or None; an access."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        self._used(entry)
        return self.serve(entry, purpose, counted=False)

    def add(
        self, key: ChunkKey, file: MappedFile, purpose: Purpose, *, findable: bool, is_ahead: bool = False
    ) -> Lease:
        """Add a chunk that was just mapped and return its first lease. It is not `findable` if its file was deleted
        meanwhile, and `is_ahead` if it was mapped for a future reader."""
        entry = self._entries.get(key) if findable else None
        if entry is not None and entry.unlinked:
            self._drop(entry)
            entry = None
        if entry is not None:
            self._unmap_soon(file)  # another read has mapped it too
            if not is_ahead:
                self._used(entry)
        else:
            entry = Mapped(key, file)
            self.mapped_bytes += entry.length_bytes
            entry.hot = findable and not self._closed
            if entry.hot:
                self._entries[key] = entry
                if is_ahead:
                    self._is_ahead(entry)
            else:
                self._mark(entry)
        lease = self.begin_lease(entry, purpose)
        self._trim()
        return lease

    def view(self, entry: Mapped, length_bytes: int) -> np.ndarray:
        """Return the first bytes of a chunk: uint8, read-only. Raises CacheClosed."""
        if self._closed or entry.file is None:
            raise CacheClosed("the cache is closed, and its memory given back")
        return entry.file.memory[HEADER_BYTES : HEADER_BYTES + length_bytes]

    def serve(self, entry: Mapped, purpose: Purpose, *, counted: bool) -> Lease:
        pinned = pins_in(entry.leases)
        lease = self.begin_lease(entry, purpose)
        if purpose is READ and pinned and self.on_pinned_access is not None:
            self.on_pinned_access(entry.key)  # ends the pin
        return lease

    def begin_lease(self, entry: Mapped, purpose: Purpose) -> Lease:
        entry.leases += ONE[purpose]
        return Lease(self, entry, purpose)

    def end_lease(self, entry: Mapped, purpose: Purpose) -> None:
        entry.leases -= ONE[purpose]
        if not entry.leases and (entry.unlinked or not entry.hot):
            self._drop(entry)

    def end_lease_from_anywhere(self, entry: Mapped, purpose: Purpose) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.end_lease, entry, purpose)

    # Deleted files

    def gone(self, key: ChunkKey) -> None:
        """Record that the file of a chunk was deleted or replaced. A leased chunk is found until its leases end, since its
        memory is taken until then in any case."""
        self.deletions.forget([key])
        entry = self._entries.get(key)
        if entry is not None:
            self._mark(entry)
            if not entry.leases:
                self._drop(entry)

    def forget(self, key: ChunkKey) -> None:
        """Record a deletion as `gone`, and make the chunk invisible at once."""
        self.tombstones.forget([key])
        entry = self._entries.get(key)
        if entry is not None:
            self._mark(entry)
            self._drop(entry)
            if pins_in(entry.leases) and self.on_forget is not None:
                self.on_forget(key)

    def clear(self) -> None:
        """Drop all chunks; leased ones are unmapped when their leases end."""
        for entry in list(self._entries.values()):
            self._drop(entry)

    def take_gone(self, keys: list[ChunkKey]) -> list[MappedFile]:
        """Record deletions as `gone`, and return the memory of chunks without a lease for the caller to unmap."""
        self._hand_over()
        for key in keys:
            self.gone(key)
        taken, self._unmapping = self._unmapping, []
        return taken

    def _is_ahead(self, entry: Mapped) -> None:
        entry.is_ahead = True
        self._ahead[entry.key] = entry
        self.ahead_bytes += entry.length_bytes

    def _used(self, entry: Mapped) -> None:
        if entry.is_ahead:
            entry.is_ahead = False
            del self._ahead[entry.key]
            self.ahead_bytes -= entry.length_bytes

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
        self._used(entry)
        entry.hot = False
        if not entry.leases and entry.file is not None:
            self.mapped_bytes -= entry.length_bytes
            self.unlinked_bytes -= entry.length_bytes if entry.unlinked else 0
            file, entry.file = entry.file, None
            self._unmap_soon(file)

    def _trim(self) -> None:
        while self.ahead_bytes > self.most_ahead_bytes:
            self._drop(next(iter(self._ahead.values())))
        for _ in range(len(self._entries)):
            if self.mapped_bytes <= self.most_bytes and len(self._entries) <= self.most_chunks:
                return
            key, entry = next(iter(self._entries.items()))
            if not entry.leases:
                self._drop(entry)
            else:
                self._entries.move_to_end(key)

    def _unmap_soon(self, file: MappedFile) -> None:
        if not self._unmapping and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon(self._hand_over)
        self._unmapping.append(file)

    def _hand_over(self) -> None:
        taken, self._unmapping = self._unmapping, []
        if taken:
            self._unmap(taken)
