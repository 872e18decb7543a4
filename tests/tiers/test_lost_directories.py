"""A tier's directory is deleted, moved away or unmounted under a running cache: an ordinary directory is made anew, and
nothing is made below a mount that is missing."""

import asyncio
import errno
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.chunks import chunks_of
from tests.needs import needs_fuse
from tests.remote.fs.mount import FragileMount
from tests.tiers.kinds import HF3FS, opened
from tests.tiers.test_disk import FILE_BYTES, is_hit, physical_bytes
from tiercache.errors import CacheClosed, TierUnavailable
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.base import Tier

CAP_BYTES = 64 * FILE_BYTES
ON_ANY_MOUNT = ["disk", "fs", "weka", "gds"]
KINDS = [*ON_ANY_MOUNT, HF3FS]


async def is_written(tier: Tier, number: int) -> bool:
    try:
        return await tier.write(*chunk(number), CHUNK_BYTES)
    except (TierUnavailable, OSError):
        return False


async def goes_on(tier: Tier, numbers: range) -> None:
    written = [await is_written(tier, number) for number in numbers]
    assert sum(written) >= len(numbers) - 1, "all but perhaps the first"
    assert await is_hit(tier, numbers[-1])


def lose(place: Path, how: str) -> None:
    elsewhere = place.with_name("elsewhere")
    place.rename(elsewhere)  # in one step: a tier that looks when half of it is deleted opens what is left
    if how == "rm -rf":
        subprocess.run(["rm", "-rf", elsewhere], check=True)  # the tier may be deleting, too


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["rm -rf", "mv"])
async def test_directory_is_made_anew_by_the_next_write(place: Path, kind: str, how: str) -> None:
    async with opened(kind, place, cap_bytes=CAP_BYTES) as tier:
        assert all([await is_written(tier, number) for number in range(1, 4)])
        await asyncio.to_thread(lose, place, how)
        assert await is_written(tier, 4), "by the very first write"
        assert await is_hit(tier, 4)
        assert stat.S_IMODE(place.stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ON_ANY_MOUNT)  # 3FS finds files that it keeps open for a while
async def test_the_same_chunks_are_stored_again(place: Path, kind: str) -> None:
    """A read says that they are gone, so that a put is more than a look into the index."""
    async with opened(kind, place, cap_bytes=CAP_BYTES) as tier:
        assert await is_written(tier, 1)
        await asyncio.to_thread(lose, place, "rm -rf")
        assert not await is_hit(tier, 1)
        assert await is_written(tier, 1)
        assert await is_hit(tier, 1)
        assert list(chunks_of(place).glob("00/*"))


@pytest.mark.parametrize("kind", ON_ANY_MOUNT)
@pytest.mark.parametrize("known", [True, False], ids=["of known chunks", "of chunks that were found gone"])
async def test_directory_that_was_full_is_made_anew_and_filled(place: Path, kind: str, known: bool) -> None:
    """A write that sees a full directory has to come to the count to find out that there is none."""
    async with opened(kind, place, cap_bytes=CAP_BYTES) as tier:
        for number in range(1, 100):
            await is_written(tier, number)
        await asyncio.to_thread(lose, place, "rm -rf")
        for number in [] if known else range(1, 100):
            assert not await is_hit(tier, number)
        await goes_on(tier, range(101, 140))
        assert physical_bytes(chunks_of(place)) <= CAP_BYTES


