"""The mount as a file system: what a cache needs of one, beside the rings."""

import errno
import fcntl
import os

import pytest

from tests.hf3fs.emulator.client import Client, fails, run
from tests.hf3fs.emulator.conftest import needs_fuse
from tiercache.testing.hf3fs import Hf3fsEmulator

pytestmark = [needs_fuse, pytest.mark.parametrize("kind", ["fuse"], indirect=True)]


def test_inode_numbers_are_those_that_rings_use(client: Client, emulator: Hf3fsEmulator) -> None:
    client.file("file", b"x")
    assert os.stat(client.mount / "file").st_ino == os.stat(emulator.backing / "file").st_ino


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


def test_rename_replaces(client: Client) -> None:
    descriptor = client.open("new", os.O_RDWR, b"")
    client.memory[:3] = b"new"
    client.file("old", b"old")
    assert run(client.ring(False), client.iov[:3], False, descriptor) == 3
    os.fsync(descriptor)
    os.rename(client.mount / "new", client.mount / "old")
    assert (client.mount / "old").read_bytes() == b"new"
    assert not (client.mount / "new").exists()


def test_direct_io_locks_and_directories(client: Client) -> None:
    directory = client.mount / "one" / "two"
    directory.mkdir(parents=True)
    descriptor = os.open(directory / "file", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
    with fails(errno.ENOTEMPTY):
        directory.rmdir()
    (directory / "file").unlink()
    parent = os.open(directory, os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)
    directory.rmdir()
    assert os.statvfs(client.mount).f_bavail > 0


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
