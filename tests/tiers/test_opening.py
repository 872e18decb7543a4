"""A tier on files while its directory is made, and what it answers while that is looked through."""

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiers.kinds import make, opened
from tiercache.testing import chunk, page_aligned
from tiercache.testing.contract import CHUNK_BYTES


async def test_a_directory_that_another_process_makes_and_deletes_meanwhile_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir, place = os.mkdir, tmp_path / "kv"
    met = []

    def beaten(path: str | Path, mode: int = 0o777, **others: Any) -> None:
        if Path(path) == place and not met:
            met.append(path)
            raise FileExistsError(errno.EEXIST, "made by another process, and deleted again", str(path))
        mkdir(path, mode, **others)

    monkeypatch.setattr(os, "mkdir", beaten)
    async with opened("disk", place) as tier:
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
    async with opened(kind, tmp_path, cap_bytes=64 << 20) as tier:
        for key in KEYS:
            assert await tier.write(key, PAYLOAD, CHUNK_BYTES)
    held = HeldScan()
    monkeypatch.setattr(os, "scandir", held.scandir)
    tier = make(kind, tmp_path, cap_bytes=64 << 20)
    await tier.open()
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
        await tier.close()
