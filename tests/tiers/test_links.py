"""Symbolic links below a tier's directory: what they lead to is neither changed nor used."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from pathlib import Path

import pytest

from tests.chunks import chunks_of
from tests.tiers.kinds import opened
from tests.tiers.test_disk import FILE_BYTES, flip, is_hit
from tests.tiers.test_foreign_files import seen, store
from tiercache.errors import ConfigError, TierCacheError
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES

KINDS = ["disk", "fs", "weka", "shared_memory", "hf3fs"]


def put_files(target: Path) -> None:
    """Make files with names like ours that belong to another program."""
    target.mkdir(mode=0o755)
    for number in range(20):
        (target / f"00{number:062x}").write_bytes(b"theirs" * number)
        (target / f"00{number:046x}").write_bytes(bytes(FILE_BYTES))
        (target / f"{number:032x}.{number}").write_text("theirs")
        (target / f"{number:048x}.{1700000000000000000 + number}").write_text("theirs")
        (target / f"sample-{number}").write_text("theirs")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_link_in_the_place_of_a_directory_of_chunks_costs_those_chunks(place: Path, kind: str) -> None:
    async with opened(kind, place):
        pass
    target = place.parent / "target"
    put_files(target)
    (chunks_of(place) / "00").symlink_to(target)
    before, mode = seen(target), target.stat().st_mode
    async with opened(kind, place) as tier:
        await tier.scanned()
        assert tier.statistics().resident == 0
        assert not await store(tier, range(1, 4)), "declined, and no failure of the tier"
        assert not await is_hit(tier, 1)
        key = b"\xff" + chunk(1)[0][1:]
        assert await tier.write(key, chunk(1)[1], CHUNK_BYTES), "others have their places"
        assert not await tier.remove(chunk(1)[0])
    assert (seen(target), target.stat().st_mode) == (before, mode)


@pytest.mark.parametrize("kind", ["disk", "weka"])
async def test_a_link_that_comes_under_a_running_tier_has_nothing_deleted_behind_it(place: Path, kind: str) -> None:
    async with opened(kind, place) as tier:
        assert await store(tier, range(1, 7)) == 6
        elsewhere = place.parent / "elsewhere"
        (chunks_of(place) / "00").rename(elsewhere)
        (chunks_of(place) / "00").symlink_to(elsewhere)
        before = seen(elsewhere)
        for number in (1, 2):
            await tier.remove(chunk(number)[0])
        flip(elsewhere / chunk(3)[0].hex(), FILE_BYTES - 9)
        before = seen(elsewhere)
        assert not await is_hit(tier, 3)
        assert not await store(tier, range(20, 40))
        assert seen(elsewhere) == before


@pytest.mark.parametrize("kind", ["disk", "shared_memory"])
async def test_the_groups_modes_do_not_go_through_links(place: Path, kind: str) -> None:
    async with opened(kind, place):
        pass
    targets = [place.parent / name for name in ("a", "b", "c")]
    for target, name in zip(targets, ("00", "quarantine", "77"), strict=True):
        put_files(target)
        (chunks_of(place) / name).symlink_to(target)
    before = [(seen(target), target.stat().st_mode) for target in targets]
    async with opened("disk", place, file_access="group") as tier:
        await tier.scanned()
        await store(tier, range(1, 3))
        assert (chunks_of(place) / ".tiercache").stat().st_mode & 0o7777 == 0o2770
    assert [(seen(target), target.stat().st_mode) for target in targets] == before


@pytest.mark.parametrize("kind", KINDS)
async def test_a_link_in_the_place_of_quarantine_is_not_followed(place: Path, kind: str) -> None:
    async with opened(kind, place, cap_bytes=1 << 24) as tier:
        assert await store(tier, range(1, 13)) == 12
    target = place.parent / "target"
    put_files(target)
    (chunks_of(place) / "quarantine").symlink_to(target)
    before, mode = seen(target), target.stat().st_mode
    async with opened(kind, place, cap_bytes=1 << 24) as tier:
        await tier.scanned()
        for number in range(1, 13):
            flip(Path(tier.path(chunk(number)[0])), FILE_BYTES - 9)
        if kind != "shared_memory":
            assert not any([await is_hit(tier, number) for number in range(1, 13)])
            assert await store(tier, range(1, 3)) == 2, "what is bad is gone all the same"
            assert await is_hit(tier, 1)
        assert tier.statistics().occupied_bytes <= 13 * (FILE_BYTES + 4096)
        await tier.remove(chunk(1)[0])
    assert (seen(target), target.stat().st_mode) == (before, mode)


@pytest.mark.parametrize("kind", ["disk", "shared_memory"])
@pytest.mark.parametrize("impostor", ["link", "file"])
async def test_deletions_by_others_are_told_beside_a_link(
    place: Path, kind: str, impostor: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Directories of chunks are watched one by one."""
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
    assert not [message for message in caplog.messages if "noticed only when" in message]


