"""Rules 6 to 8, 13 and 14: making a ring, filling it, batches, threads, its end."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.hf3fs.emulator.client import PATIENCE_S, Client, run
from tests.hf3fs_emulator import Hf3fsEmulator


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
