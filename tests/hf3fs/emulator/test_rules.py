"""Rules of 3FS's client and daemon that the tier has to get along with: its tests would show nothing on an emulator without
them. What the tier's tests (tests/hf3fs/tier) show by themselves of the emulator is not repeated here."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hf3fs_fuse.io import deregister_fd, force_fsync, register_fd

from tests.hf3fs.emulator.client import PATIENCE_S, Client, fails, run
from tests.needs import needs_fuse

# Descriptors


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


# Buffers and rings


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


def test_rule_8_positive_depth_issues_exact_batches_only(client: Client) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, bytes(8)), client.ring(io_depth=3)
    prepare(client, ring, descriptor, 5)
    assert len(ring.submit().wait(min_results=3, timeout=PATIENCE_S)) == 3
    ring.submit()
    let_the_daemon_look(client, descriptor)
    assert ring.wait(max_results=5) == []
    ring.prepare(client.iov[6:7], True, descriptor, 0).submit()
    assert len(ring.wait(min_results=3, timeout=PATIENCE_S)) == 3


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


# Results


def test_rule_10_short_at_the_end_and_nothing_beyond(client: Client) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, b"abc"), client.ring()
    client.memory[:8] = b"........"
    assert run(ring, client.iov[:8], True, descriptor, 1) == 2
    assert bytes(client.memory[:8]) == b"bc......"
    assert run(ring, client.iov[:8], True, descriptor, 3) == 0
    assert run(ring, client.iov[:8], True, descriptor, 1 << 40) == 0
    assert bytes(client.memory[:8]) == b"bc......"


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
