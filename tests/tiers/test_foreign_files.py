"""Files of other programs in a tier's directory or among its chunks: nothing of them is touched or counted."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.chunks import chunks_of
from tests.tiers.kinds import FEW_BYTES, KINDS, opened
from tests.tiers.test_disk import FILE_BYTES, flip, is_hit
from tiercache.commands.stat import survey
from tiercache.commands.verify import verify
from tiercache.errors import ConfigError, TierCacheError, TierUnavailable
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.files.tier import FileTier
from tiercache.tiers.shared_memory import SharedMemoryTier

BLANK = (b"", bytes(FILE_BYTES), bytes(10_000))


async def store(tier: FileTier, numbers: range) -> int:
    """How many chunks were stored."""
    stored = 0
    for number in numbers:
        key, payload = chunk(number)
        stored += await tier.write(key, payload, CHUNK_BYTES)
    return stored


def put_foreign_files(place: Path, count: int = 60) -> None:
    """A content-addressed store whose names, and many of whose sizes, are those of chunks, and what else may lie around."""
    for number in range(count):
        name = hashlib.sha256(str(number).encode()).hexdigest()[: 64 if number % 2 else 48]
        path = place / name[:2] / name
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        path.write_bytes(b"theirs" * 3 if number % 3 == 0 else bytes([number + 1]) * FILE_BYTES)
        path.with_name(f"{name[:32]}.{number}").write_text("theirs")
        path.chmod(0o644)
    quarantine = place / "quarantine"
    quarantine.mkdir(mode=0o755)
    for number in range(20):
        (quarantine / f"sample-{number}").write_text("theirs")
        (quarantine / f"{bytes([number]).hex() * 24}.txt").write_text("theirs")
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


@pytest.mark.parametrize(("kind", "settings"), [*((kind, {}) for kind in KINDS), ("disk", {"file_access": "group"})])
async def test_nothing_of_others_is_touched_or_counted(place: Path, kind: str, settings: dict[str, Any]) -> None:
    put_foreign_files(place)
    before = seen(place)
    for _ in range(2):
        async with opened(kind, place, **settings) as tier:
            await tier.scanned()
            assert tier.statistics().resident <= 12
            assert await store(tier, range(1, 41)), "a small cap, which has to be kept by evicting"
            assert await is_hit(tier, 40)
            await tier.refreshed()
            statistics = tier.statistics()
            assert 0 < statistics.resident <= 12, "none of theirs is taken for a chunk"
            assert statistics.occupied_bytes <= FEW_BYTES + 4096
        async with opened(kind, place, **settings) as tier:
            if settings:
                assert os.stat(tier.path(chunk(40)[0])).st_mode & 0o777 == 0o660
            assert await is_hit(tier, 40), "what was stored is found by the next start"
    found = survey(place)
    assert found["chunks"] and not found["foreign"]
    assert seen(place, without=chunks_of(place)) == before


def put_names_of_chunks(place: Path) -> None:
    """Files that have all of a chunk but its header."""
    for number in range(60):
        path = place / f"{number:02x}" / f"{number:02x}{number:046x}"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not path.exists():
            path.write_bytes(b"theirs!!" * (FILE_BYTES // 8))
            path.chmod(0o600)


def put_blank(place: Path, content: bytes) -> None:
    for number in range(20):
        name = f"{'abcd'[number % 2 * 2 :][:2]}{number:062x}"
        for path in (place / name[:2] / name, place / "quarantine" / f"{name}.{1700000000000000000 + number}"):
            path.parent.mkdir(mode=0o755, exist_ok=True)
            path.write_bytes(content)
            path.chmod(0o644)


LATER: dict[str, Callable[[Path], None]] = {
    "with other modes": put_foreign_files,
    "with all but the header": put_names_of_chunks,
    "of another content": partial(put_blank, content=b"theirs!!" * 1024),
    **{f"of {len(content)} zeroes": partial(put_blank, content=content) for content in BLANK},
}


@pytest.mark.parametrize("kind", ["disk", "weka", "shared_memory"])
@pytest.mark.parametrize("later", LATER)
async def test_files_of_others_that_come_later_stay(place: Path, kind: str, later: str) -> None:
    """They are taken for chunks by their names, and looked into before they are evicted, removed or moved aside."""
    async with opened(kind, place) as tier:
        await store(tier, range(1, 7))
    ours = seen(place).keys()
    LATER[later](chunks_of(place))
    before = {path: status for path, status in seen(place).items() if path not in ours and Path(path).is_file()}
    async with opened(kind, place) as tier:
        await tier.scanned()
        assert await is_hit(tier, 6)
        for path in before:
            with contextlib.suppress(ValueError):  # it has no name of a chunk
                assert not await tier.remove(bytes.fromhex(Path(path).name))
        for start in range(20, 100, 20):
            await store(tier, range(start, start + 20))
            await tier.scanned()
            await tier.refreshed()
        assert await store(tier, range(100, 101)), "what theirs take is not in the count any more"
        assert await is_hit(tier, 100)
        assert 0 < tier.statistics().resident <= 12
        assert tier.statistics().occupied_bytes <= FEW_BYTES + 4096
    verify(place, Console(quiet=True))
    after = seen(place)
    assert {path: after.get(path) for path in before} == before


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
async def test_forget_removes_the_chunk_from_quarantine_too(place: Path, kind: str) -> None:
    async with opened(kind, place, cap_bytes=1 << 24) as tier:
        await store(tier, range(1, 4))
        for number in (1, 2):
            flip(Path(tier.path(chunk(number)[0])), FILE_BYTES - 9)
            assert not await is_hit(tier, number)
        await store(tier, range(1, 2))
        assert len(list((chunks_of(place) / "quarantine").iterdir())) == 2
        await tier.remove(chunk(1)[0])
        (left,) = (chunks_of(place) / "quarantine").iterdir()
        assert left.name.startswith(chunk(2)[0].hex())
        await tier.remove(chunk(2)[0])
        assert not list((chunks_of(place) / "quarantine").iterdir()), "also where no chunk of that key is stored"
    found = survey(place)
    assert found["ledger_bytes"] == found["counted_bytes"]


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


async def test_a_subdirectory_of_our_name_with_files_of_others_is_used_beside_them(place: Path) -> None:
    chunks_of(place).mkdir()
    put_foreign_files(chunks_of(place))
    before = {path: status for path, status in seen(place).items() if Path(path).is_file()}
    async with opened("disk", place) as tier:
        await tier.scanned()
        assert await store(tier, range(1, 41))
        assert await is_hit(tier, 40)
    after = seen(place)
    assert {path: after.get(path) for path in before} == before


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
@pytest.mark.parametrize("name", ["", ".tiercache", ".tiercache/tmp"])
@pytest.mark.parametrize("kind", ["disk", "shared_memory"])
async def test_a_directory_of_ours_that_is_another_users_is_an_error(place: Path, kind: str, name: str) -> None:
    """In a directory in which everybody may make something, but remove only what is theirs."""
    place.chmod(0o1777)
    (chunks_of(place) / ".tiercache" / "tmp").mkdir(parents=True)
    os.chown(chunks_of(place) / name, 65534, 65534)
    with pytest.raises(ConfigError, match=f"{place}.*belongs to user 65534.*{name}"):
        async with opened(kind, place):
            pass


async def test_verify_leaves_files_of_others_where_they_are(place: Path) -> None:
    async with opened("disk", place) as tier:
        await store(tier, range(1, 4))
        flip(Path(tier.path(chunk(3)[0])), FILE_BYTES - 9)
    put_foreign_files(chunks_of(place), 6)
    before = seen(place)
    found = verify(place, Console(quiet=True))
    assert (found.checked, len(found.bad), len(found.unreadable)) == (9, 1, 6)
    after = seen(place)
    gone = before.keys() - after.keys()
    assert [Path(path).name for path in gone] == [chunk(3)[0].hex()]
    files = [path for path in before.keys() - gone if Path(path).is_file() and Path(path).name != "ledger"]
    assert all(after[path] == before[path] for path in files)


@pytest.mark.needs("root")
@pytest.mark.parametrize("kind", ["shared_memory"])
async def test_a_file_that_another_user_can_change_is_not_mapped(place: Path, kind: str) -> None:
    """It could be rewritten after it was verified."""
    async with opened(kind, place) as tier:
        await store(tier, range(1, 3))
    assert isinstance(tier, SharedMemoryTier)
    path = Path(tier.path(chunk(1)[0]))
    os.chown(path, 65534, 65534)
    async with opened(kind, place) as tier:
        assert isinstance(tier, SharedMemoryTier)
        with pytest.raises((TierCacheError, OSError)):
            lease = await tier.map(chunk(1)[0], "read")  # type: ignore[arg-type]
            assert lease is None
