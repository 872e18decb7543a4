"""The fs tier: its settings, several instances on one directory, and mounts that hang and die."""

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.compression.contract import CompressionContract
from tests.needs import needs_fuse
from tests.remote.fs.mount import FragileMount
from tests.remote.made import configured
from tests.remote.waiting import eventually
from tests.tiers.opened import open_tier
from tests.tiers.test_contract import limits
from tests.tiers.test_disk import fill, flip, is_hit
from tiercache import Config, Layout, TierCache
from tiercache.assembly import make_tiers
from tiercache.errors import ConfigError, TierUnavailable
from tiercache.testing import TierContract, chunk
from tiercache.tiers.base import Tier
from tiercache.tiers.files.access import Mount
from tiercache.tiers.remote.fs import FsTier


def tier_on(*directories: Path, url: str = "", **options: Any) -> FsTier:
    given = {"name": "fs.a", "base_path": tuple(map(str, directories)), "max_size": 0.0625} | options
    return FsTier(configured("fs", url, **given))


def opened(*directories: Path, **options: Any) -> AbstractAsyncContextManager[FsTier]:
    return open_tier(tier_on(*directories, **options))


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FragileMount]:
    with FragileMount(tmp_path) as mount:
        yield mount


class TestFsTier(TierContract):
    async def make_tier(self, place: Path) -> Tier:
        return tier_on(place / "a", place / "b")

    async def make_capped(self, place: Path, chunks: int, tenant_chunks: int = 0) -> Tier | None:
        sizes = {key: size / 2**30 for key, size in limits(chunks, tenant_chunks).items()}
        return tier_on(place / "c", max_size=sizes["cap_bytes"], tenant_max_size=sizes["tenant_bytes"])

    async def damage(self, tier: Tier, key: bytes) -> bool:
        assert isinstance(tier, FsTier)
        flip(Path(tier.path(key)), 4096 + 17)
        return True


@needs_fuse
class TestFsTierThroughFuse(TestFsTier):
    """A file system with neither fallocate nor a rename that spares what is there, as NFS before 4.2."""

    @pytest.fixture(autouse=True)
    def _mounted(self, mount: FragileMount) -> None:
        self.mount = mount

    async def make_tier(self, place: Path) -> Tier:
        return tier_on(self.mount.path)


class TestCompressed(CompressionContract):
    async def make_tier(self, place: Path, compression: str) -> Tier:
        return tier_on(place / "a", compression=compression, item_bytes=2)

    async def damage(self, tier: Tier, key: bytes) -> None:
        assert isinstance(tier, FsTier)
        flip(Path(tier.path(key)), 4096 + 20_000)


@pytest.mark.parametrize(
    ("base_path", "url", "expected"),
    [
        (("/a", "/b"), "", ("/a", "/b")),
        ((), "fs://host:1234/mnt/kv", ("/mnt/kv",)),
        ((), "fs://host:1234/mnt/one,/mnt/two", ("/mnt/one", "/mnt/two")),
        ((), "fs:///mnt/kv", ("/mnt/kv",)),
        (("/a",), "fs://host:1/elsewhere", ("/a",)),
    ],
)
def test_directories_come_from_base_path_or_the_url(
    base_path: tuple[str, ...], url: str, expected: tuple[str, ...]
) -> None:
    assert tier_on(base_path=base_path, url=url).settings.directories == tuple(map(Path, expected))


@pytest.mark.parametrize(("base_path", "problem"), [((), "needs a directory"), (("kv",), "begins with /")])
def test_a_tier_without_a_directory_is_refused(base_path: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"remote_storage_plugin\.fs\.a\.base_path: .*{problem}"):
        tier_on(base_path=base_path)


def test_a_directory_is_used_by_one_tier_and_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fs\.a\.base_path: .*twice"):
        tier_on(tmp_path / "kv", tmp_path / "other" / ".." / "kv")
    layout = Layout("m", chunk_tokens=16, bytes_per_token=4096)
    fs = {
        "chunk_size": 16,
        "remote_storage_plugins": ["fs.a", "fs.b"],
        "remote_storage_plugin.fs.a.base_path": str(tmp_path),
        "remote_storage_plugin.fs.b.base_path": f"{tmp_path}/x/..",
    }
    with pytest.raises(ConfigError, match=rf"fs\.b: {tmp_path} belongs to the tier fs\.a already"):
        make_tiers(Config.load(environ={}, overrides=fs), layout)
    del fs["remote_storage_plugin.fs.b.base_path"]
    fs["remote_storage_plugins"] = ["fs.a"]
    others = {
        "disk": {"local_disk": str(tmp_path), "max_local_disk_size": 0.1},
        "gds": {"gds_path": str(tmp_path), "gds_buffer_size": 16},
        "hf3fs": {"hf3fs_base_path": str(tmp_path)},
    }
    for name, other in others.items():
        with pytest.raises(ConfigError, match=rf": {tmp_path} belongs to the tier ({name}|fs\.a) already"):
            make_tiers(Config.load(environ={}, overrides=fs | other), layout)
    two = {"remote_storage_plugins": ["hf3fs.a", "hf3fs.b"], "hf3fs_base_path": str(tmp_path)}
    for both in (two, others["disk"] | others["hf3fs"], others["disk"] | others["gds"]):
        with pytest.raises(ConfigError, match=rf": {tmp_path} belongs to the tier (disk|hf3fs.a) already"):
            make_tiers(Config.load(environ={}, overrides={"chunk_size": 16} | both), layout)


