"""Making a directory and looking through it, also with more chunks than are taken up in one step of the loop."""

import asyncio
import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiers import kinds
from tests.tiers.test_disk import opened, scanned
from tiercache.core.header import file_bytes
from tiercache.testing import chunk, page_aligned
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.disk import DiskTier
from tiercache.tiers.files.scanning import _STEP

FEW = 2 * _STEP + 10


def keys(numbers: range, top: int | None = None) -> list[bytes]:
    """All of one directory, or spread over all of them."""
    return [bytes([number % 256 if top is None else top]) + number.to_bytes(4, "big") + bytes(19) for number in numbers]


def make_files(tier: DiskTier, chunks: Sequence[bytes]) -> None:
    """Empty inside: a scan looks at names and sizes. The first is the oldest."""
    for age, key in enumerate(chunks):
        path = Path(tier.path(key))
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.truncate(file_bytes(CHUNK_BYTES))
        path.chmod(0o600)
        os.utime(path, (1000 + age, 1000 + age))


def victims(tier: DiskTier) -> list[bytes]:
    index = tier.directories.all[0].index
    return [key for key, _ in index.evict(index.used_bytes)]


async def test_all_are_in_the_order_of_their_times_after_a_restart(tmp_path: Path) -> None:
    chunks = keys(range(FEW))
    async with opened(tmp_path, cap_chunks=2 * FEW) as tier:
        make_files(tier, chunks)
    async with scanned(tmp_path, cap_chunks=2 * FEW) as tier:
        assert victims(tier) == chunks


async def test_loop_is_idle_between_steps(tmp_path: Path) -> None:
    """Threads get Python's lock then. A loop that only lets others have their turn keeps it from them."""
    loop = asyncio.get_running_loop()
    times_s: list[float] = []
    async with opened(tmp_path, cap_chunks=2 * FEW) as tier:
        make_files(tier, keys(range(FEW), top=0))
    async with opened(tmp_path, cap_chunks=2 * FEW) as tier:
        tier.tell(lambda _: times_s.append(loop.time()))
        await tier.scanned()
        assert len(times_s) == FEW
        for step in range(_STEP, FEW, _STEP):
            assert times_s[step] >= times_s[step - 1] + 0.001


async def test_a_write_to_a_full_directory_waits_for_the_first_chunk_that_is_found_and_not_for_all(tmp_path: Path) -> None:
    """As after a restart: what is new is stored, and not what lies there as a whole looked at first."""
    payload = chunk(1)[1]
    async with opened(tmp_path, cap_chunks=8) as tier:
        for key in keys(range(20)):
            assert await tier.write(key, payload, CHUNK_BYTES)
        full_bytes = tier.statistics().occupied_bytes
    async with opened(tmp_path, cap_chunks=8) as tier:
        found, gates = asyncio.Event(), [threading.Event(), threading.Event()]

        def first_is_found(_: bytes) -> None:
            if not found.is_set():
                tier.directories.metadata.background.submit(gates[1].wait)  # the only thread that looks
                found.set()

        tier.tell(first_is_found)
        tier.directories.metadata.background.submit(gates[0].wait)
        try:
            writing = asyncio.create_task(tier.write(chunk(1)[0], payload, CHUNK_BYTES))
            await asyncio.wait([writing], timeout=0.1)
            assert not writing.done() and not found.is_set()
            gates[0].set()
            await found.wait()
            async with asyncio.timeout(60):
                assert await writing
            assert tier.statistics().resident < 4, "the scan has not gone on"
        finally:
            for gate in gates:
                gate.set()
        await tier.scanned()
        assert tier.statistics().occupied_bytes <= full_bytes


async def test_a_directory_made_and_deleted_by_others_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir, place = os.mkdir, tmp_path / "kv"
    met = []

    def beaten(path: str | Path, mode: int = 0o777, **others: Any) -> None:
        if Path(path) == place and not met:
            met.append(path)
            raise FileExistsError(errno.EEXIST, "made by another process, and deleted again", str(path))
        mkdir(path, mode, **others)

    monkeypatch.setattr(os, "mkdir", beaten)
    async with opened(place) as tier:
        assert met and await tier.write(*chunk(1), CHUNK_BYTES)


PAYLOAD = chunk(1)[1]
KEYS = [bytes([number]) * 24 for number in range(64)]
"""In as many subdirectories: more than there are threads."""


class HeldScan:
    """Threads that list a subdirectory stand still until `release`."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.release = threading.Event()
        self._scandir = os.scandir

    def scandir(self, path: Any = ".") -> Any:
        place = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
        if len(os.path.basename(place)) == 2:
            self.begun.set()
            self.release.wait()
        return self._scandir(path)


@pytest.mark.parametrize("kind", ["disk", "fs"])
async def test_lookups_do_not_wait_for_a_scan(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with kinds.opened(kind, tmp_path, cap_bytes=64 << 20) as tier:
        for key in KEYS:
            assert await tier.write(key, PAYLOAD, CHUNK_BYTES)
    held = HeldScan()
    monkeypatch.setattr(os, "scandir", held.scandir)
    async with kinds.opened(kind, tmp_path, cap_bytes=64 << 20) as tier:
        try:
            await asyncio.to_thread(held.begun.wait)
            async with asyncio.timeout(20):
                assert await tier.probe([KEYS[1], KEYS[2], b"\xff" * 24]) == 2
                assert await tier.probe_each([KEYS[3], b"\xff" * 24, KEYS[4]]) == [True, False, True]
                into = page_aligned(CHUNK_BYTES)
                assert await tier.read(KEYS[5], into) == CHUNK_BYTES
                assert np.array_equal(into, PAYLOAD)
                assert await tier.remove(KEYS[6]) is True
                assert await tier.write(KEYS[6], PAYLOAD, CHUNK_BYTES)
        finally:
            held.release.set()
