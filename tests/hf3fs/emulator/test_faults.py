"""Faults on command."""

import errno
import os
import time

import pytest

from tests.hf3fs.emulator.client import PATIENCE_S, Client, fails, run
from tests.hf3fs_emulator import Hf3fsEmulator
from tests.needs import needs_fuse


def test_next_operations_fail(client: Client, emulator: Hf3fsEmulator) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, b"x"), client.ring()
    struck_before = emulator.control.statistics().faults_struck
    emulator.control.fail(errno.EREMOTEIO, count=2)
    results = [run(ring, client.iov[:1], True, descriptor) for _ in range(3)]
    assert results == [-errno.EREMOTEIO, -errno.EREMOTEIO, 1]
    assert emulator.control.statistics().faults_struck - struck_before == 2


def test_one_direction_fails_until_cleared(client: Client, emulator: Hf3fsEmulator) -> None:
    descriptor, reads, writes = client.open("file", os.O_RDWR, b"x"), client.ring(), client.ring(False)
    emulator.control.fail(errno.ENOSPC, count=None, direction="write")
    for _ in range(2):
        assert run(writes, client.iov[:1], False, descriptor) == -errno.ENOSPC
        assert run(reads, client.iov[:1], True, descriptor) == 1
    emulator.control.clear()
    assert run(writes, client.iov[:1], False, descriptor) == 1


def test_short_read(client: Client, emulator: Hf3fsEmulator) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, b"12345678"), client.ring()
    client.memory[:8] = b"........"
    emulator.control.shorten(3)
    assert run(ring, client.iov[:8], True, descriptor) == 3
    assert bytes(client.memory[:8]) == b"123....."


def test_short_write(client: Client, emulator: Hf3fsEmulator) -> None:
    descriptor, ring = client.open("file", os.O_RDWR, b"........"), client.ring(False)
    client.memory[:8] = b"12345678"
    emulator.control.shorten(3)
    assert run(ring, client.iov[:8], False, descriptor) == 3
    assert (client.mount / "file").read_bytes() == b"123....."


def test_lost_completion_takes_its_entry_for_good(client: Client, emulator: Hf3fsEmulator) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, b"12"), client.ring(entries=2)
    operations = emulator.control.statistics().operations
    emulator.control.lose()
    ring.prepare(client.iov[:1], True, descriptor, 0).submit()
    assert run(ring, client.iov[1:2], True, descriptor, 1) == 1
    end_s = time.monotonic() + PATIENCE_S
    while emulator.control.statistics().operations < operations + 2:  # another worker has the lost one
        assert time.monotonic() < end_s
    assert bytes(client.memory[:2]) == b"12", "the bytes came, only the answer did not"
    ring.prepare(client.iov[1:2], True, descriptor, 0)
    with pytest.raises(BlockingIOError):
        ring.prepare(client.iov[2:3], True, descriptor, 0)
    assert len(ring.submit().wait(min_results=1, timeout=PATIENCE_S)) == 1


def test_delay_holds_back_one_and_not_the_next(client: Client, emulator: Hf3fsEmulator) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, b"12"), client.ring(io_depth=1)
    emulator.control.delay(1.0)
    slow, fast = client.iov[:1], client.iov[1:2]
    began_s = time.monotonic()
    ring.prepare(slow, True, descriptor, 0).prepare(fast, True, descriptor, 1).submit()
    assert ring.wait(min_results=1, timeout=PATIENCE_S) == [fast]
    assert ring.wait(min_results=1, timeout=PATIENCE_S) == [slow]
    assert time.monotonic() - began_s >= 1.0


def test_hang_and_resume(client: Client, emulator: Hf3fsEmulator) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, b"12"), client.ring()
    emulator.control.hang()
    ring.prepare(client.iov[:1], True, descriptor, 0).prepare(client.iov[1:2], True, descriptor, 1).submit()
    emulator.control.until_hanging(2)
    assert ring.wait(max_results=2) == []
    assert os.stat(client.mount / "file").st_size == 2, "the file system goes on"
    emulator.control.resume()
    assert len(ring.wait(min_results=2, timeout=PATIENCE_S)) == 2


@needs_fuse
@pytest.mark.parametrize("kind", ["fuse"], indirect=True)
def test_calls_on_the_mount_fail(client: Client, emulator: Hf3fsEmulator) -> None:
    path = client.file("file", b"x")
    calls = {
        "open": lambda: os.close(os.open(path, os.O_RDONLY)),
        "rename": lambda: os.rename(path, path),
        "mkdir": lambda: os.mkdir(client.mount / "directory"),
        "unlink": lambda: os.unlink(path),
    }
    for name, call in calls.items():
        emulator.control.fail_call(name, errno.ENOSPC)
        with fails(errno.ENOSPC):
            call() if name != "rename" else os.rename(path, f"{path}2")
        call()


@needs_fuse
@pytest.mark.parametrize("kind", ["fuse"], indirect=True)
def test_fsync_fails(client: Client, emulator: Hf3fsEmulator) -> None:
    descriptor = client.open("file", os.O_RDWR, b"")
    emulator.control.fail_call("fsync", errno.EIO)
    with fails(errno.EIO):
        os.fsync(descriptor)
    os.fsync(descriptor)


@pytest.mark.parametrize("kind", ["directory"], indirect=True)
def test_calls_on_a_plain_directory_cannot_fail(client: Client, emulator: Hf3fsEmulator) -> None:
    with fails(errno.ENOTSUP):
        emulator.control.fail_call("open", errno.EIO)


def test_nonsense_is_refused(client: Client, emulator: Hf3fsEmulator) -> None:
    with fails(errno.EINVAL):
        emulator.control._channel.ask("fault", action="errno", colour="red")