async def test_a_mount_whose_locks_stay_on_this_host_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mounted = Mount(str(tmp_path), "nfs", "server:/kv", ("rw", "nolock"))
    monkeypatch.setattr("tiercache.tiers.files.tier.mount_of", lambda directory: mounted)
    async with opened(tmp_path):
        assert f"fs.a: {tmp_path} is mounted with nolock: the cap holds among the instances of one host" in caplog.text


async def test_statistics_and_messages_carry_the_name_of_the_instance(tmp_path: Path) -> None:
    tier = tier_on(tmp_path)
    assert tier.name == "fs.a"
    await tier.open()
    assert tier.describe().startswith(f"fs.a ({tmp_path}")
    await tier.close()
    with pytest.raises(TierUnavailable, match=r"fs\.a: closed"):
        await is_hit(tier, 1)


async def test_a_directory_that_cannot_be_made_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tier = tier_on(tmp_path / "file" / "kv")
    with pytest.raises(ConfigError, match=r"remote_storage_plugin\.fs\.a\.base_path: .*Not a directory"):
        await tier.open()
    await tier.close()


@needs_fuse
async def test_a_bit_that_flips_on_the_wire_costs_the_directory_nothing(mount: FragileMount) -> None:
    async with opened(mount.path, use_odirect=False) as writer:
        await fill(writer, range(1, 2))
    async with opened(mount.path) as tier:
        os.sync()
        with open(tier.path(chunk(1)[0]), "rb") as file:  # the next read asks the mount
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mount.flip_next()
        assert await is_hit(tier, 1)
        assert not mount.behind.with_name("behind.flip").exists(), "it was flipped"
        assert tier.statistics().corrupt == 0


@needs_fuse
async def test_a_mount_that_hangs_does_not_hold_up_the_start_and_comes_in_later(
    mount: FragileMount, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(mount.path) as tier:
        await fill(tier, range(1, 3))
    mount.hang()
    tier = tier_on(mount.path, timeout_s=1.0)
    with caplog.at_level(logging.WARNING, "tiercache.disk"):
        await tier.open()
    assert "fs.a" in caplog.text and "cannot be reached" in caplog.text
    assert not tier.contains(chunk(1)[0])
    with pytest.raises(TierUnavailable, match=r"fs\.a .*cannot be reached"):
        await is_hit(tier, 1)
    with pytest.raises(TierUnavailable):
        await tier.probe([chunk(1)[0]])
    mount.go_on()
    assert await eventually(lambda: is_hit(tier, 1))
    await tier.close()


@needs_fuse
@pytest.mark.parametrize("how", ["dead", "full"])
async def test_a_mount_that_cannot_be_used_at_the_start_is_tried_again(mount: FragileMount, how: str) -> None:
    """Nothing of ours lies there yet, so only others can make room."""
    away, back = (mount.die, mount.revive) if how == "dead" else (mount.fill, mount.make_room)
    await asyncio.to_thread(away)
    async with open_tier(tier_on(mount.path, timeout_s=1.0)) as tier:
        with pytest.raises(TierUnavailable, match="cannot be reached" if how == "dead" else None):
            await fill(tier, range(1, 2))
        await asyncio.to_thread(back)
        await eventually(lambda: fill(tier, range(1, 2)))


@needs_fuse
async def test_a_mount_that_hangs_costs_the_cache_its_patience_and_then_nothing(
    mount: FragileMount, tmp_path: Path
) -> None:
    layout = Layout("m", chunk_tokens=16, bytes_per_token=4096)
    (tmp_path / "lmcache.yaml").write_text(
        f"chunk_size: 16\nmax_local_cpu_size: 0.004\nremote_url: fs://host:1{mount.path}\n"
        "extra_config: {fs_connector_use_odirect: false, request_timeout: 0.3}\n"
    )
    config = Config.load(tmp_path / "lmcache.yaml", environ={})
    loop = asyncio.get_running_loop()
    async with TierCache.open(config, layout) as cache:
        assert [tier.name for tier in cache.tiers] == ["fs"]
        key, payload = chunk(1, layout.chunk_bytes)
        assert await cache.put(key, payload)
        assert (await cache.flush()).complete
        await cache.forget([key])
        mount.hang()
        waited_s = []
        for number in range(2, 8):
            began_s = loop.time()
            async with cache.get(chunk(number)[0]) as lease:
                assert lease is None
            waited_s.append(loop.time() - began_s)
        assert max(waited_s) < 1.0
        assert waited_s[-1] < 0.1, "its breaker is open"
        mount.go_on()


@needs_fuse
async def test_close_does_not_wait_for_a_mount_that_hangs(mount: FragileMount) -> None:
    mount.hang()
    tier = tier_on(mount.path, timeout_s=1.0)
    await tier.open()
    async with asyncio.timeout(60):
        await tier.close()
