"""The mount as a file system: what a cache needs of one, beside the rings."""

import errno
import os
import time

import pytest

from tests.hf3fs.emulator.client import Client, fails, run
from tests.hf3fs_emulator import Hf3fsEmulator, Pace
from tests.needs import needs_fuse

pytestmark = [needs_fuse, pytest.mark.parametrize("kind", ["fuse"], indirect=True)]


def test_virtual_directory_is_listed_and_protected(client: Client) -> None:
    assert "3fs-virt" in os.listdir(client.mount)
    assert os.listdir(client.mount / "3fs-virt") == ["iovs"]
    virtual = client.mount / "3fs-virt"
    for call in (
        lambda: os.mkdir(virtual / "new"),
        lambda: os.rmdir(virtual / "iovs"),
        lambda: os.close(os.open(virtual / "new", os.O_CREAT | os.O_WRONLY)),
    ):
        with fails(errno.EPERM):
            call()


def test_file_that_is_open_survives_its_name(client: Client) -> None:
    descriptor = client.open("file", os.O_RDWR, b"kept")
    os.unlink(client.mount / "file")
    assert os.listdir(client.mount).count("file") == 0
    assert run(client.ring(), client.iov[:4], True, descriptor) == 4
    assert bytes(client.memory[:4]) == b"kept"
    assert os.pread(descriptor, 4, 0) == b"kept"
    os.ftruncate(descriptor, 2)
    assert run(client.ring(), client.iov[:4], True, descriptor) == 2


def test_read_only_mount_takes_no_writes(client: Client, emulator: Hf3fsEmulator) -> None:
    path = client.file("file", b"x")
    emulator.control.make_read_only()
    for call in (
        lambda: os.close(os.open(path, os.O_WRONLY)),
        lambda: os.unlink(path),
        lambda: os.rename(path, f"{path}2"),
        lambda: os.mkdir(client.mount / "directory"),
    ):
        with fails(errno.EROFS):
            call()
    assert (client.mount / "file").read_bytes() == b"x"
    reading = client.open("file", os.O_RDONLY)
    assert run(client.ring(), client.iov[:1], True, reading) == 1


def test_all_names_of_a_file_are_one_file(client: Client) -> None:
    one, other = client.mount / "first", client.mount / "second"
    one.write_bytes(b"same")
    os.link(one, other)
    assert os.stat(one).st_ino == os.stat(other).st_ino
    assert os.stat(other).st_nlink == 2
    one.unlink()
    assert other.read_bytes() == b"same"
    assert os.stat(other).st_nlink == 1
    other.rename(one)
    assert one.read_bytes() == b"same"


def test_times_and_modes_are_kept(client: Client) -> None:
    path = client.mount / "file"
    path.touch()
    os.utime(path, ns=(10**9 + 7, 2 * 10**9 + 9))
    path.chmod(0o640)
    status = path.stat()
    assert (status.st_atime_ns, status.st_mtime_ns, status.st_mode & 0o777) == (10**9 + 7, 2 * 10**9 + 9, 0o640)


def test_mount_keeps_the_pace_of_a_cluster(client: Client, emulator: Hf3fsEmulator) -> None:
    emulator.control.pace(Pace(bytes_per_s=1e9, latency_s=0.01, look_s=0.02, change_s=0.03))
    began_s = time.monotonic()
    (client.mount / "directory").mkdir()
    assert time.monotonic() - began_s >= 0.03
    descriptor = client.open("file", os.O_RDWR, bytes(1 << 16))
    began_s = time.monotonic()
    assert run(client.ring(), client.iov[:4096], True, descriptor) == 4096
    assert 0.01 <= time.monotonic() - began_s < 5
    emulator.control.pace(None)
