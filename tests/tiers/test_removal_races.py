"""What was seen of a chunk before it was removed does not bring it back, and what cannot be looked for is not gone."""

import asyncio
import errno
import itertools
import os
import threading
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import weka
from tests.tiers.test_disk import fill, is_hit, opened
from tiercache.core.keys import ChunkKey
from tiercache.errors import TierUnavailable
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.disk import DiskTier
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directory import PendingFile, Scanned, Scanner

KEY = chunk(1)[0]
_scan = Scanner.scan


async def test_chunk_that_was_listed_before_its_removal_is_stored_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    async with weka.opened(tmp_path, refresh_s=5.0) as tier, weka.opened(tmp_path, refresh_s=5.0) as other:
        await weka.store(other, range(1, 2))
        seen = threading.Event()

        def scanned_then_removed(scanner: Scanner, top: str, known: Collection[bytes] | None = None) -> Scanned:
            found = _scan(scanner, top, known)
            if found.keys and not seen.is_set():
                seen.set()
                asyncio.run_coroutine_threadsafe(tier.remove(KEY), loop).result(10.0)
            return found

        monkeypatch.setattr(Scanner, "scan", scanned_then_removed)
        await tier.refreshed()
        assert seen.is_set()
        await weka.store(tier, range(1, 2))
        assert await is_hit(other, 1)


async def test_chunk_that_was_listed_while_its_removal_had_begun_is_stored_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    async with weka.opened(tmp_path, refresh_s=5.0) as tier:
        await weka.store(tier, range(1, 2))
        listed = threading.Event()
        delete = ChunkFiles.delete

        def delete_late(self: ChunkFiles, key: ChunkKey, occupied_bytes: int) -> bool:
            assert listed.wait(10.0)
            return delete(self, key, occupied_bytes)

        def scanned_then_removed(scanner: Scanner, top: str, known: Collection[bytes] | None = None) -> Scanned:
            found = _scan(scanner, top, known)
            listed.set()
            asyncio.run_coroutine_threadsafe(asyncio.wait([removal]), loop).result(10.0)
            return found

        monkeypatch.setattr(ChunkFiles, "delete", delete_late)
        removal = asyncio.create_task(tier.remove(KEY))
        await asyncio.sleep(0)
        monkeypatch.setattr(Scanner, "scan", scanned_then_removed)
        await tier.refreshed()
        assert removal.done() and await removal
        await weka.store(tier, range(1, 2))
        assert await is_hit(tier, 1)


async def test_chunk_whose_directory_cannot_be_asked_is_not_taken_for_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as other:
        async with opened(tmp_path) as tier:
            await tier.scanned()
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
    async with opened(place) as other, opened(place) as tier:
        await tier.scanned()
        await fill(other, range(1, 2))
        assert await tier.probe([KEY]) if known else not tier.contains(KEY)
        place.rename(away)
        with pytest.raises(TierUnavailable, match="is not there"):
            await tier.remove(KEY)
        away.rename(place)
        assert await tier.remove(KEY)
        assert not await is_hit(other, 1)


