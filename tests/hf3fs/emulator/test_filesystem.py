"""The mount as a file system: what a cache needs of one, beside the rings."""

import os

import pytest

from tests.hf3fs.emulator.client import Client, run
from tests.needs import needs_fuse

pytestmark = [needs_fuse, pytest.mark.parametrize("kind", ["fuse"], indirect=True)]


def test_file_that_is_open_survives_its_name(client: Client) -> None:
    descriptor = client.open("file", os.O_RDWR, b"kept")
    os.unlink(client.mount / "file")
    assert os.listdir(client.mount).count("file") == 0
    assert run(client.ring(), client.iov[:4], True, descriptor) == 4
    assert bytes(client.memory[:4]) == b"kept"
    assert os.pread(descriptor, 4, 0) == b"kept"
    os.ftruncate(descriptor, 2)
    assert run(client.ring(), client.iov[:4], True, descriptor) == 2
