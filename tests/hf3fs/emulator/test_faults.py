"""Faults on command. Others are those of the tier's tests (tests/hf3fs/tier)."""

import errno
import os

import pytest

from tests.hf3fs.emulator.client import Client, fails, run
from tests.hf3fs_emulator import Hf3fsEmulator
from tests.needs import needs_fuse


def test_one_direction_fails_until_cleared(client: Client, emulator: Hf3fsEmulator) -> None:
    descriptor, reads, writes = client.open("file", os.O_RDWR, b"x"), client.ring(), client.ring(False)
    emulator.control.fail(errno.ENOSPC, count=None, direction="write")
    for _ in range(2):
        assert run(writes, client.iov[:1], False, descriptor) == -errno.ENOSPC
        assert run(reads, client.iov[:1], True, descriptor) == 1
    emulator.control.clear()
    assert run(writes, client.iov[:1], False, descriptor) == 1


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
