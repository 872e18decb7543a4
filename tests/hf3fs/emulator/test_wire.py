"""The wire ABI: sizes, places and names that a client built against the real library relies on."""

import os
import struct
import uuid

import pytest

from tests.hf3fs.emulator.client import Client
from tests.hf3fs_emulator.wire import (
    ARGUMENTS,
    COMPLETION,
    SUBMISSION,
    Registration,
    RingTraits,
    entries_in,
    parse_registration,
    ring_bytes,
)

ID = uuid.UUID("01234567-89ab-cdef-0123-456789abcdef")


def test_sizes_of_the_structures() -> None:
    assert (ARGUMENTS.size, COMPLETION.size, SUBMISSION.size) == (56, 24, 16)


@pytest.mark.parametrize("entries", [1, 1024])
def test_size_of_a_ring(client: Client, entries: int) -> None:
    assert ring_bytes(entries) == 16 + 32 + 96 * (entries + 1) + 4096
    assert entries_in(ring_bytes(entries)) == entries
    ring = client.ring(entries=entries)
    assert ring.ior.entries == entries
    assert ring.size_for_entries(entries) == ring_bytes(entries)


def test_what_a_submission_looks_like_in_memory(client: Client) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, b"x" * 100), client.ring(entries=3)
    ring.prepare(client.iov[16:48], True, descriptor, 5)
    memory = bytes(ring.ior._memory._view)
    assert struct.unpack_from("<4i", memory) == (1, 0, 0, 0)
    (index,) = struct.unpack_from("<i", memory, 16 + 4 * 56 + 4 * 24)
    expected = (client.iov.iov._id, 16, os.fstat(descriptor).st_ino, 5, 32, 0)
    assert struct.unpack_from("<16s5Q", memory, 16 + index * 56) == expected


@pytest.mark.parametrize(
    ("registration", "name"),
    [
        (Registration(ID.bytes), f"{ID}"),
        (Registration(ID.bytes, block_bytes=4096), f"{ID}.b4096"),
        (Registration(ID.bytes, ring=RingTraits(True, 0)), f"{ID}.r0.t0"),
        (Registration(ID.bytes, ring=RingTraits(False, 16, timeout_ms=200)), f"{ID}.w16.t200"),
        (Registration(ID.bytes, ring=RingTraits(True, -8, flags=2)), f"{ID}.r-8.t0.f10"),
        (Registration(ID.bytes, ring=RingTraits(True, 0, priority=0)), f"{ID}.r0.ph.t0"),
        (Registration(ID.bytes, ring=RingTraits(True, 0, priority=2)), f"{ID}.r0.pl.t0"),
    ],
)
def test_names_of_registrations(registration: Registration, name: str) -> None:
    assert registration.name() == name
    assert parse_registration(name) == registration
