"""Symbolic links at and in a tier's directory."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from tests.chunks import chunks_of
from tests.tiers.kinds import opened
from tests.tiers.test_disk import is_hit
from tests.tiers.test_foreign_files import seen, store
from tiercache.errors import ConfigError
from tiercache.testing import chunk

KINDS = ["disk", "fs", "weka", "shared_memory", "hf3fs"]


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


@pytest.mark.parametrize("kind", ["disk", "weka", "shared_memory"])
async def test_a_link_in_the_place_of_the_directory_of_chunks_is_an_error(place: Path, kind: str) -> None:
    async with opened(kind, place) as tier:
        await store(tier, range(1, 3))
    target = place.parent / "target"
    chunks_of(place).rename(target)
    chunks_of(place).symlink_to(target)
    before, mode = seen(target), target.stat().st_mode
    with pytest.raises(ConfigError, match=rf"{chunks_of(place)}"):
        async with opened(kind, place):
            pass
    assert (seen(target), target.stat().st_mode) == (before, mode)


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
