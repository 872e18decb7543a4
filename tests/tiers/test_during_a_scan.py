"""While a directory is looked through for the first time, the tier answers what it is asked."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.remote.fs.test_fs import tier_on
from tests.tiers.test_contract import LAYOUT
from tiercache.testing import chunk, page_aligned
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.base import Tier
from tiercache.tiers.disk import DiskTier
from tiercache.tiers.files.directories import FileSettings

PAYLOAD = chunk(1)[1]
KEYS = [bytes([number]) * 24 for number in range(64)]
"""In as many subdirectories: more than there are threads."""


def disk(place: Path) -> Tier:
    return DiskTier(FileSettings((place,), cap_bytes=64 << 20), LAYOUT.fingerprint)


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


@pytest.mark.parametrize("make", [disk, tier_on])
async def test_lookups_do_not_wait_for_a_scan(
    make: Callable[[Path], Tier], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make(tmp_path)
    await tier.open()
    for key in KEYS:
        assert await tier.write(key, PAYLOAD, CHUNK_BYTES)
    await tier.close()
    held = HeldScan()
    monkeypatch.setattr(os, "scandir", held.scandir)
    tier = make(tmp_path)
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
