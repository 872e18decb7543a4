"""A mount that was killed and mounted anew at the same place: what was open on the old one is of no use any more."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.needs import needs_fuse
from tests.remote.fs.mount import FragileMount
from tests.remote.fs.test_fs import FILE_BYTES, is_hit, tier_on
from tests.tiers.test_contract import LAYOUT
from tests.tiers.weka import physical_bytes
from tiercache.errors import CacheClosed, TierUnavailable
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.base import Tier
from tiercache.tiers.disk import DiskTier
from tiercache.tiers.files.directories import FileSettings
from tiercache.tiers.weka import WekaSettings, WekaTier

CAP_BYTES = 64 * FILE_BYTES
KINDS = ["fs", "disk", "weka"]

pytestmark = needs_fuse


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FragileMount]:
    with FragileMount(tmp_path) as mount:
        yield mount


@asynccontextmanager
async def opened(kind: str, place: Path) -> AsyncIterator[Tier]:
    tier: Tier
    if kind == "fs":
        tier = tier_on(place, max_size=CAP_BYTES / 2**30)
    elif kind == "disk":
        tier = DiskTier(FileSettings((place,), CAP_BYTES, threads=2), LAYOUT.fingerprint)
    else:
        settings = WekaSettings((place,), CAP_BYTES, threads=2, direct=None, way="posix", chunk_bytes=CHUNK_BYTES)
        tier = WekaTier(settings, LAYOUT.fingerprint)
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


async def is_written(tier: Tier, number: int) -> bool:
    key, payload = chunk(number)
    try:
        return await tier.write(key, payload, CHUNK_BYTES)
    except (TierUnavailable, OSError):
        return False


def dead_descriptors() -> int:
    """Descriptors of this process that lie on a mount that is gone."""
    dead = 0
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            os.fstat(number)
        except OSError as error:
            dead += error.errno == errno.ENOTCONN
    return dead


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noticed", [True, False], ids=["used while dead", "idle while dead"])
async def test_chunks_are_written_again(
    mount: FragileMount, kind: str, noticed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(kind, mount.path) as tier:
        assert [await is_written(tier, number) for number in range(1, 4)] == [True] * 3
        await asyncio.to_thread(mount.die)
        if noticed:
            assert not await is_written(tier, 4)
        await asyncio.to_thread(mount.revive)
        written = [await is_written(tier, number) for number in range(10, 90)]
        assert sum(written) >= 79, "all but perhaps the first"
        assert await is_hit(tier, 89)
        assert physical_bytes(mount.behind) <= CAP_BYTES, "and the cap holds, so the count is kept too"
        assert not dead_descriptors(), "nothing of the dead mount stays open"
        assert f"another mount is at {mount.path} now" in caplog.text
        assert "emptied" not in caplog.text, "its chunks are all there"


async def test_writes_that_waited_for_a_mount_that_hung_leave_a_volume_alone_that_was_closed_meanwhile(
    mount: FragileMount,
) -> None:
    async with opened("disk", mount.path) as tier:
        assert await is_written(tier, 1)
        mount.hang()
        writing = [asyncio.ensure_future(tier.write(*chunk(number), CHUNK_BYTES)) for number in range(2, 10)]
        await asyncio.sleep(0)
        await tier.close()
        mount.go_on()
        outcomes = await asyncio.gather(*writing, return_exceptions=True)
    assert [outcome for outcome in outcomes if not isinstance(outcome, CacheClosed)] == []
    assert len(list(mount.behind.glob("[0-9a-f][0-9a-f]/*"))) == 1
    left = [path.name for path in (mount.behind / ".tiercache" / "tmp").iterdir()]
    # What FUSE calls a deleted file that is open goes when the server hears that it was closed, which nobody waits for.
    assert [name for name in left if not name.startswith(".fuse_hidden")] == []
