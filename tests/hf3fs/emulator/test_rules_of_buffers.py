"""Rules 4, 5 and 11: shared memory as an I/O buffer, slices of it, its blocks."""

import errno
import os
from multiprocessing.shared_memory import SharedMemory

from hf3fs_fuse.io import make_iovec

from tests.hf3fs.emulator.client import BUFFER_BYTES, PATIENCE_S, Client, fails, run
from tests.hf3fs_emulator import Hf3fsEmulator


def links(client: Client) -> set[str]:
    return {name for name in os.listdir(client.mount / "3fs-virt/iovs") if not name.startswith("submit-ios")}


def test_rule_4_registration_is_a_link_that_goes_with_the_iov(client: Client) -> None:
    before = links(client)
    shm = SharedMemory(create=True, size=4096)
    iov = make_iovec(shm, str(client.mount))
    (link,) = links(client) - before
    assert os.readlink(client.mount / "3fs-virt/iovs" / link) == f"/dev/shm/{shm.name}"
    del iov
    assert links(client) == before
    shm.close()
    shm.unlink()


def test_rule_4_slices_do_not_keep_the_registration(client: Client) -> None:
    shm = SharedMemory(create=True, size=4096)
    iov = make_iovec(shm, str(client.mount))
    piece = iov[:1]
    descriptor, ring = client.open("file", os.O_RDONLY, b"x"), client.ring()
    assert run(ring, piece, True, descriptor) == 1
    del iov
    assert run(ring, piece, True, descriptor) == -errno.EINVAL
    shm.close()
    shm.unlink()


def test_rule_4_name_of_the_shared_memory_may_go_once_it_is_registered(client: Client) -> None:
    shm = SharedMemory(create=True, size=4096)
    iov = make_iovec(shm, str(client.mount))
    shm.unlink()
    assert run(client.ring(), iov[:1], True, client.open("file", os.O_RDONLY, b"x")) == 1
    del iov
    shm.close()


def test_rule_5_result_and_place_are_of_the_slice_object(client: Client) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, b"12345"), client.ring()
    first, second = client.iov[10:13], client.iov[10:20][2:]
    assert (first.base_off, second.base_off, first.result) == (10, 12, 0)
    ring.prepare(first, True, descriptor, 0).prepare(second, True, descriptor, 3)
    done = ring.submit().wait(min_results=2, timeout=PATIENCE_S)
    assert {id(piece) for piece in done} == {id(first), id(second)}
    assert (first.result, second.result) == (3, 2)


def test_rule_11_transfer_stays_within_a_block(emulator: Hf3fsEmulator) -> None:
    client = Client(emulator, block_size=4096)
    descriptor, ring = client.open("file", os.O_RDONLY, bytes(8192)), client.ring()
    assert run(ring, client.iov[4096:8192], True, descriptor) == 4096
    assert run(ring, client.iov[4095:4097], True, descriptor) == -errno.EINVAL
    assert run(ring, client.iov[0:4097], True, descriptor) == -errno.EINVAL
    with fails(errno.EINVAL):
        make_iovec(client.shm, str(client.mount), BUFFER_BYTES + 1)
    client.close()
