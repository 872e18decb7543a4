"""Rules of 3FS's client and daemon that the tier has to get along with: its tests would show nothing on an emulator without
them. What the tier's tests (tests/hf3fs/tier) show by themselves of the emulator is not repeated here."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
from hf3fs_fuse.io import deregister_fd, force_fsync, make_iovec, register_fd

from tests.hf3fs.emulator.client import PATIENCE_S, Client, fails, run
from tests.hf3fs_emulator import Hf3fsEmulator
from tests.hf3fs_emulator.client.mounts import add_link, remove_link
from tests.needs import needs_fuse

BLOCK = 4096


# Descriptors


def test_rule_2_access_mode_is_kept(client: Client) -> None:
    client.file("file", b"x")
    reading, writing = client.open("file", os.O_RDONLY), client.open("file", os.O_WRONLY)
    both = client.open("file", os.O_RDWR)
    read_ring, write_ring = client.ring(True), client.ring(False)
    for ring, read, descriptor in ((read_ring, True, writing), (write_ring, False, reading)):
        with fails(errno.EACCES):
            ring.prepare(client.iov[:1], read, descriptor, 0)
    assert run(read_ring, client.iov[:1], True, both) == 1
    assert run(write_ring, client.iov[:1], False, both) == 1


def test_rule_3_old_inode_stays_bound_to_a_number_closed_too_early(client: Client) -> None:
    client.file("old", b"old")
    client.file("new", b"new")
    descriptor = os.open(client.mount / "old", os.O_RDONLY)
    register_fd(descriptor)
    os.close(descriptor)
    deregister_fd(descriptor)  # too late: does nothing
    assert os.open(client.mount / "new", os.O_RDONLY) == descriptor
    with fails(errno.EINVAL):
        register_fd(descriptor)
    assert run(client.ring(), client.iov[:3], True, descriptor) == 3
    assert bytes(client.memory[:3]) == b"old"
    deregister_fd(descriptor)  # the number is on 3FS again, so now it does
    register_fd(descriptor)
    assert run(client.ring(), client.iov[:3], True, descriptor) == 3
    assert bytes(client.memory[:3]) == b"new"
    deregister_fd(descriptor)
    os.close(descriptor)


@needs_fuse
@pytest.mark.parametrize("kind", ["fuse"], indirect=True)
def test_rule_3_deregistering_does_nothing_while_the_daemon_is_dead(
    mortal_client: Client, mortal: Hf3fsEmulator
) -> None:
    descriptor = mortal_client.open("file", os.O_RDONLY, b"x")
    mortal.kill()
    deregister_fd(descriptor)
    mortal.restart()
    fresh = os.open(mortal_client.mount / "file", os.O_RDONLY)
    os.dup2(fresh, descriptor, inheritable=False)
    with fails(errno.EINVAL):
        register_fd(descriptor)
    os.close(fresh)
    mortal_client.recover()


# Buffers and rings


def test_rule_4_slices_do_not_keep_the_registration(client: Client) -> None:
    shm = SharedMemory(create=True, size=4096)
    iov = make_iovec(shm, str(client.mount))
    piece = iov[:1]
    descriptor, ring = client.open("file", os.O_RDONLY, b"x"), client.ring()
    assert run(ring, piece, True, descriptor) == 1
    del iov
    assert run(ring, piece, True, descriptor) == -errno.EINVAL
    shm.close()
    shm.unlink()


def prepare(client: Client, ring: Any, descriptor: int, operations: int) -> list[Any]:
    pieces = [client.iov[number : number + 1] for number in range(operations)]
    for number, piece in enumerate(pieces):
        ring.prepare(piece, True, descriptor, number)
    return pieces


def let_the_daemon_look(client: Client, descriptor: int) -> None:
    """When this returns, it has looked at what all rings had at the call: an operation of a younger ring has ended."""
    assert run(client.ring(), client.iov[-1:], True, descriptor) == 1


def test_rule_7_slot_frees_when_its_completion_was_waited_for(client: Client) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, b"12345678"), client.ring(entries=4)
    prepare(client, ring, descriptor, 4)
    with pytest.raises(BlockingIOError):
        ring.prepare(client.iov[4:5], True, descriptor, 4)
    ring.submit()
    let_the_daemon_look(client, descriptor)
    with pytest.raises(BlockingIOError):
        ring.prepare(client.iov[4:5], True, descriptor, 4)
    (_,) = ring.wait(max_results=1)
    ring.prepare(client.iov[4:5], True, descriptor, 4)
    assert len(ring.submit().wait(min_results=4, timeout=PATIENCE_S)) == 4


def test_rule_7_early_operation_holds_back_the_room_of_later_ones(client: Client, emulator: Hf3fsEmulator) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, b"123"), client.ring(entries=2, io_depth=1)
    emulator.control.hold()
    slow, fast, later = client.iov[:1], client.iov[1:2], client.iov[2:3]
    ring.prepare(slow, True, descriptor, 0).prepare(fast, True, descriptor, 1).submit()
    assert ring.wait(min_results=1, timeout=PATIENCE_S) == [fast]
    with pytest.raises(BlockingIOError):  # one of two entries is free, and yet
        ring.prepare(later, True, descriptor, 2)
    emulator.control.resume()
    assert ring.wait(min_results=1, timeout=PATIENCE_S) == [slow]
    assert run(ring, later, True, descriptor, 2) == 1


def test_rule_8_positive_depth_issues_exact_batches_only(client: Client) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, bytes(8)), client.ring(io_depth=3)
    prepare(client, ring, descriptor, 5)
    assert len(ring.submit().wait(min_results=3, timeout=PATIENCE_S)) == 3
    ring.submit()
    let_the_daemon_look(client, descriptor)
    assert ring.wait(max_results=5) == []
    ring.prepare(client.iov[6:7], True, descriptor, 0).submit()
    assert len(ring.wait(min_results=3, timeout=PATIENCE_S)) == 3


def test_rule_8_negative_depth_issues_up_to_so_many(client: Client, emulator: Hf3fsEmulator) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, bytes(8)), client.ring(io_depth=-2)
    emulator.control.hang()
    prepare(client, ring, descriptor, 5)
    ring.submit()
    emulator.control.until_hanging(5)
    emulator.control.resume()
    assert len(ring.wait(min_results=5, timeout=PATIENCE_S)) == 5


def test_rule_13_a_second_submitter_and_a_second_waiter_are_refused(client: Client) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, bytes(8)), client.ring()
    prepare(client, ring, descriptor, 1)
    with ThreadPoolExecutor(1) as other:
        with pytest.raises(RuntimeError, match="only one thread may prepare and submit"):
            other.submit(prepare, client, ring, descriptor, 1).result()
        with pytest.raises(RuntimeError, match="only one thread may prepare and submit"):
            other.submit(ring.submit).result()
        ring.wait()
        with pytest.raises(RuntimeError, match="only one thread may wait"):
            other.submit(ring.wait).result()


def test_rule_14_ring_that_goes_takes_its_registration_along(client: Client, emulator: Hf3fsEmulator) -> None:
    rings = [client.ring(), client.ring(flags=1)]
    assert emulator.control.statistics().rings == 2
    rings.clear()
    assert emulator.control.statistics().rings == 0


# Results


def test_rule_10_short_at_the_end_and_nothing_beyond(client: Client) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, b"abc"), client.ring()
    client.memory[:8] = b"........"
    assert run(ring, client.iov[:8], True, descriptor, 1) == 2
    assert bytes(client.memory[:8]) == b"bc......"
    assert run(ring, client.iov[:8], True, descriptor, 3) == 0
    assert run(ring, client.iov[:8], True, descriptor, 1 << 40) == 0
    assert bytes(client.memory[:8]) == b"bc......"


def holes(client: Client) -> Path:
    """A block of 1s, one that was never written, one of 2s, and two more that were never written."""
    path = client.mount / "holes"
    with path.open("wb") as file:
        file.write(b"1" * BLOCK)
        file.seek(2 * BLOCK)
        file.write(b"2" * BLOCK)
        file.truncate(5 * BLOCK)
    return path


def test_rule_10_hole_is_zeros_when_data_follows(client: Client) -> None:
    descriptor = client.open(holes(client).name, os.O_RDONLY)
    client.memory[: 3 * BLOCK] = b"." * 3 * BLOCK
    assert run(client.ring(), client.iov[: 3 * BLOCK], True, descriptor) == 3 * BLOCK
    assert bytes(client.memory[: 3 * BLOCK]) == b"1" * BLOCK + bytes(BLOCK) + b"2" * BLOCK


def test_rule_10_hole_without_data_after_it_is_untouched(client: Client) -> None:
    descriptor, ring = client.open(holes(client).name, os.O_RDONLY), client.ring()
    client.memory[: 2 * BLOCK] = b"." * 2 * BLOCK
    assert run(ring, client.iov[: 2 * BLOCK], True, descriptor) == BLOCK
    assert bytes(client.memory[: 2 * BLOCK]) == b"1" * BLOCK + b"." * BLOCK
    client.memory[:BLOCK] = b"." * BLOCK
    assert run(ring, client.iov[:BLOCK], True, descriptor, 3 * BLOCK) == 0
    assert bytes(client.memory[:BLOCK]) == b"." * BLOCK


def test_rule_11_unknown_inode(mortal_client: Client, mortal: Hf3fsEmulator) -> None:
    descriptor = mortal_client.open("file", os.O_RDONLY, b"x")
    mortal.restart()
    add_link(f"/dev/shm/{mortal_client.shm.name}", mortal_client.iov.link)
    assert run(mortal_client.ring(), mortal_client.iov[:1], True, descriptor) == -errno.EBADF
    remove_link(mortal_client.iov.link)
    mortal_client.recover()


@needs_fuse
@pytest.mark.parametrize("kind", ["fuse"], indirect=True)
def test_rule_12_size_lags_until_it_is_forced(client: Client) -> None:
    descriptor = client.open("file", os.O_RDWR, b"")
    assert run(client.ring(False), client.iov[:100], False, descriptor) == 100
    assert os.stat(client.mount / "file").st_size == 0
    assert os.fstat(descriptor).st_size == 0
    assert run(client.ring(), client.iov[:200], True, descriptor) == 100, "rings do not ask for the size"
    assert force_fsync(descriptor) == -1
    assert os.stat(client.mount / "file").st_size == 100
