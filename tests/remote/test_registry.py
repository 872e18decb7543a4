"""Tiers of third parties, and roles: what the configuration names is what the cache uses."""

from pathlib import Path

import numpy as np
import pytest

from tiercache import Config, Layout, TierCache
from tiercache.assembly import make_tiers
from tiercache.config import remotes
from tiercache.config.remotes import remotes_of
from tiercache.errors import ConfigError
from tiercache.testing import MemoryTier
from tiercache.tiers.base import Traits
from tiercache.tiers.remote.base import RemoteSettings
from tiercache.tiers.remote.registry import make_remote

LAYOUT = Layout("m", chunk_tokens=16, bytes_per_token=64)
PAYLOAD = np.arange(LAYOUT.chunk_bytes, dtype=np.uint8)
TOKENS = list(range(16))
SHELVES: dict[str, dict[bytes, bytes]] = {}


class ShelfTier(MemoryTier):
    """A third party's tier: instances with the same `shelf` see the same chunks."""

    def __init__(self, settings: RemoteSettings) -> None:
        super().__init__(settings.name, Traits(shared=True))
        self.settings = settings
        self.chunks = SHELVES.setdefault(settings.options.get("shelf", ""), {})


def not_a_tier(settings: RemoteSettings) -> str:
    return "a connector"


@pytest.fixture(autouse=True)
def _empty_shelves() -> None:
    SHELVES.clear()


def settings_of(type_name: str = "shelf", **options: str) -> RemoteSettings:
    return RemoteSettings(type_name, type_name, LAYOUT.fingerprint, LAYOUT.chunk_bytes, options=options)


def config_of(**roles: str) -> Config:
    settings = {}
    for name, role in roles.items():
        own = {"module_path": __name__, "class_name": "ShelfTier", "shelf": name, "role": role}
        settings |= {f"{name}.{option}": value for option, value in own.items()}
    return Config(
        max_local_cpu_size=0.001, remote_storage_plugins=tuple(roles), remote_storage_plugin_settings=settings
    )


async def test_roles_decide_where_chunks_go_and_where_they_come_from() -> None:
    async with TierCache.open(config_of(one="both", two="write", three="read"), LAYOUT) as cache:
        (key,) = cache.keys(TOKENS)
        await cache.put(key, PAYLOAD)
        await cache.flush()
    assert {name: list(shelf) for name, shelf in SHELVES.items()} == {"one": [key], "two": [key], "three": []}

    SHELVES["three"] = SHELVES.pop("one")
    async with TierCache.open(config_of(one="both", two="write", three="read"), LAYOUT) as cache:
        hit = await cache.lookup(TOKENS)
        assert hit.by_tier == {"cpu": 0, "one": 0, "three": 1}
        async with cache.get(key) as lease:
            assert lease is not None and np.array_equal(lease.view, PAYLOAD)
        assert {name: tier.reads for name, tier in cache.statistics().tiers.items() if name != "cpu"} == {
            "one": 0, "two": 0, "three": 1,
        }  # fmt: skip


@pytest.mark.parametrize("type_name", ["redis", "fs", "hf3fs"])
def test_class_of_ones_own_wins_over_the_type_that_the_instance_is_named_for(type_name: str) -> None:
    name = f"{type_name}.mine"
    own = {"module_path": __name__, "class_name": "ShelfTier", "base_path": "/3fs/a"}
    config = Config(
        remote_storage_plugins=(name,),
        remote_storage_plugin_settings={f"{name}.{option}": value for option, value in own.items()},
    )
    (tier,) = make_tiers(config, LAYOUT)
    assert isinstance(tier, ShelfTier) and tier.name == name


def test_entry_points_of_installed_packages_are_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "somebody-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tiercache.tiers]\nshelf = {__name__}:ShelfTier\n")
    monkeypatch.syspath_prepend(tmp_path)
    remotes.third_party_types.cache_clear()
    try:
        config = Config.load(environ={}, overrides={"remote_storage_plugins": "shelf.a"})
        (remote,) = remotes_of(config)
        assert remote.available
        assert isinstance(make_remote(settings_of()), ShelfTier)
    finally:
        monkeypatch.undo()
        remotes.third_party_types.cache_clear()


@pytest.mark.parametrize(
    ("module_path", "class_name", "problem"),
    [
        ("no.such.module", "X", "class_name: no.such.module:X cannot be imported"),
        (__name__, "NoSuchClass", "cannot be imported"),
        (__name__, "LAYOUT", "is nothing that makes a tier"),
        (__name__, "not_a_tier", "expected a tiercache.tiers.base.Tier"),
    ],
)
def test_what_cannot_be_made_is_a_sentence(module_path: str, class_name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_remote(settings_of("mine"), module_path=module_path, class_name=class_name)


def test_unknown_type_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"there is no remote tier of type 'tape'; known are fs, infinistore"):
        make_remote(settings_of("tape"))


def test_settings_do_not_show_secrets() -> None:
    settings = RemoteSettings("redis", "redis", bytes(16), 1, url="redis://:hush@a", options={"password": "hush"})
    assert "hush" not in repr(settings)
    assert "hush" not in str(settings.error("password", "is wrong"))
