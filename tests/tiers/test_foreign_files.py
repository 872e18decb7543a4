"""A directory that holds other programs' files: the tier works beside them, and nothing of them is touched or counted."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.tiers.kinds import FEW_BYTES, KINDS, opened
from tests.tiers.test_disk import FILE_BYTES, flip, is_hit
from tiercache.commands.stat import survey
from tiercache.commands.verify import verify
from tiercache.errors import ConfigError, TierCacheError
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


def seen(place: Path, without: str = "tiercache-chunks") -> dict[str, tuple[int, int, str]]:
    """Inode, mode and content of all that lies there, but for what is ours."""
    found = {}
    for path in sorted(place.rglob("*")):
        if without not in path.parts:
            status = path.lstat()
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            found[str(path)] = (status.st_ino, status.st_mode, content)
    return found


@pytest.mark.parametrize(("kind", "settings"), [*((kind, {}) for kind in KINDS), ("disk", {"file_access": "group"})])
async def test_nothing_of_others_is_touched_or_counted(
    place: Path, kind: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    put_foreign_files(place)
    before = seen(place)
    with caplog.at_level(logging.WARNING):
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
    assert seen(place) == before
    said = [message for message in caplog.messages if "foreign files, such as" in message]
    assert len(said) == 1, "one warning, the first time"
    assert said[0].startswith(f"{place} holds foreign files, such as ")
    assert any(path.name in said[0] for path in place.iterdir() if path.name != "tiercache-chunks")


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
    LATER[later](place)
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
        assert len(list((place / "quarantine").iterdir())) == 2
        await tier.remove(chunk(1)[0])
        (left,) = (place / "quarantine").iterdir()
        assert left.name.startswith(chunk(2)[0].hex())
        await tier.remove(chunk(2)[0])
        assert not list((place / "quarantine").iterdir()), "also where no chunk of that key is stored"
    found = survey(place)
    assert found["ledger_bytes"] == found["counted_bytes"]


@pytest.mark.parametrize("kind", ["disk", "fs", "weka"])
@pytest.mark.parametrize("way", ["link", "directory"])
async def test_a_foreign_directory_that_takes_the_path_is_not_used_itself(place: Path, kind: str, way: str) -> None:
    theirs = place.parent / "theirs"
    theirs.mkdir()
    put_foreign_files(theirs)
    async with opened(kind, place) as tier:
        await store(tier, range(1, 11))
        for number in range(1, 11):
            path = theirs / "00" / chunk(number)[0].hex()
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"theirs!!" * (FILE_BYTES // 8))
            (theirs / "quarantine" / f"{path.name}.{1700000000000000000 + number}").write_text("theirs")
        place.rename(place.parent / "old")
        if way == "link":
            place.symlink_to(theirs)
        else:
            theirs.rename(place)
        before = seen(place)
        for number in range(1, 11):
            assert not await is_hit(tier, number)
        assert not await tier.remove(chunk(1)[0])
        for start in range(20, 100, 20):
            await store(tier, range(start, start + 20))
            await tier.scanned()
        assert await is_hit(tier, 99)
        assert Path(tier.path(chunk(99)[0])).is_relative_to(place.resolve() / "tiercache-chunks")
        assert seen(place) == before


async def test_chunks_beside_files_of_others_are_found_by_stat_and_when_those_have_gone(place: Path) -> None:
    put_foreign_files(place)
    async with opened("disk", place) as tier:
        await store(tier, range(1, 4))
    found = survey(place)
    assert (found["chunks"], found["foreign"]) == (3, 0)
    for path in place.iterdir():
        if path.name != "tiercache-chunks":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    async with opened("disk", place) as tier:
        assert await is_hit(tier, 3)


@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("kind", ["disk", "shared_memory", "fs"])
async def test_a_directory_that_others_delete_with_ours_in_it_is_used_itself_then(
    place: Path, kind: str, itself: bool
) -> None:
    """No file of others is left to keep apart from, and no empty directory of ours stays behind."""
    directory = place / "kv"
    directory.mkdir()
    put_foreign_files(directory)
    async with opened(kind, directory) as tier:
        assert await store(tier, range(1, 4)) == 3
        assert os.path.dirname(tier.path(chunk(1)[0])).startswith(f"{directory}/tiercache-chunks/")
        shutil.rmtree(directory)
        if not itself:
            directory.mkdir()
        assert await store(tier, range(4, 7)) == 3
        assert await is_hit(tier, 6)
        assert not (directory / "tiercache-chunks").exists()
    async with opened(kind, directory) as tier:
        assert await is_hit(tier, 6)


@pytest.mark.needs("root")
@pytest.mark.parametrize("kind", ["disk", "shared_memory"])
async def test_a_directory_of_another_user_is_used_by_a_subdirectory_of_ours(
    place: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Who owns a directory can put anything in it at any time, links included."""
    os.chown(place, 65534, 65534)
    with caplog.at_level(logging.WARNING):
        async with opened(kind, place) as tier:
            await store(tier, range(1, 4))
            assert Path(tier.path(chunk(1)[0])).is_relative_to(place / "tiercache-chunks")
    assert (place / "tiercache-chunks").stat().st_mode & 0o777 == 0o700
    assert sum("user 65534" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(
    ("mode", "access", "itself"), [(0o777, "owner", False), (0o770, "owner", False), (0o770, "group", True)]
)
async def test_a_directory_that_others_may_write_to_is_used_by_a_subdirectory_unless_they_are_to_have_access(
    place: Path, mode: int, access: str, itself: bool
) -> None:
    place.chmod(mode)
    async with opened("disk", place, file_access=access) as tier:
        await store(tier, range(1, 4))
        assert Path(tier.path(chunk(1)[0])).is_relative_to(place / "tiercache-chunks") is not itself


@pytest.mark.parametrize("left", ["all", "chunks"])
async def test_a_directory_of_ours_without_its_manifest_is_used_itself(place: Path, left: str) -> None:
    """After the directory was emptied, running instances put chunks there before one of them makes the manifest."""
    async with opened("disk", place) as tier:
        await store(tier, range(1, 4))
    (place / "tiercache.json").unlink()
    if left != "all":
        shutil.rmtree(place / ".tiercache")
    (place / "ab").mkdir(mode=0o700)
    async with opened("disk", place) as tier:
        assert Path(tier.path(chunk(1)[0])).parent.parent == place
        assert await is_hit(tier, 3)
        await tier.scanned()
    found = survey(place)
    assert found["ledger_bytes"] == found["counted_bytes"]


MADE_UP = {
    "empty": b"",
    "zeroes": bytes(FILE_BYTES),
    "zeroes, then data": bytes(1024) + b"theirs" * 2000,
    "our magic": b"TIERKV\r\n theirs" * 300,
    "a text": b"theirs",
}
NAMES = ["00/{:048x}", "00/{:064x}", "00/00{:02x}", "quarantine/{:048x}.170000000000000"]


@pytest.mark.parametrize(
    ("names", "content"),
    [
        *itertools.product(NAMES, MADE_UP),
        ("ab/{:032x}.170000000000000", "a text"),
        (".gitignore/{:032x}.170000000000000", "a text"),
    ],
)
async def test_only_headers_that_verify_make_a_directory_ours(
    place: Path, content: str, names: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(20):
        path = place / names.format(number)
        path.parent.mkdir(mode=0o755, exist_ok=True)
        path.write_bytes(MADE_UP[content])
    before = seen(place)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            async with opened("disk", place) as tier:
                await store(tier, range(1, 31))
                await tier.scanned()
                assert await is_hit(tier, 30)
                assert Path(tier.path(chunk(1)[0])).is_relative_to(place / "tiercache-chunks")
                await tier.remove(chunk(1)[0])
    assert seen(place) == before
    assert any("holds foreign files" in message for message in caplog.messages)


@pytest.mark.parametrize("content", BLANK, ids=len)
async def test_a_store_of_others_that_was_empty_is_not_taken_for_ours(place: Path, content: bytes) -> None:
    """Its directories have the mode of ours: its program makes nothing that others can read."""
    for number in range(256):
        (place / f"{number:02x}").mkdir(mode=0o700)
    async with opened("disk", place) as tier:
        await store(tier, range(1, 4))
        assert Path(tier.path(chunk(1)[0])).is_relative_to(place / "tiercache-chunks")
    for number in range(50):
        name = hashlib.sha256(str(number).encode()).hexdigest()
        (place / name[:2] / name).write_bytes(content)
        (place / name[:2] / name).chmod(0o600)
    before = seen(place)
    for _ in range(2):
        async with opened("disk", place) as tier:
            await store(tier, range(10, 40))
            await tier.scanned()
            assert await is_hit(tier, 39)
    assert seen(place) == before


async def test_a_directory_of_ours_without_its_manifest_stays_one_beside_files_of_others(place: Path) -> None:
    """Two instances that began before and after that share one count."""
    async with opened("disk", place) as before:
        await store(before, range(1, 4))
        (place / "tiercache.json").unlink()
        (place / "notes.txt").write_text("theirs")
        async with opened("disk", place) as after:
            assert await is_hit(after, 3)
            await store(after, range(4, 7))
            await after.scanned()
            assert await is_hit(before, 6)
    assert (place / "notes.txt").read_text() == "theirs"
    assert not (place / "tiercache-chunks").exists()


async def test_a_foreign_subdirectory_of_our_name_is_an_error(place: Path) -> None:
    put_foreign_files(place)
    put_foreign_files(place / "tiercache-chunks")
    before = seen(place, without="")
    with pytest.raises(ConfigError, match=f"{place}/tiercache-chunks is not empty and has no tiercache.json"):
        async with opened("disk", place):
            pass
    assert seen(place, without="") == before


@pytest.mark.needs("root")
@pytest.mark.parametrize("name", [".tiercache", ".tiercache/tmp"])
@pytest.mark.parametrize("kind", ["disk", "shared_memory"])
async def test_bookkeeping_of_another_user_is_an_error(place: Path, kind: str, name: str) -> None:
    """In a directory in which everybody may make something, but remove only what is theirs."""
    place.chmod(0o1777)
    (place / ".tiercache" / "tmp").mkdir(parents=True)
    os.chown(place / name, 65534, 65534)
    with pytest.raises(ConfigError, match=f"{place}.*belongs to user 65534.*{name}"):
        async with opened(kind, place):
            pass


async def test_verify_leaves_files_of_others_where_they_are(place: Path) -> None:
    async with opened("disk", place) as tier:
        await store(tier, range(1, 4))
        flip(Path(tier.path(chunk(3)[0])), FILE_BYTES - 9)
    put_foreign_files(place, 6)
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
