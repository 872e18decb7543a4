"""Rules 9 to 12: waiting, what results say, how large a file looks."""

import errno
import os
from pathlib import Path

import pytest
from hf3fs_fuse.io import force_fsync

from tests.hf3fs.emulator.client import Client, run
from tests.hf3fs_emulator import Hf3fsEmulator
from tests.hf3fs_emulator.client.mounts import add_link, remove_link
from tests.needs import needs_fuse

BLOCK = 4096


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


@pytest.mark.parametrize(
    ("number", "seen"), [(errno.ENOSPC, errno.ENOSPC), (errno.EREMOTEIO, errno.EREMOTEIO), (errno.EPERM, errno.EIO)]
)
def test_rule_11_few_errors_get_to_clients_and_all_others_are_eio(
    client: Client, emulator: Hf3fsEmulator, number: int, seen: int
) -> None:
    emulator.control.fail(number)
    assert run(client.ring(), client.iov[:1], True, client.open("file", os.O_RDONLY, b"x")) == -seen


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
