"""Rules 1 to 3: the mount point, and descriptors that rings may use."""

import errno
import os
from pathlib import Path

import pytest
from hf3fs_fuse.io import deregister_fd, extract_mount_point, register_fd

from tests.hf3fs.emulator.client import Client, fails, run
from tests.hf3fs_emulator import Hf3fsEmulator
from tests.needs import needs_fuse


@needs_fuse
def test_rule_1_type_is_exactly_fuse_hf3fs() -> None:
    with Hf3fsEmulator(fuse=True) as emulator:
        (line,) = [
            line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(emulator.mount) in line
        ]
        assert line.split(" - ")[1].split(" ")[0] == "fuse.hf3fs"


def test_rule_1_plain_directory_only_when_the_check_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP", raising=False)
    with Hf3fsEmulator(fuse=False) as emulator:
        assert extract_mount_point(str(emulator.mount)) is None
        monkeypatch.setenv("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP", "no")
        assert extract_mount_point(str(emulator.mount)) is None
        monkeypatch.setenv("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP", "yes")
        assert extract_mount_point(str(emulator.mount)) == str(emulator.mount)


def test_rule_2_descriptor_must_be_on_3fs(client: Client, tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    with fails(errno.EBADF):
        register_fd(descriptor)
    os.close(descriptor)
    with fails(errno.EBADF):
        register_fd(descriptor)


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