async def test_target_of_a_link_is_made_anew(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    target.mkdir()
    async with opened("disk", link) as tier:
        shutil.rmtree(target)
        assert await is_written(tier, 1)
    assert link.is_symlink() and list(chunks_of(target).glob("00/*"))


@pytest.mark.parametrize("kind", ON_ANY_MOUNT)
async def test_directory_whose_parent_is_away_is_not_made(tmp_path: Path, kind: str) -> None:
    parent = tmp_path / "mount"
    async with opened(kind, parent / "kv") as tier:
        assert await is_written(tier, 1)
        parent.rename(tmp_path / "away")
        with pytest.raises(TierUnavailable, match="kv is not there any more"):
            await tier.write(*chunk(2), CHUNK_BYTES)
        with pytest.raises((TierUnavailable, FileNotFoundError)):
            await is_hit(tier, 1)
        assert not parent.exists()
        (tmp_path / "away").rename(parent)
        assert await is_hit(tier, 1), "it believes that it is there still"
        assert await is_written(tier, 2)


@needs_fuse
@pytest.mark.parametrize("kind", ON_ANY_MOUNT)
@pytest.mark.parametrize("below", ["kv", ""], ids=["a directory on the mount", "the mount point itself"])
async def test_nothing_is_written_below_a_mount_that_is_away(mount: FragileMount, kind: str, below: str) -> None:
    async with opened(kind, mount.path / below, cap_bytes=CAP_BYTES) as tier:
        assert await is_written(tier, 1)
        await asyncio.to_thread(subprocess.run, ["umount", "-l", mount.path], check=True)
        with pytest.raises(TierUnavailable, match="not there any more"):
            await tier.write(*chunk(2), CHUNK_BYTES)
        assert list(mount.path.iterdir()) == [], "what is there is the file system below"
        await asyncio.to_thread(mount.die)
        await asyncio.to_thread(mount.revive)
        await goes_on(tier, range(10, 20))


def dead_descriptors() -> int:
    """Return the descriptors of this process on a mount that is gone."""
    dead = 0
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            os.fstat(number)
        except OSError as error:
            dead += error.errno == errno.ENOTCONN
    return dead


@needs_fuse
@pytest.mark.parametrize("kind", ["fs", "disk", "weka"])
@pytest.mark.parametrize("meanwhile", ["used", "idle", "not counted"])
async def test_after_a_mount_that_died_is_mounted_again_nothing_of_the_old_one_is_used(
    mount: FragileMount, kind: str, meanwhile: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(kind, mount.path, cap_bytes=CAP_BYTES) as tier:
        assert [await is_written(tier, number) for number in range(1, 4)] == [True] * 3
        if meanwhile == "not counted":  # as when a process has asked for a recount: nothing is written before a scan
            capacity = tier.directories.all[0].files.capacity
            capacity._count = capacity._count._replace(trusted=False)
        await asyncio.to_thread(mount.die)
        if meanwhile == "used":
            assert not await is_written(tier, 4)
        await asyncio.to_thread(mount.revive)
        if meanwhile == "not counted":
            assert not await is_written(tier, 5), "it begins a scan, which opens the directory anew and scans again"
            await tier.scanned()
            await tier.scanned()
        await goes_on(tier, range(10, 90))
        assert physical_bytes(chunks_of(mount.behind)) <= CAP_BYTES, "and the cap holds, so the count is kept too"
        assert not dead_descriptors(), "nothing of the dead mount stays open"
        assert f"another mount is at {mount.path} now" in caplog.text
        assert "emptied" not in caplog.text, "its chunks are all there"


@needs_fuse
async def test_writes_that_waited_for_a_mount_that_hung_leave_a_closed_volume_alone(mount: FragileMount) -> None:
    async with opened("disk", mount.path, cap_bytes=CAP_BYTES, threads=2) as tier:
        assert await is_written(tier, 1)
        mount.hang()
        writing = [asyncio.ensure_future(tier.write(*chunk(number), CHUNK_BYTES)) for number in range(2, 10)]
        await asyncio.sleep(0)
        await tier.close()
        mount.go_on()
        outcomes = await asyncio.gather(*writing, return_exceptions=True)
    assert [outcome for outcome in outcomes if not isinstance(outcome, CacheClosed)] == []
    assert len(list(chunks_of(mount.behind).glob("[0-9a-f][0-9a-f]/*"))) == 1
    left = [path.name for path in (chunks_of(mount.behind) / ".tiercache" / "tmp").iterdir()]
    # What FUSE calls a deleted file that is open goes when the server hears that it was closed, which nobody waits for.
    assert [name for name in left if not name.startswith(".fuse_hidden")] == []
