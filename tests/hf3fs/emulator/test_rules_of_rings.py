"""Rules 6 to 8, 13 and 14: making a ring, filling it, batches, threads, its end."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hf3fs_fuse.io import make_ioring

from tests.hf3fs.emulator.client import PATIENCE_S, Client, fails, run
from tests.hf3fs_emulator import Hf3fsEmulator


def prepare(client: Client, ring: Any, descriptor: int, operations: int) -> list[Any]:
    pieces = [client.iov[number : number + 1] for number in range(operations)]
    for number, piece in enumerate(pieces):
        ring.prepare(piece, True, descriptor, number)
    return pieces


def let_the_daemon_look(client: Client, descriptor: int) -> None:
    """When this returns, it has looked at what all rings had at the call: an operation of a younger ring has ended."""
    assert run(client.ring(), client.iov[-1:], True, descriptor) == 1


def test_rule_6_impossible_rings_are_refused(client: Client) -> None:
    for settings in ({"timeout": -1}, {"entries": 4, "io_depth": 5}, {"entries": 0}, {"entries": -1}):
        with fails(errno.EINVAL):
            client.ring(**settings)


def test_rule_6_mount_point_must_be_one(client: Client) -> None:
    client.mount = client.mount.parent
    with fails(errno.ENOENT):
        client.ring()


def test_rule_6_one_direction_each(client: Client) -> None:
    descriptor = client.open("file", os.O_RDWR, b"x")
    for for_read in (True, False):
        with fails(errno.EINVAL):
            client.ring(for_read).prepare(client.iov[:1], not for_read, descriptor, 0)


def test_rule_6_priority_has_no_effect(client: Client) -> None:
    ring = client.ring(priority=-1)
    names = os.listdir(client.mount / "3fs-virt/iovs")
    assert not [name for name in names if ".r0" in name and (".ph" in name or ".pl" in name)]
    assert run(ring, client.iov[:1], True, client.open("file", os.O_RDONLY, b"x")) == 1


def test_rule_7_length_is_that_of_the_slice(client: Client) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, b"123456789"), client.ring()
    assert run(ring, client.iov[:4], True, descriptor, 2) == 4
    assert bytes(client.memory[:5]) == b"3456\0"


def test_rule_7_empty_slice_is_refused(client: Client) -> None:
    descriptor = client.open("file", os.O_RDONLY, b"x")
    with fails(errno.EINVAL):
        client.ring().prepare(client.iov[5:5], True, descriptor, 0)


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, 1 << 30), (1 << 30, 1)])
def test_rule_7_out_of_range_is_refused(client: Client, start: int, length: int) -> None:
    """Slices are cut to the buffer: only a piece that was made by hand can lie elsewhere."""
    descriptor = client.open("file", os.O_RDONLY, b"x")
    inner = client.iov.iov
    with fails(errno.EINVAL):
        client.ring().prepare(inner._piece(inner._address + start, length), True, descriptor, 0)


def test_rule_7_descriptor_must_be_registered(client: Client) -> None:
    descriptor = os.open(client.file("file", b"x"), os.O_RDONLY)
    with fails(errno.EBADF):
        client.ring().prepare(client.iov[:1], True, descriptor, 0)
    os.close(descriptor)


def test_rule_7_slot_frees_when_its_completion_was_waited_for(client: Client) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, b"12345678"), client.ring(entries=4)
    prepare(client, ring, descriptor, 4)
    with pytest.raises(BlockingIOError):
        ring.prepare(client.iov[4:5], True, descriptor, 4)
    ring.submit()
    assert ring.ior._memory.completed.wait(PATIENCE_S)
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


def test_rule_7_may_run_before_it_is_submitted(client: Client, emulator: Hf3fsEmulator) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, b"12"), client.ring()
    emulator.control.hang()
    first, second = client.iov[:1], client.iov[1:2]
    ring.prepare(first, True, descriptor, 0).submit()
    emulator.control.until_hanging(1)
    ring.prepare(second, True, descriptor, 1)
    emulator.control.resume()
    done = ring.wait(min_results=2, timeout=PATIENCE_S)
    assert {id(piece) for piece in done} == {id(first), id(second)}


def test_rule_8_depth_0_issues_everything(client: Client) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, bytes(8)), client.ring(io_depth=0)
    prepare(client, ring, descriptor, 5)
    assert len(ring.submit().wait(min_results=5, timeout=PATIENCE_S)) == 5


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
    for batch in (2, 2, 1):  # there is a wake-up for each
        assert ring.ior._memory.completed.wait(PATIENCE_S), batch
    assert not ring.ior._memory.completed.try_wait()
    assert len(ring.wait(max_results=5)) == 5


def test_rule_8_negative_depth_with_a_timeout_never_issues_a_partial_batch(client: Client) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, bytes(8)), client.ring(io_depth=-3, timeout=60_000)
    prepare(client, ring, descriptor, 2)
    ring.submit()
    let_the_daemon_look(client, descriptor)
    assert ring.wait(max_results=2) == []
    ring.prepare(client.iov[2:3], True, descriptor, 0).submit()
    assert len(ring.wait(min_results=3, timeout=PATIENCE_S)) == 3


def test_rule_8_newer_daemons_refuse_a_negative_depth(kind: str) -> None:
    with Hf3fsEmulator(fuse=kind == "fuse", negative_io_depth=False) as emulator:
        with fails(errno.EINVAL):
            make_ioring(str(emulator.mount), 4, io_depth=-1)
        make_ioring(str(emulator.mount), 4, io_depth=0)


def test_rule_13_submitter_and_waiter_may_be_two_threads(client: Client) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, bytes(8)), client.ring()
    with ThreadPoolExecutor(1) as waiter:
        waiting = waiter.submit(ring.wait, min_results=3, timeout=PATIENCE_S)
        prepare(client, ring, descriptor, 3)
        ring.submit()
        assert len(waiting.result()) == 3


def test_rule_13_second_submitter_is_refused(client: Client) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, bytes(8)), client.ring()
    prepare(client, ring, descriptor, 1)
    with ThreadPoolExecutor(1) as other:
        with pytest.raises(RuntimeError, match="only one thread may prepare and submit"):
            other.submit(prepare, client, ring, descriptor, 1).result()
        with pytest.raises(RuntimeError, match="only one thread may prepare and submit"):
            other.submit(ring.submit).result()


def test_rule_13_second_waiter_is_refused(client: Client) -> None:
    ring = client.ring()
    ring.wait()
    with ThreadPoolExecutor(1) as other, pytest.raises(RuntimeError, match="only one thread may wait"):
        other.submit(ring.wait).result()


def test_rule_13_thread_that_ended_passes_the_ring_on(client: Client) -> None:
    ring = client.ring()
    earlier = threading.Thread(target=ring.wait)
    earlier.start()
    earlier.join()
    assert ring.wait() == []


def test_rule_13_userdata_is_delivered_with_a_warning(client: Client) -> None:
    descriptor, ring, piece = client.open("file", os.O_RDONLY, b"x"), client.ring(), client.iov[:1]
    with pytest.warns(RuntimeWarning, match="without the GIL"):
        ring.prepare(piece, True, descriptor, 0, userdata="mine")
    (done,) = ring.submit().wait(min_results=1, timeout=PATIENCE_S)
    assert done is piece
    assert piece.userdata == "mine"


def test_rule_14_ring_that_goes_takes_its_registration_along(client: Client, emulator: Hf3fsEmulator) -> None:
    rings = [client.ring(), client.ring(flags=1)]
    assert emulator.control.statistics().rings == 2
    rings.clear()
    assert emulator.control.statistics().rings == 0


def test_rule_14_flags_from_2_leak_the_registration(mortal_client: Client, mortal: Hf3fsEmulator) -> None:
    ring = mortal_client.ring(flags=2)
    del ring
    assert mortal.control.statistics().rings == 1


def test_destroyed_ring_is_of_no_use(client: Client, emulator: Hf3fsEmulator) -> None:
    descriptor, ring, piece = client.open("file", os.O_RDONLY, b"x"), client.ring(), client.iov[:1]
    ring.prepare(piece, True, descriptor, 0)
    ring.ior.destroy()
    ring.ior.destroy()
    with fails(errno.EINVAL):
        ring.submit()
    assert run(client.ring(), piece, True, descriptor) == 1, "a slice outlives the ring that it was queued in"
    assert emulator.control.statistics().rings == 0


def test_many_operations_keep_their_order_of_bytes(client: Client) -> None:
    content = os.urandom(1 << 16)
    descriptor, ring = client.open("file", os.O_RDONLY, content), client.ring(entries=7)
    pieces = [client.iov[start : start + 1000] for start in range(0, len(content), 1000)]
    done, waiting = 0, list(enumerate(pieces))
    while done < len(pieces):
        try:
            while waiting:
                ring.prepare(waiting[-1][1], True, descriptor, waiting[-1][0] * 1000)
                waiting.pop()
        except BlockingIOError:
            pass
        done += len(ring.submit().wait(max_results=7, min_results=1, timeout=PATIENCE_S))
    assert bytes(client.memory[: len(content)]) == content
