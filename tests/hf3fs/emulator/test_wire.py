"""The wire ABI: sizes, places and names that a client built against the real library relies on."""

import errno
import fcntl
import os
import struct
import uuid

import pytest

from tests.hf3fs.emulator.client import Client, fails
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
from tests.needs import needs_fuse

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


@pytest.mark.parametrize(
    "rest", [".b0", ".b", ".bx", ".t5", ".f10", ".ph", ".r", ".r0.f2", ".r0.px", ".x", ".", ".r0.t-1"]
)
def test_names_that_are_refused(rest: str) -> None:
    with pytest.raises(ValueError, match="attribute"):
        parse_registration(f"{ID}{rest}")


@needs_fuse
@pytest.mark.parametrize("kind", ["fuse"], indirect=True)
def test_registering_is_a_symlink(client: Client) -> None:
    iovs = client.mount / "3fs-virt/iovs"
    with fails(errno.EINVAL):
        os.symlink(f"/dev/shm/{client.shm.name}", iovs / "not-a-uuid")
    name = str(uuid.uuid4())
    os.symlink(f"/dev/shm/{client.shm.name}", iovs / name)
    assert os.readlink(iovs / name) == f"/dev/shm/{client.shm.name}"
    with pytest.raises(FileExistsError):
        os.symlink(f"/dev/shm/{client.shm.name}", iovs / f"{name}.b4096")
    os.unlink(iovs / name)
    assert not os.path.lexists(iovs / name)


def test_submit_semaphores_are_links_to_shared_memory(client: Client) -> None:
    for name in ("submit-ios", "submit-ios.ph", "submit-ios.pl"):
        target = os.readlink(client.mount / "3fs-virt/iovs" / name)
        assert target.startswith("/dev/shm/sem.hf3fs-submit-ios.")
        assert os.path.getsize(target) == 32


@needs_fuse
@pytest.mark.parametrize("kind", ["fuse"], indirect=True)
def test_ioctls(client: Client) -> None:
    descriptor = os.open(client.file("file"), os.O_RDONLY)
    assert struct.unpack("<I", fcntl.ioctl(descriptor, 0x80046802, bytes(4))) == (0x8F3F5FFF,)
    assert fcntl.ioctl(descriptor, 0x8004680B, bytes(4)) == bytes(4)
    with fails(errno.EINVAL):
        fcntl.ioctl(descriptor, 0x80046809, bytes(4))
    os.close(descriptor)
