"""What lies in a tier's directory on a simulated disk, seen past all calls, and what must hold of it."""

from __future__ import annotations

import functools
import random
import re
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import xxhash

from tests.torture.simulation.disk import Disk
from tests.torture.simulation.inodes import Directory, File
from tests.torture.simulation.oracle import Violation
from tiercache.core.header import HEADER_BYTES, PACKED_BYTES, Header, HeaderError
from tiercache.core.keys import HEX_KEY
from tiercache.tiers.files.directory import SUBDIRECTORY

_LIST = re.compile(r"recent-[0-9a-f]{32}\.\d+")
_TOP = re.compile(r"[0-9a-f]{2}")
_CHUNK = re.compile(HEX_KEY)
_PENDING = re.compile(r"([0-9a-f]{32})\.(0|[1-9]\d*)")
_COUNT = struct.Struct("<8sQ")
_COUNTED = b"TIERLEDG"
_BLOCK_BYTES = 4096
_ROTTEN = 2
_SHORTEST_BYTES = 8
"""Of a payload."""


@dataclass
class Found:
    """Of one look."""

    chunks: dict[bytes, File] = field(default_factory=dict)
    pending: dict[str, int] = field(default_factory=dict)
    """Bytes of files that are being written, by the id of their writer, where that one's lock file is there."""
    directories: list[Directory] = field(default_factory=list)
    counted_bytes: int | None = None
    """What the counter says; None where it says nothing."""
    others: list[str] = field(default_factory=list)
    """Names that are of none of these kinds."""

    @functools.cached_property
    def occupied_bytes(self) -> int:
        """Of all that counts against the cap."""
        blocks = sum([file.blocks.bit_count() for file in self.chunks.values()]) + len(self.directories)
        return blocks * _BLOCK_BYTES + sum(self.pending.values())


