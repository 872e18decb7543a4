"""Several rings at once, with faults: nothing wrong is ever read, nothing is lost that was not to be lost, nothing leaks."""

import errno
import os
import random
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from hf3fs_fuse.io import deregister_fd, make_ioring, make_iovec, register_fd

from tests.hf3fs.emulator.client import PATIENCE_S, Client
from tests.hf3fs_emulator import Hf3fsEmulator

PIECE_BYTES = 64 << 10
DEPTH = 6
FAULTS = (errno.EREMOTEIO, errno.EIO, errno.ENOSPC)


def transfer(ring: Any, iov: Any, read: bool, descriptor: int, numbers: list[int]) -> None:
    """Move the pieces `numbers` of a file between it and the same places of the buffer, until each has succeeded whole."""
    waiting, in_flight = list(numbers), 0
    where: dict[Any, int] = {}
    while waiting or in_flight:
        while waiting and in_flight < DEPTH:
            number = waiting.pop()
            piece = iov[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
            try:
                ring.prepare(piece, read, descriptor, number * PIECE_BYTES)
            except BlockingIOError:
                waiting.append(number)  # an early one holds back the room, although there are entries
                break
            where[piece] = number
            in_flight += 1
        done = ring.submit().wait(max_results=DEPTH, min_results=1, timeout=PATIENCE_S)
        assert done
        for piece in done:
            in_flight -= 1
            number = where.pop(piece)
            if piece.result != PIECE_BYTES:
                assert piece.result >= 0 or -piece.result in FAULTS
                waiting.append(number)


def write_and_read(mount: Path, name: str, pieces: int, seed: int) -> None:
    content = random.Random(seed).randbytes(pieces * PIECE_BYTES)
    shm = SharedMemory(create=True, size=len(content))
    iov = make_iovec(shm, str(mount))
    shm.buf[:] = content
    descriptor = os.open(mount / name, os.O_RDWR | os.O_CREAT)
    register_fd(descriptor)
    transfer(make_ioring(str(mount), DEPTH, False), iov, False, descriptor, list(range(pieces)))
    shm.buf[:] = bytes(len(content))
    transfer(make_ioring(str(mount), DEPTH), iov, True, descriptor, list(range(pieces)))
    assert shm.buf == content
    deregister_fd(descriptor)
    os.close(descriptor)
    del iov
    shm.close()
    shm.unlink()


def test_faults_never_make_wrong_bytes(emulator: Hf3fsEmulator) -> None:
    struck_before = emulator.control.statistics().faults_struck
    for number in FAULTS:
        emulator.control.fail(number, count=5)
    emulator.control.shorten(PIECE_BYTES // 3, count=10)
    emulator.control.delay(0.002, count=10)
    with ThreadPoolExecutor(4) as threads:
        runs = [threads.submit(write_and_read, emulator.mount, f"file{seed}", 40, seed) for seed in range(4)]
        for run in runs:
            run.result()
    assert emulator.control.statistics().faults_struck - struck_before == 35


def in_use(pid: int) -> tuple[int, int, int]:
    """Descriptors, threads and mappings of shared memory."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")), maps.count("/dev/shm/")


def test_daemon_keeps_nothing_of_clients_that_went(emulator: Hf3fsEmulator) -> None:
    def come_and_go() -> None:
        client = Client(emulator)
        rings = client.ring(), client.ring(False)
        descriptor = client.open("file", os.O_RDWR, b"x")
        for ring, read in zip(rings, (True, False), strict=True):
            ring.prepare(client.iov[:1], read, descriptor, 0)
            assert len(ring.submit().wait(min_results=1, timeout=PATIENCE_S)) == 1
        del ring, rings
        client.close()
        emulator.control.until_registered(buffers=0, rings=0)
        emulator.control.until_open_files(0)

    come_and_go()
    descriptors, threads, _ = in_use(emulator.pid)
    for _ in range(10):
        come_and_go()
    after = in_use(emulator.pid)
    # A connection of the control socket, and one more thread of libfuse, may be there or not.
    assert after[0] <= descriptors + 2
    assert after[1] <= threads + 5
    while in_use(emulator.pid)[2] != 3:  # the semaphores
        assert emulator.control.statistics().rings == 0  # a worker may be about to let go of the last ring
