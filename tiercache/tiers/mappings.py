"""Chunks of a tier that are mapped into this process, and the leases on them.

Each was verified when it was mapped, and is trusted since, as a hot chunk is. It is found here as long as its file has its
name; memory of a file that has lost it goes when the last lease has ended.
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

_NOTHING = np.empty(0, dtype=np.uint8)


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
        """Its file was deleted, or replaced, by whomever."""
        self.is_ahead = False
        """It was mapped before anybody asked for it, and nobody has yet."""


class Mappings:
    """At most `most_bytes` and `most_chunks` are kept that nobody holds; the one that was used longest ago goes.

    All methods belong to the event loop. `unmap` gets memory that nobody needs any more: to let go of it takes as long as to
    copy a part of it, so it is done in a thread.
    """

    on_device = False

    def __init__(self, most_bytes: int, most_chunks: int, unmap: Callable[[list[MappedFile]], None]) -> None:
        self.most_bytes = most_bytes
        self.most_chunks = most_chunks
        self.most_ahead_bytes = most_bytes
        """Of chunks that nobody has used yet: the one that was mapped first goes."""
        self.tombstones = Tombstones()
        """Chunks that were forgotten while others are being mapped."""
        self.deletions = Tombstones()
        """Chunks whose files were deleted while others are being mapped."""
        self.mapped_bytes = 0
        self.unlinked_bytes = 0
        """Of these, memory of files that were deleted: taken until the last lease ends, and in no count."""
        self.ahead_bytes = 0
        """Of these, what nobody has used yet."""
        self.on_pinned_access: Callable[[ChunkKey], None] | None = None
        """As those of the CPU tier."""
        self.on_forget: Callable[[ChunkKey], None] | None = None
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
        """Nothing is found any more. What is held stays mapped until its leases end."""
        self._closed = True
        self.clear()
        self._hand_over()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def files(self) -> list[tuple[ChunkKey, MappedFile]]:
        """What is mapped. From any thread."""
        return [(key, file) for key, entry in self._entries.copy().items() if (file := entry.file) is not None]

    def file(self, key: ChunkKey) -> MappedFile | None:
        """From any thread."""
        entry = self._entries.get(key)
        return entry.file if entry is not None else None

    # Leases

    def find(self, key: ChunkKey, purpose: Purpose) -> Lease | None:
        """A lease on a chunk that is mapped."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        self._asked_for(entry)
        return self.serve(entry, purpose, counted=False)

    def add(
        self, key: ChunkKey, file: MappedFile, purpose: Purpose, *, findable: bool, is_ahead: bool = False
    ) -> Lease:
        """A chunk that was mapped just now, with its first lease. Not `findable`: its file was deleted meanwhile.
        `is_ahead`: nobody has asked for it."""
        entry = self._entries.get(key) if findable else None
        if entry is not None and entry.unlinked:
            self._drop(entry)
            entry = None
        if entry is not None:
            self._let_go(file)  # somebody else has mapped it too
            if not is_ahead:
                self._asked_for(entry)
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
        held = pins_in(entry.leases)
        lease = self.begin_lease(entry, purpose)
        if purpose is READ and held and self.on_pinned_access is not None:
            self.on_pinned_access(entry.key)  # which ends the hold
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

    # What becomes of the files

    def gone(self, key: ChunkKey) -> None:
        """Its file was deleted, or replaced. A chunk that somebody holds is found until he lets go of it: its memory is
        taken so long in any case."""
        self.deletions.forget([key])
        entry = self._entries.get(key)
        if entry is not None:
            self._mark(entry)
            if not entry.leases:
                self._drop(entry)

    def forget(self, key: ChunkKey) -> None:
        """As `gone`, and nobody finds it from now on."""
        self.tombstones.forget([key])
        entry = self._entries.get(key)
        if entry is not None:
            self._mark(entry)
            self._drop(entry)
            if pins_in(entry.leases) and self.on_forget is not None:
                self.on_forget(key)

    def clear(self) -> None:
        """Let everything go; what is held when its leases end."""
        for entry in list(self._entries.values()):
            self._drop(entry)

    def take_gone(self, keys: list[ChunkKey]) -> list[MappedFile]:
        """As `gone`, and returns the memory of those that nobody holds, for the caller to let go of."""
        self._hand_over()
        for key in keys:
            self.gone(key)
        taken, self._unmapping = self._unmapping, []
        return taken

    def _is_ahead(self, entry: Mapped) -> None:
        entry.is_ahead = True
        self._ahead[entry.key] = entry
        self.ahead_bytes += entry.length_bytes

    def _asked_for(self, entry: Mapped) -> None:
        if entry.is_ahead:
            entry.is_ahead = False
            del self._ahead[entry.key]
            self.ahead_bytes -= entry.length_bytes

    def _mark(self, entry: Mapped) -> None:
        if not entry.unlinked:
            entry.unlinked = True
            self.unlinked_bytes += entry.length_bytes

    def _drop(self, entry: Mapped) -> None:
        """Nobody finds it any more, and its memory goes as soon as nobody holds it."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            if self.on_gone is not None:
                self.on_gone(entry.key)
        self._asked_for(entry)
        entry.hot = False
        if not entry.leases and entry.file is not None:
            self.mapped_bytes -= entry.length_bytes
            self.unlinked_bytes -= entry.length_bytes if entry.unlinked else 0
            file, entry.file = entry.file, None
            self._let_go(file)

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

    def _let_go(self, file: MappedFile) -> None:
        if not self._unmapping and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon(self._hand_over)
        self._unmapping.append(file)

    def _hand_over(self) -> None:
        taken, self._unmapping = self._unmapping, []
        if taken:
            self._unmap(taken)
