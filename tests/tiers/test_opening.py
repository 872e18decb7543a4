"""A tier on files whose opening is interrupted."""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiers.test_disk import FINGERPRINT
from tiercache.tiers.disk import DiskTier
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directories import FileSettings
from tiercache.tiers.weka import WekaSettings, WekaTier


def _disk(directory: Path) -> DiskTier:
    return DiskTier(FileSettings((directory,), 1 << 20), FINGERPRINT)


def _weka(directory: Path) -> DiskTier:
    return WekaTier(WekaSettings((directory,), 1 << 20), FINGERPRINT)


@pytest.mark.parametrize("make", [_disk, _weka])
async def test_an_opening_that_is_cancelled_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], DiskTier]
) -> None:
    """Several threads do metadata: what was being opened was closed by another one, before it was open."""
    loop = asyncio.get_running_loop()
    began, goes_on = asyncio.Event(), threading.Event()
    really_open = ChunkFiles.open

    def open_late(files: ChunkFiles) -> None:
        loop.call_soon_threadsafe(began.set)
        assert goes_on.wait(10.0)
        really_open(files)

    monkeypatch.setattr(ChunkFiles, "open", open_late)
    tier = make(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    opening = asyncio.create_task(tier.open())
    await began.wait()
    opening.cancel()
    loop.call_later(0.01, goes_on.set)
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert goes_on.is_set(), "it waits for the thread"
    assert not list(tmp_path.glob(".tiercache/tmp/*.lock"))
    assert len(os.listdir("/proc/self/fd")) == before
