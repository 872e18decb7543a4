"""The Weka tier: what instances on one directory know of each other, and how they make room."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.chunks import chunks_of
from tests.scheduler.conftest import JumpingPolicy
from tests.tiers import test_contract
from tests.tiers.opened import fails, open_tier, refreshed, until
from tests.tiers.test_disk import FILE_BYTES, FINGERPRINT, fill, is_hit
from tiercache.core.keys import ChunkKey, tenant_tag
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.base import Tier
from tiercache.tiers.files.index import pauses_s
from tiercache.tiers.weka import WekaSettings, WekaTier


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return JumpingPolicy()


@asynccontextmanager
async def opened(directory: Path, cap_chunks: int = 64, **settings: object) -> AsyncIterator[WekaTier]:
    """A tier that has finished its first scan, with a cap of `cap_chunks` files and the directory that they lie in."""
    chosen = {"refresh_s": 5.0, "threads": 4, "direct": None} | settings
    cap_bytes = cap_chunks * FILE_BYTES + 4096
    tier = WekaTier(WekaSettings((directory,), cap_bytes, **chosen), FINGERPRINT)  # type: ignore[arg-type]
    async with open_tier(tier):
        await refreshed(tier)
        yield tier


def key_of(number: int) -> ChunkKey:
    return chunk(number)[0]


class TestWekaTier(test_contract.TestDiskTier):
    async def make_tier(self, place: Path) -> Tier:
        return WekaTier(WekaSettings((place,), cap_bytes=64 << 20), test_contract.LAYOUT.fingerprint)

    async def make_capped(self, place: Path, chunks: int, tenant_chunks: int = 0) -> Tier | None:
        settings = WekaSettings((place,), **test_contract.limits(chunks, tenant_chunks))
        return WekaTier(settings, test_contract.LAYOUT.fingerprint)


async def test_chunk_removed_and_stored_again_elsewhere_is_known_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as one, opened(tmp_path) as other:
        await fill(one, range(1, 2))
        await refreshed(other)
        await other.remove(key_of(1))
        await fill(one, range(1, 2))
        assert one.contains(key_of(1)), "it may err until the next refresh"
        await refreshed(one)
        await fill(one, range(1, 2))
        await refreshed(other)
        assert other.contains(key_of(1))


async def test_lookup_asks_memory_and_a_read_asks_the_mount(tmp_path: Path) -> None:
    async with opened(tmp_path, refresh_s=1e3) as other, opened(tmp_path) as one:
        await fill(one, range(1, 2))
        assert await other.probe([key_of(1)]) == 0
        assert await is_hit(other, 1)


@pytest.mark.parametrize(
    ("took_s", "least_s", "hintless_s"), [(0.0, 0.1, 1.0), (0.01, 0.1, 1.0), (0.05, 0.5, 1.0), (3.0, 30.0, 30.0)]
)
def test_refreshing_takes_a_tenth_of_the_time_at_most(took_s: float, least_s: float, hintless_s: float) -> None:
    least, more = pauses_s(1.0, [took_s / 10] * 10)
    assert (least, least + more) == (pytest.approx(least_s), pytest.approx(hintless_s))


def test_calls_of_a_mount_that_hung_do_not_lengthen_the_pause_to_hours() -> None:
    assert pauses_s(1.0, [400.0, 45.0])[0] <= 60.0


async def test_a_directory_that_cannot_be_listed_for_a_while_does_not_end_the_refresh(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as tier, opened(tmp_path) as other:
        await fill(other, range(1, 2))
        with monkeypatch.context() as device:
            device.setattr(os, "scandir", fails)
            await refreshed(tier)
        assert "could not be listed" in caplog.text
        await refreshed(tier)
        assert tier.contains(key_of(1))


async def test_a_chunk_that_cannot_be_deleted_stays_known_and_others_go(tmp_path: Path) -> None:
    async with opened(tmp_path, cap_chunks=10) as tier:
        await fill(tier, range(1, 8))
        path = tier.path(key_of(1))
        if subprocess.run(["chattr", "+i", path], capture_output=True, check=False).returncode:
            pytest.skip("this file system cannot forbid deletion")
        try:
            await fill(tier, range(8, 30))
            assert tier.contains(key_of(1))
        finally:
            subprocess.run(["chattr", "-i", path], check=True)
        await fill(tier, range(30, 60))
        assert not tier.contains(key_of(1))


def tenants_chunk(number: int, salt: str) -> ChunkKey:
    return key_of(number) + tenant_tag(salt)


async def store_for(tier: WekaTier, salt: str, numbers: range) -> None:
    for number in numbers:
        assert await tier.write(tenants_chunk(number, salt), chunk(number)[1], CHUNK_BYTES)


def of_tenant(directory: Path, salt: str) -> int:
    return sum(path.name.endswith(tenant_tag(salt).hex()) for path in chunks_of(directory).glob("00/*"))


async def test_what_several_instances_wrote_above_a_quota_is_deleted_once_it_is_known(tmp_path: Path) -> None:
    quota = {"tenant_bytes": 8 * FILE_BYTES}
    async with opened(tmp_path, 64, **quota) as one, opened(tmp_path, 64, **quota) as other:
        await store_for(one, "quiet", range(8))
        await store_for(one, "noisy", range(100, 108))
        await store_for(other, "noisy", range(200, 208))
        assert of_tenant(tmp_path, "noisy") == 16, "each knows of its own"
        await asyncio.gather(refreshed(one), refreshed(other))
        await until(lambda: of_tenant(tmp_path, "noisy") <= 8)
        await asyncio.gather(refreshed(one), refreshed(other))
        # Fewer than 8 are left where both evicted what each knew of before either had listed what the other deleted.
        assert 0 < of_tenant(tmp_path, "noisy") <= 8 == of_tenant(tmp_path, "quiet")
