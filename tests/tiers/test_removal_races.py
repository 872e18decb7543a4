"""What was seen of a chunk before it was removed does not bring it back, and what cannot be looked for is not gone."""

import asyncio
import errno
import os
import threading
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.tiers import test_weka as weka
from tests.tiers.opened import refreshed
from tests.tiers.test_disk import fill, is_hit, opened, scanned
from tiercache.errors import TierUnavailable
from tiercache.testing import chunk
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directory import Scanned

KEY = chunk(1)[0]
_scan = ChunkFiles.scan


async def test_chunk_listed_before_its_removal_is_stored_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    async with weka.opened(tmp_path, refresh_s=5.0) as tier, weka.opened(tmp_path, refresh_s=5.0) as other:
        await fill(other, range(1, 2))
        seen = threading.Event()

        def scanned_then_removed(files: ChunkFiles, top: str, known: Collection[bytes] | None = None) -> Scanned:
            found = _scan(files, top, known)
            if found.keys and not seen.is_set():
                seen.set()
                asyncio.run_coroutine_threadsafe(tier.remove(KEY), loop).result(10.0)
            return found

        monkeypatch.setattr(ChunkFiles, "scan", scanned_then_removed)
        await refreshed(tier)
        assert seen.is_set()
        await fill(tier, range(1, 2))
        assert await is_hit(other, 1)


async def test_chunk_that_cannot_be_looked_for_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as other:
        async with scanned(tmp_path) as tier:
            await fill(other, range(1, 2))
            lstat = os.lstat

            def dead(path: str, **more: object) -> os.stat_result:
                if str(path) == tier.path(KEY):
                    raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), path)
                return lstat(path, **more)  # type: ignore[arg-type]

            with monkeypatch.context() as patch:
                patch.setattr(os, "lstat", dead)
                with pytest.raises(OSError, match="not connected"):
                    await tier.remove(KEY)
            assert await tier.remove(KEY)
        assert not await is_hit(other, 1)


@pytest.mark.parametrize("known", [True, False])
async def test_chunk_of_a_directory_that_is_away_is_not_taken_for_removed(tmp_path: Path, known: bool) -> None:
    """As when a mount is not there for a moment: its mount point is an empty directory, or none."""
    place, away = tmp_path / "place", tmp_path / "away"
    async with opened(place) as other, scanned(place) as tier:
        await fill(other, range(1, 2))
        assert await tier.probe([KEY]) if known else not tier.contains(KEY)
        place.rename(away)
        with pytest.raises(TierUnavailable, match="is not there"):
            await tier.remove(KEY)
        away.rename(place)
        assert await tier.remove(KEY)
        assert not await is_hit(other, 1)