class Place:
    """`<root>/kv` of a disk, in whose subdirectory chunks lie; `cap_bytes` is that of every process that runs."""

    def __init__(self, disk: Disk, cap_bytes: int) -> None:
        self.disk = disk
        self.cap_bytes = cap_bytes
        self.is_certain = True
        """False after a power cut, until all has been counted anew: the counter's bytes are as old as they may be."""
        self.kept_from_s = 0.0
        """When the cap is kept again that was lowered."""
        self._found = Found()
        self._changes = -1
        """The disk's, when that was found."""

    def look(self) -> Found:
        """It holds until something on the disk changes, and is nobody's to change."""
        if self._changes != self.disk.changes:
            self._changes = self.disk.changes
            self._found = self._look()
        return self._found

    def _look(self) -> Found:
        found = Found()
        root = self._root()
        if root is None:
            return found
        locks = _locks_of(root)
        for name, inode in root.names.items():
            if isinstance(inode, Directory) and _TOP.fullmatch(name):
                found.directories.append(inode)
                chunks = found.chunks
                for below, file in inode.names.items():
                    if type(file) is File and (key := _key_of(below)):
                        chunks[key] = file
                    elif not _is_pending(below, file, locks, found):
                        found.others.append(f"{name}/{below}")
            elif isinstance(inode, Directory) and name == ".tiercache":
                self._look_at_own(inode, locks, found)
            elif name != "tiercache.json":
                found.others.append(name)
        return found

    def _look_at_own(self, private: Directory, locks: Collection[str], found: Found) -> None:
        for name, inode in private.names.items():
            if name == "ledger" and isinstance(inode, File):
                raw = inode.read(0, _COUNT.size)
                magic, count = _COUNT.unpack(raw) if len(raw) == _COUNT.size else (b"", 0)
                found.counted_bytes = count if magic == _COUNTED else None
            elif name == "tmp" and isinstance(inode, Directory):
                for below, file in inode.names.items():
                    if not _is_pending(below, file, locks, found):
                        found.others.append(f".tiercache/tmp/{below}")
            elif not _LIST.fullmatch(name):
                found.others.append(f".tiercache/{name}")

    def _root(self) -> Directory | None:
        """Return the directory of chunks."""
        configured = self.disk.top.names.get("kv")
        root = configured.names.get(SUBDIRECTORY) if isinstance(configured, Directory) else None
        return root if isinstance(root, Directory) else None

    @property
    def is_gone(self) -> bool:
        """True if the directory was removed and not made anew."""
        return not isinstance(self.disk.top.names.get("kv"), Directory)

    @property
    def is_set_up(self) -> bool:
        """Whether a cache was open here, and its bookkeeping is there: then a full device is no reason not to start."""
        root = self._root()
        if root is None or "tiercache.json" not in root.names:
            return False
        private = root.names.get(".tiercache")
        return isinstance(private, Directory) and "tmp" in private.names and self.look().counted_bytes is not None

    def check(self, now_s: float) -> None:
        """At every moment: nothing lies there that is not counted, and no more than the cap allows for."""
        if not self.is_certain:
            return
        found = self.look()
        if found.counted_bytes is None:
            return
        if found.occupied_bytes > found.counted_bytes:
            raise Violation(
                f"{self.disk.root}: {found.occupied_bytes} bytes are occupied, and {found.counted_bytes} counted"
            )
        if now_s >= self.kept_from_s and found.occupied_bytes > self.cap_bytes:
            raise Violation(f"{self.disk.root}: {found.occupied_bytes} bytes are occupied, and {self.cap_bytes} may be")

    def check_count(self, unused_bytes: int) -> None:
        """Where nobody writes and all was looked at: the count is what is there, and what one process has reserved."""
        found = self.look()
        if found.counted_bytes != found.occupied_bytes + unused_bytes:
            raise Violation(
                f"{self.disk.root}: expected a count of {found.occupied_bytes} bytes and {unused_bytes} that are reserved, "
                f"found {found.counted_bytes}"
            )

    def rot(self, chance: random.Random) -> None:
        """A bit of two chunks changes on the device, in the header or in the payload."""
        chunks = self.look().chunks
        for key in chance.sample(sorted(chunks), min(_ROTTEN, len(chunks))):
            at = chance.choice((chance.randrange(PACKED_BYTES), HEADER_BYTES + chance.randrange(_SHORTEST_BYTES)))
            chunks[key].whole()[at] ^= 1 << chance.randrange(8)

    def check_left(self, known: Iterable[bytes]) -> None:
        """When the last cache is closed: chunks that are known, and the few files that belong to the directory."""
        found = self.look()
        strays = [*found.others, *found.pending]
        if strays:
            raise Violation(f"{self.disk.root}: left behind: {strays}")
        unknown = found.chunks.keys() - set(known)
        if unknown:
            raise Violation(f"{self.disk.root}: chunks that were never put: {unknown}")


def _locks_of(root: Directory) -> Collection[str]:
    """The names beside which the lock files of instances lie."""
    private = root.names.get(".tiercache")
    temporary = private.names.get("tmp") if isinstance(private, Directory) else None
    return temporary.names.keys() if isinstance(temporary, Directory) else ()


def _is_pending(name: str, inode: object, locks: Collection[str], found: Found) -> bool:
    """Return True if the file is being written; it is counted then."""
    pending = _PENDING.fullmatch(name)
    if pending is None or not isinstance(inode, File) or f"{pending[1]}.lock" not in locks:
        return False
    found.pending[pending[1]] = found.pending.get(pending[1], 0) + inode.block_count * _BLOCK_BYTES
    return True


@functools.lru_cache(4096)
def _key_of(name: str) -> bytes | None:
    return bytes.fromhex(name) if _CHUNK.fullmatch(name) else None


def is_good(key: bytes, file: File) -> bool:
    """Whether a chunk can be read from what lies there."""
    try:
        header = Header.check(file.read(0, PACKED_BYTES), key, None)
    except HeaderError:
        return False
    payload = file.read(HEADER_BYTES, header.payload_bytes)
    return len(payload) == header.payload_bytes and xxhash.xxh3_64_intdigest(payload) == header.payload_checksum
