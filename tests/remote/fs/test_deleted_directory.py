"""A tier's directory that somebody deletes, or moves away, under a running cache: it is made anew where it was an ordinary
directory, and never below a mount that is not there."""

from __future__ import annotations

import asyncio
import shutil
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.hf3fs_emulator import Hf3fsEmulator, install
from tests.needs import needs_fuse
from tests.remote.fs.mount import FragileMount
from tests.remote.fs.test_dead_mount import CAP_BYTES, is_written
from tests.remote.fs.test_dead_mount import opened as opened_on_files
from tests.remote.fs.test_fs import is_hit
from tests.tiers.test_contract import LAYOUT
from tests.tiers.weka import physical_bytes
from tiercache.errors import TierUnavailable
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.base import Tier
from tiercache.tiers.gds import GdsSettings, GdsTier
from tiercache.tiers.hf3fs import Hf3fsSettings, Hf3fsTier

KINDS = ["disk", "fs", "weka", "gds", pytest.param("hf3fs", marks=needs_fuse)]

install()


@asynccontextmanager
async def opened(kind: str, place: Path) -> AsyncIterator[Tier]:
    if kind not in ("gds", "hf3fs"):
        async with opened_on_files(kind, place) as tier:
            yield tier
        return
    own: GdsTier | Hf3fsTier
    if kind == "gds":
        own = GdsTier(GdsSettings((place,), CAP_BYTES, threads=2, way="posix"), LAYOUT.fingerprint)
    else:
        settings = Hf3fsSettings((place,), CAP_BYTES, threads=2, chunk_bytes=CHUNK_BYTES, iov_bytes=16 << 20)
        own = Hf3fsTier(settings, LAYOUT.fingerprint)
    await own.open()
    try:
        yield own
    finally:
        await own.close()


@pytest.fixture
def above(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Where the tier's directory lies; for 3FS on its mount."""
    if request.getfixturevalue("kind") != "hf3fs":
        yield tmp_path
        return
    with Hf3fsEmulator() as emulator:
        yield emulator.mount


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FragileMount]:
    with FragileMount(tmp_path) as mount:
        yield mount


def lose(place: Path, how: str) -> None:
    elsewhere = place.with_name("elsewhere")
    place.rename(elsewhere)  # in one step: a tier that looks when half of it is deleted opens what is left
    if how == "rm -rf":
        subprocess.run(["rm", "-rf", elsewhere], check=True)  # the tier may be deleting, too


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["rm -rf", "mv"])
async def test_directory_is_made_anew_by_the_next_write(above: Path, kind: str, how: str) -> None:
    place = above / "kv"
    async with opened(kind, place) as tier:
        assert all([await is_written(tier, number) for number in range(1, 4)])
        await asyncio.to_thread(lose, place, how)
        assert await is_written(tier, 4), "by the very first write"
        assert await is_hit(tier, 4)
        assert stat.S_IMODE(place.stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", KINDS)
async def test_the_same_chunks_are_stored_again(above: Path, kind: str) -> None:
    """A read says that they are gone, so that a put is more than a look into the index."""
    place = above / "kv"
    async with opened(kind, place) as tier:
        assert await is_written(tier, 1)
        await asyncio.to_thread(lose, place, "rm -rf")
        if kind != "hf3fs":  # which finds files that it keeps open for a while
            assert not await is_hit(tier, 1)
            assert await is_written(tier, 1)
            assert await is_hit(tier, 1)
            assert list(place.glob("00/*"))


@pytest.mark.parametrize("kind", ["disk", "fs", "weka", "gds"])
@pytest.mark.parametrize("known", [True, False], ids=["of known chunks", "of chunks that were found gone"])
async def test_directory_that_was_full_is_made_anew_and_filled(above: Path, kind: str, known: bool) -> None:
    """A write that sees a full directory has to come to the count to find out that there is none."""
    place = above / "kv"
    async with opened(kind, place) as tier:
        for number in range(1, 100):
            await is_written(tier, number)
        await asyncio.to_thread(lose, place, "rm -rf")
        for number in [] if known else range(1, 100):
            assert not await is_hit(tier, number)
        written = [await is_written(tier, number) for number in range(101, 140)]
        assert sum(written) >= 38, "all but perhaps the first"
        assert await is_hit(tier, 139)
        assert physical_bytes(place) <= CAP_BYTES


@pytest.mark.parametrize("kind", ["disk"])
async def test_target_of_a_link_is_made_anew(above: Path, kind: str) -> None:
    place, target = above / "link", above / "target"
    place.symlink_to(target)
    target.mkdir()
    async with opened(kind, place) as tier:
        shutil.rmtree(target)
        assert await is_written(tier, 1)
    assert place.is_symlink() and list(target.glob("00/*"))


@pytest.mark.parametrize("kind", ["disk", "fs", "weka", "gds"])
async def test_directory_whose_parent_is_away_is_not_made(above: Path, kind: str) -> None:
    place = above / "mount" / "kv"
    async with opened(kind, place) as tier:
        assert await is_written(tier, 1)
        (above / "mount").rename(above / "away")
        with pytest.raises(TierUnavailable, match="kv is not there any more"):
            await tier.write(*chunk(2), CHUNK_BYTES)
        with pytest.raises((TierUnavailable, FileNotFoundError)):
            await is_hit(tier, 1)
        assert not (above / "mount").exists()
        (above / "away").rename(above / "mount")
        assert await is_hit(tier, 1), "it believes that it is there still"
        assert await is_written(tier, 2)


@needs_fuse
@pytest.mark.parametrize("kind", ["disk", "fs", "weka", "gds"])
@pytest.mark.parametrize("below", ["kv", ""], ids=["a directory on the mount", "the mount point itself"])
async def test_nothing_is_written_below_a_mount_that_is_away(mount: FragileMount, kind: str, below: str) -> None:
    async with opened(kind, mount.path / below) as tier:
        assert await is_written(tier, 1)
        await asyncio.to_thread(subprocess.run, ["umount", "-l", mount.path], check=True)
        with pytest.raises(TierUnavailable, match="not there any more"):
            await tier.write(*chunk(2), CHUNK_BYTES)
        assert list(mount.path.iterdir()) == [], "what is there is the file system below"
        await asyncio.to_thread(mount.die)
        await asyncio.to_thread(mount.revive)
        written = [await is_written(tier, number) for number in range(10, 20)]
        assert sum(written) >= 9, "all but perhaps the first"
        assert await is_hit(tier, 19)
