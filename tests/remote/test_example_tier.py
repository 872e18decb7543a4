"""The tiers that show third parties how it is done pass the contract, and serve a cache."""

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from tests.examples import load_example
from tests.tiers.test_disk import flip
from tiercache import Config, Layout, TierCache
from tiercache.core.header import HEADER_BYTES
from tiercache.core.keys import ChunkKey
from tiercache.errors import ConfigError, TierUnavailable
from tiercache.testing import TierContract
from tiercache.tiers.base import Tier
from tiercache.tiers.remote.base import RemoteSettings
from tiercache.tiers.remote.registry import make_remote


@pytest.fixture(autouse=True)
def _importable() -> None:
    for name in ("sqlite_tier", "beegfs_tier"):
        load_example(name)


class TestSqliteTier(TierContract):
    async def make_tier(self, place: Path) -> Tier:
        options = {"file": str(place / "kv.sqlite")}
        settings = RemoteSettings("sqlite", "sqlite", bytes(16), self.chunk_bytes, options=options)
        return make_remote(settings, module_path="sqlite_tier", class_name="SqliteTier")

    async def damage(self, tier: Tier, key: ChunkKey) -> bool:
        with sqlite3.connect(tier.settings.options["file"]) as database:  # type: ignore[attr-defined]
            (value,) = database.execute("SELECT value FROM chunks WHERE key = ?", (key,)).fetchone()
            damaged = bytearray(value)
            damaged[500] ^= 1
            database.execute("UPDATE chunks SET value = ? WHERE key = ?", (bytes(damaged), key))
        database.close()
        return True


class TestAnotherFileSystem(TierContract):
    async def make_tier(self, place: Path) -> Tier:
        options = {"path": str(place / "kv"), "max_size": "0.1"}
        settings = RemoteSettings("beegfs", "beegfs", bytes(16), self.chunk_bytes, options=options)
        return make_remote(settings, module_path="beegfs_tier", class_name="make_tier")

    async def damage(self, tier: Tier, key: ChunkKey) -> bool:
        flip(Path(tier.path(key)), HEADER_BYTES + 17)  # type: ignore[attr-defined]
        return True


async def test_a_cache_finds_after_a_restart_what_it_kept_there(tmp_path: Path) -> None:
    own = {"module_path": "sqlite_tier", "class_name": "SqliteTier", "file": str(tmp_path / "kv.sqlite")}
    config = Config(
        max_local_cpu_size=0.001,
        remote_storage_plugins=("sqlite.a",),
        remote_storage_plugin_settings={f"sqlite.a.{option}": value for option, value in own.items()},
    )
    layout = Layout("m", chunk_tokens=16, bytes_per_token=64)
    tokens, payload = list(range(32)), np.arange(layout.chunk_bytes, dtype=np.uint8)
    async with TierCache.open(config, layout) as cache:
        await cache.store(tokens, [payload, payload])
    async with TierCache.open(config, layout) as cache:
        assert (await cache.lookup(tokens)).by_tier == {"cpu": 0, "sqlite.a": 2}
        async with cache.get(cache.keys(tokens)[1]) as lease:
            assert lease is not None and np.array_equal(lease.view, payload)


def test_missing_setting_is_a_sentence() -> None:
    settings = RemoteSettings("sqlite.a", "sqlite", bytes(16), 4096)
    with pytest.raises(ConfigError, match=r"remote_storage_plugin.sqlite.a.file: expected the path of a file"):
        make_remote(settings, module_path="sqlite_tier", class_name="SqliteTier")


async def test_a_file_that_is_no_database_is_a_tier_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "kv.sqlite").write_bytes(bytes(range(256)) * 16)
    with pytest.raises(TierUnavailable, match="file is not a database"):
        await (await TestSqliteTier().make_tier(tmp_path)).open()