@pytest.mark.parametrize("name", ["", ".tiercache", ".tiercache/tmp"])
@pytest.mark.parametrize("kind", ["disk", "weka", "shared_memory"])
async def test_a_link_in_the_place_of_the_bookkeeping_is_an_error(place: Path, kind: str, name: str) -> None:
    async with opened(kind, place) as tier:
        await store(tier, range(1, 3))
    target = place.parent / "target"
    (chunks_of(place) / name).rename(target)
    (chunks_of(place) / name).symlink_to(target)
    before, mode = seen(target), target.stat().st_mode
    with pytest.raises(ConfigError, match=rf"{chunks_of(place) / name}"):
        async with opened(kind, place):
            pass
    assert (seen(target), target.stat().st_mode) == (before, mode)


@pytest.mark.parametrize("kind", ["disk", "weka", "hf3fs"])
async def test_a_link_that_takes_the_place_of_the_bookkeeping_has_nothing_removed_or_made_behind_it(
    place: Path, kind: str
) -> None:
    target = place.parent / "target"
    put_files(target)
    for name in ("yarn.lock", "probe.1.2", f"{'0' * 32}.lock", f"{'0' * 32}.5"):
        (target / name).write_text("theirs")
    before = seen(target)
    async with opened(kind, place) as tier:
        assert await store(tier, range(1, 13))
        (chunks_of(place) / ".tiercache" / "tmp").rename(place.parent / "elsewhere")
        (chunks_of(place) / ".tiercache" / "tmp").symlink_to(target)
        shutil.rmtree(chunks_of(place) / "00")
        for start in range(20, 80, 20):
            with contextlib.suppress(OSError, TierCacheError):
                await store(tier, range(start, start + 20))
            await tier.scanned()
            await tier.refreshed()
        assert not await is_hit(tier, 1)
    assert seen(target) == before


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("linked", ["itself", "its parent"])
async def test_the_configured_directory_may_be_a_link(
    place: Path, kind: str, linked: str, caplog: pytest.LogCaptureFixture
) -> None:
    link = place.parent / "link"
    link.symlink_to(place if linked == "itself" else place.parent)
    configured = link if linked == "itself" else link / "kv"
    with caplog.at_level(logging.WARNING):
        async with opened(kind, configured) as tier:
            assert await store(tier, range(1, 3)) == 2
        async with opened(kind, place) as tier:
            assert await is_hit(tier, 2)
    assert not [message for message in caplog.messages if "of others" in message]


@pytest.mark.parametrize("kind", ["disk", "shared_memory"])
async def test_the_error_for_a_dangling_link_names_its_target(place: Path, kind: str) -> None:
    link = place.parent / "link"
    link.symlink_to(place.parent / "gone")
    with pytest.raises(
        ConfigError, match=f"{link} cannot be used: .*it is a link to {place.parent}/gone, which is missing"
    ):
        async with opened(kind, link):
            pass
    assert not (place.parent / "gone").exists()
