"""The wire ABI of USRBIO: names of registrations, layout of a ring, ioctl numbers. Read from 3FS's source.

Little-endian and naturally aligned, as a C++ compiler lays it out on x86-64 and aarch64.
"""

from __future__ import annotations

import re
import struct
import uuid
from dataclasses import dataclass

VIRTUAL_DIRECTORY = "3fs-virt"
SHARED_MEMORY = "/dev/shm"
SEMAPHORE_LINKS = ("submit-ios.ph", "submit-ios", "submit-ios.pl")
"""In `3fs-virt/iovs`: high, normal and low priority."""

IOCTL_GET_MAGIC = 0x80046802
IOCTL_FSYNC = 0x8004680B
MAGIC = 0x8F3F5FFF

ARGUMENTS = struct.Struct("<16sQQQQQ")
"""buffer id, offset in the buffer, inode, offset in the file, length, userdata"""
COMPLETION = struct.Struct("<iiqQ")
"""index into the arguments, unused, result, userdata"""
SUBMISSION = struct.Struct("<i4xQ")
"""index into the arguments, userdata"""
MARKER_BYTES = 16
SEMAPHORE_BYTES = 32
_SLOT_BYTES = ARGUMENTS.size + COMPLETION.size + SUBMISSION.size
_PADDING_BYTES = 4096


def ring_bytes(entries: int) -> int:
    """Shared memory that a ring of `entries` takes. One slot is spare, to tell full from empty."""
    return MARKER_BYTES + SEMAPHORE_BYTES + _SLOT_BYTES * (entries + 1) + _PADDING_BYTES


def entries_in(size_bytes: int) -> int:
    """How many operations fit a ring of `size_bytes`; not positive when it is too small to be one."""
    return (size_bytes - _PADDING_BYTES - MARKER_BYTES - SEMAPHORE_BYTES) // _SLOT_BYTES - 1


@dataclass(frozen=True)
class RingTraits:
    for_read: bool
    io_depth: int
    """0: all that is there; > 0: exact batches; < 0: batches of up to so many."""
    priority: int = 1
    """Index into `SEMAPHORE_LINKS`."""


@dataclass(frozen=True)
class Registration:
    """What the name of a link in `3fs-virt/iovs` says."""

    id: bytes
    block_bytes: int = 0
    """0: one block, the whole buffer."""
    ring: RingTraits | None = None

    def name(self) -> str:
        parts = [str(uuid.UUID(bytes=self.id))]
        if self.block_bytes:
            parts.append(f"b{self.block_bytes}")
        if self.ring is not None:
            parts.append(f"{'r' if self.ring.for_read else 'w'}{self.ring.io_depth}")
            if self.ring.priority != 1:
                parts.append("ph" if self.ring.priority == 0 else "pl")
        return ".".join(parts)


_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_PRIORITIES = {"ph": 0, "p": 1, "pn": 1, "pl": 2}


def parse_registration(name: str) -> Registration:
    """The reverse of `Registration.name`. Raises ValueError, which the daemon answers as EINVAL."""
    identity, *attributes = name.split(".")
    if not _UUID.fullmatch(identity):
        raise ValueError(f"expected a UUID, found {identity!r}")
    block_bytes = 0
    direction: tuple[bool, int] | None = None
    priority = 1
    for_rings_only = False
    for attribute in attributes:
        kind, value = attribute[:1], attribute[1:]
        if kind == "b" and value.isdecimal() and int(value):
            block_bytes = int(value)
        elif kind in ("r", "w") and re.fullmatch(r"-?\d+", value):
            direction = (kind == "r", int(value))
        elif attribute in _PRIORITIES:
            priority, for_rings_only = _PRIORITIES[attribute], True
        else:
            raise ValueError(f"{name}: unknown attribute {attribute!r}")
    if direction is None and for_rings_only:
        raise ValueError(f"{name}: attributes of a ring without r<depth> or w<depth>")
    ring = None if direction is None else RingTraits(*direction, priority)
    return Registration(uuid.UUID(identity).bytes, block_bytes, ring)
