"""Files of other programs in a tier's directory: nothing of them is touched or counted."""

import asyncio
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.chunks import chunks_of
from tests.needs import needs_fuse
from tests.tiers.kinds import FEW_BYTES, KINDS, opened
from tests.tiers.opened import refreshed
from tests.tiers.test_disk import FILE_BYTES, flip, is_hit
from tiercache.commands.stat import survey
from tiercache.errors import ConfigError, TierUnavailable
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.files.tier import FileTier


async def store(tier: FileTier, numbers: range) -> int:
    """How many chunks were stored."""
    return sum([await tier.write(*chunk(number), CHUNK_BYTES) for number in numbers])


def put_foreign_files(place: Path, count: int = 60) -> None:
    """A content-addressed store whose names, and many of whose sizes, are those of chunks, and what else may lie around."""
    for number in range(count):
        name = hashlib.sha256(str(number).encode()).hexdigest()[: 64 if number % 2 else 48]
        path = place / name[:2] / name
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        path.write_bytes(b"theirs" * 3 if number % 3 == 0 else bytes([number + 1]) * FILE_BYTES)
        path.with_name(f"{name[:32]}.{number}").write_text("theirs")
        path.chmod(0o644)
    (place / "README").write_text("theirs")


def seen(place: Path, without: Path | None = None) -> dict[str, tuple[int, int, str]]:
    """Inode, mode and content of all that lies there, but for what is below `without`."""
    found = {}
    for path in sorted(place.rglob("*")):
        if without is None or not path.is_relative_to(without):
            status = path.lstat()
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            found[str(path)] = (status.st_ino, status.st_mode, content)
    return found


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, {}) for kind in KINDS),
        pytest.param("hf3fs", {}, marks=needs_fuse),
        ("disk", {"file_access": "group"}),
    ],
)
async def test_nothing_of_others_is_touched_or_counted(place: Path, kind: str, settings: dict[str, Any]) -> None:
    put_foreign_files(place)
    before, mode = seen(place), place.stat().st_mode
    for _ in range(2):
        async with opened(kind, place, **settings) as tier:
            await tier.scanned()
            assert tier.statistics().resident <= 12
            assert await store(tier, range(1, 41)), "a small cap, which has to be kept by evicting"
            assert await is_hit(tier, 40)
            await refreshed(tier)
            statistics = tier.statistics()
            assert 0 < statistics.resident <= 12, "none of theirs is taken for a chunk"
            assert statistics.occupied_bytes <= FEW_BYTES + 4096
        async with opened(kind, place, **settings) as tier:
            if settings:
                assert os.stat(tier.path(chunk(40)[0])).st_mode & 0o777 == 0o660
            assert await is_hit(tier, 40), "what was stored is found by the next start"
    found = survey(place)
    assert found["chunks"] and not found["foreign"]
    assert (seen(place, without=chunks_of(place)), place.stat().st_mode) == (before, mode)


async def test_what_a_power_cut_left_of_a_chunk_is_removed(place: Path) -> None:
    async with opened("disk", place) as tier:
        await tier.scanned()  # a scan that met the empty file, before the zeroes are written, would remove it
        await store(tier, range(1, 3))
        blank, damaged = (Path(tier.path(chunk(number)[0])) for number in (1, 2))
        blank.write_bytes(bytes(FILE_BYTES))
        flip(damaged, 70)
        assert await tier.remove(chunk(1)[0])
        assert await tier.remove(chunk(2)[0]), "the key in a damaged header is ours still"
    assert not blank.exists() and not damaged.exists()


@pytest.mark.parametrize("kind", ["disk", "fs", "weka"])
@pytest.mark.parametrize("way", ["link", "directory"])
async def test_nothing_is_touched_in_a_foreign_directory_that_takes_the_path(place: Path, kind: str, way: str) -> None:
    theirs = place.parent / "theirs"
    theirs.mkdir()
    put_foreign_files(theirs)
    async with opened(kind, place) as tier:
        await store(tier, range(1, 11))
        place.rename(place.parent / "old")
        if way == "link":
            place.symlink_to(theirs)
        else:
            theirs.rename(place)
        before = seen(place)
        for number in range(1, 11):
            assert not await is_hit(tier, number)
        with pytest.raises(TierUnavailable):  # the chunk would come back with its directory
            await tier.remove(chunk(1)[0])
        for start in range(20, 100, 20):
            await store(tier, range(start, start + 20))
            await tier.scanned()
        assert await is_hit(tier, 99)
        assert Path(tier.path(chunk(99)[0])).is_relative_to(chunks_of(place.resolve()))
        assert seen(place, without=chunks_of(place)) == before


@pytest.mark.needs("root")
@pytest.mark.parametrize("kind", ["disk", "shared_memory"])
async def test_a_directory_of_another_user_is_used_by_a_subdirectory_of_ours(place: Path, kind: str) -> None:
    """Who owns a directory can put anything in it at any time, links included."""
    os.chown(place, 65534, 65534)
    async with opened(kind, place) as tier:
        assert await store(tier, range(1, 4)) == 3
    assert chunks_of(place).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("left", ["all", "chunks"])
async def test_chunks_without_their_manifest_are_found(place: Path, left: str) -> None:
    """After the directory was emptied, running instances put chunks there before one of them makes the manifest."""
    async with opened("disk", place) as tier:
        await store(tier, range(1, 4))
    (chunks_of(place) / "tiercache.json").unlink()
    if left != "all":
        shutil.rmtree(chunks_of(place) / ".tiercache")
    async with opened("disk", place) as tier:
        assert await is_hit(tier, 3)
        await tier.scanned()
    found = survey(place)
    assert found["ledger_bytes"] == found["counted_bytes"]


@pytest.mark.needs("root")
@pytest.mark.parametrize("kind", ["disk", "shared_memory"])
async def test_a_directory_of_ours_that_is_another_users_is_an_error(place: Path, kind: str) -> None:
    """In a directory in which everybody may make something, but remove only what is theirs."""
    place.chmod(0o1777)
    chunks_of(place).mkdir()
    os.chown(chunks_of(place), 65534, 65534)
    with pytest.raises(ConfigError, match=f"{place}.*belongs to user 65534"):
        async with opened(kind, place):
            pass


@pytest.mark.parametrize("kind", ["disk", "shared_memory"])
@pytest.mark.parametrize("impostor", ["link", "file"])
async def test_deletions_by_others_are_told_beside_a_link(place: Path, kind: str, impostor: str) -> None:
    async with opened(kind, place) as tier:
        await store(tier, range(1, 4))
    if impostor == "link":
        (chunks_of(place) / "77").symlink_to(place.parent)
    else:
        (chunks_of(place) / "77").write_text("theirs")
    gone = asyncio.Event()
    async with opened(kind, place) as tier:
        await tier.scanned()
        tier.tell(lambda key: gone.set() if not tier.contains(key) else None)
        (chunks_of(place) / "00" / chunk(2)[0].hex()).unlink()
        async with asyncio.timeout(60):
            await gone.wait()
        assert not tier.contains(chunk(2)[0])


@pytest.mark.parametrize("kind", ["disk", "weka"])
async def test_files_of_others_among_the_bookkeeping_stay(place: Path, kind: str) -> None:
    temporary = chunks_of(place) / ".tiercache" / "tmp"
    temporary.mkdir(parents=True)
    for name in ("yarn.lock", "a.new", "probe.1.2", "0.5"):
        (temporary / name).write_text("theirs")
    before = seen(temporary)
    async with opened(kind, place) as tier:
        await tier.scanned()
        assert await store(tier, range(1, 4)) == 3
    assert seen(temporary) == before