class Held:
    """KEY's file stays where it is, although it is evicted, until this `goes_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes_on = threading.Event()
        self._began = asyncio.Event()
        self._patch = monkeypatch
        loop = asyncio.get_running_loop()
        delete = ChunkFiles._delete_file

        def delete_late(files: ChunkFiles, key: ChunkKey) -> bool:
            if key == KEY:
                loop.call_soon_threadsafe(self._began.set)
                assert self.goes_on.wait(10.0)
            return delete(files, key)

        monkeypatch.setattr(ChunkFiles, "_delete_file", delete_late)

    async def evict_first(self, tier: DiskTier) -> asyncio.Task[bool]:
        """Fill the tier; the write that has to wait for the deletion of the oldest chunk, that of KEY."""
        began = asyncio.create_task(self._began.wait())
        for number in itertools.count(1):
            writing = asyncio.create_task(tier.write(*chunk(number), CHUNK_BYTES))
            await asyncio.wait([writing, began], return_when=asyncio.FIRST_COMPLETED)
            if began.done():
                break
        assert not tier.contains(KEY) and Path(tier.path(KEY)).exists()
        return writing

    def hold_scans(self) -> None:
        scan = Scanner.scan

        def scan_late(scanner: Scanner, top: str) -> Scanned:
            found = scan(scanner, top)
            assert self.goes_on.wait(10.0)
            return found

        self._patch.setattr(Scanner, "scan", scan_late)


@pytest.fixture
async def held(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Held]:
    held = Held(monkeypatch)
    yield held
    held.goes_on.set()


@pytest.mark.parametrize("look", ["scan", "probe", "read in a scan"])
async def test_chunk_that_is_seen_while_it_is_evicted_is_stored_anew(tmp_path: Path, held: Held, look: str) -> None:
    async with opened(tmp_path, cap_chunks=8) as tier:
        await tier.scanned()
        writing = await held.evict_first(tier)
        if look == "probe":
            await tier.probe([KEY])
        else:
            if look == "read in a scan":
                held.hold_scans()
            tier.directories.all[0].next_scan_s = 0.0
            tier.directories.scan_soon(tier.directories.all[0])
            if look == "scan":
                await tier.scanned()
            else:
                assert await is_hit(tier, 1)
        held.goes_on.set()
        assert await writing
        await tier.scanned()
        assert not tier.contains(KEY)
        await fill(tier, range(1, 2))
        assert await is_hit(tier, 1)


async def test_chunk_that_is_listed_while_it_is_evicted_is_stored_anew(tmp_path: Path, held: Held) -> None:
    async with weka.opened(tmp_path, cap_chunks=8) as tier:
        writing = await held.evict_first(tier)
        await tier.refreshed()
        held.goes_on.set()
        assert await writing
        assert not tier.contains(KEY)
        await weka.store(tier, range(1, 2))
        assert await is_hit(tier, 1)


async def test_chunk_that_is_stored_while_it_is_evicted_is_stored(tmp_path: Path, held: Held) -> None:
    async with opened(tmp_path, cap_chunks=8) as tier:
        await tier.scanned()
        writing = await held.evict_first(tier)
        again = asyncio.create_task(tier.write(*chunk(1), CHUNK_BYTES))
        await fill(tier, range(1001, 1005))  # time enough for it to end, if it does not wait
        held.goes_on.set()
        assert await writing and await again
        assert tier.contains(KEY) and await is_hit(tier, 1)


async def test_chunk_that_was_deleted_by_a_write_that_hangs_since_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    hangs, goes_on = asyncio.Event(), threading.Event()
    make = ChunkFiles.make

    def make_late(files: ChunkFiles, pending: PendingFile, create: Any) -> Any:
        if not tier.contains(KEY) and not hangs.is_set():
            loop.call_soon_threadsafe(hangs.set)
            assert goes_on.wait(10.0)
        return make(files, pending, create)

    async with opened(tmp_path, cap_chunks=8) as tier:
        await tier.scanned()
        await fill(tier, range(1, 2))
        monkeypatch.setattr(ChunkFiles, "make", make_late)
        hanging = asyncio.create_task(hangs.wait())
        for number in itertools.count(2):
            writing = asyncio.create_task(tier.write(*chunk(number), CHUNK_BYTES))
            await asyncio.wait([writing, hanging], return_when=asyncio.FIRST_COMPLETED)
            if hanging.done():
                break
        try:
            async with asyncio.timeout(5.0):
                await fill(tier, range(1, 2))
        finally:
            goes_on.set()
        assert await writing and await is_hit(tier, 1)


@pytest.mark.parametrize("deleted", [False, True], ids=["leaving", "gone"])
async def test_chunk_that_is_seen_and_evicted_before_its_write_has_heard_of_its_end_is_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: bool
) -> None:
    loop = asyncio.get_running_loop()
    there, goes_on = asyncio.Event(), threading.Event()
    write = ChunkFiles.write

    def write_late(files: ChunkFiles, key: ChunkKey, *arguments: Any) -> int:
        occupied_bytes = write(files, key, *arguments)
        if key == KEY:
            loop.call_soon_threadsafe(there.set)
            assert goes_on.wait(10.0)
        return occupied_bytes

    monkeypatch.setattr(ChunkFiles, "write", write_late)
    held = Held(monkeypatch)
    async with opened(tmp_path, cap_chunks=8) as tier:
        await tier.scanned()
        writing = asyncio.create_task(tier.write(*chunk(1), CHUNK_BYTES))
        await there.wait()
        assert await tier.probe([KEY]) == 1
        evicting = await held.evict_first(tier)
        if deleted:
            held.goes_on.set()
            assert await evicting
        goes_on.set()
        assert await writing
        assert not tier.contains(KEY)
        held.goes_on.set()
        assert await evicting
        assert not Path(tier.path(KEY)).exists()
        await fill(tier, range(1, 2))
        assert await is_hit(tier, 1)
