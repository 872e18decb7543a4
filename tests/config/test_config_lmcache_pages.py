"""The configurations of LMCache's own pages load unchanged, from a file and from the environment."""

from pathlib import Path

import pytest

from tiercache.config import Config, explain
from tiercache.config.foreign import FOREIGN
from tiercache.config.schema import GB

FIXTURES = Path(__file__).parent / "fixtures"
PAGES = ("cpu_ram", "local_disk", "gds", "weka", "hf3fs")


def environment_of(page: str) -> dict[str, str]:
    """Lines as `docker --env-file` reads them: quotes stay in the value."""
    lines = (FIXTURES / f"{page}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def from_file(page: str) -> Config:
    return Config.load(FIXTURES / f"{page}.yaml", environ={})


@pytest.mark.parametrize("page", PAGES)
def test_file_and_environment_of_a_page_mean_the_same(page: str) -> None:
    from_environment = Config.load(environ=environment_of(page))
    assert from_file(page) == from_environment
    assert from_file(page).warnings == from_environment.warnings == ()
    assert explain(from_file(page)).tiers == explain(from_environment).tiers


def test_cpu_ram_makes_the_hot_cache_alone() -> None:
    config = from_file("cpu_ram")
    assert (config.chunk_size, config.local_cpu, config.arena_bytes, config.disk_bytes) == (256, True, 5 * GB, 0)
    assert [(tier.name, tier.state) for tier in explain(config).tiers] == [("cpu", "on")]


def test_local_disk_makes_a_disk_tier_with_its_cap() -> None:
    config = from_file("local_disk")
    assert config.local_disk == ("/local/disk_test/local_disk/",)
    assert config.use_odirect is True
    assert [(tier.name, tier.cap_bytes) for tier in explain(config).tiers] == [("cpu", 5 * GB), ("disk", 5 * GB)]


@pytest.mark.parametrize(("page", "path"), [("gds", "/mnt/gds/cache"), ("weka", "/mnt/weka/cache")])
def test_gds_and_weka_are_checked_and_planned(page: str, path: str) -> None:
    config = from_file(page)
    assert getattr(config, f"{page}_path") == (path,)
    assert (config.local_cpu, config.gds_buffer_size, config.use_direct_io) == (False, 8192, True)
    planned = explain(config).tiers[-1]
    assert (planned.name, planned.place, planned.state) == (page, path, "on")


def test_3fs_as_a_plugin_is_checked_and_planned() -> None:
    planned = explain(from_file("hf3fs")).tiers[-1]
    assert (planned.name, planned.kind, planned.place) == ("hf3fs.primary", "hf3fs", "/mnt/3fs/a, /mnt/3fs/b")


def test_3fs_as_a_url_is_the_same_tier_and_said_to_be_old() -> None:
    config = from_file("hf3fs_url")
    planned = explain(config).tiers[-1]
    assert (planned.kind, planned.place, planned.state) == ("hf3fs", "/mnt/3fs/a, /mnt/3fs/b", "on")
    (warning,) = config.warnings
    assert warning.startswith("remote_url: hf3fs:// is the old form; use remote_storage_plugins")


def test_lmcache_keys_that_are_not_ours_are_accepted_and_named_in_one_warning(load_text) -> None:
    config = load_text("".join(f"{name}: 1\n" for name in sorted(FOREIGN)))
    (warning,) = config.warnings
    assert all(name in warning for name in FOREIGN)


def test_each_warning_is_logged_once(load_text, caplog: pytest.LogCaptureFixture) -> None:
    config = load_text("enable_p2p: true\np2p_host: a\npin_timeout_sec: 5\n")
    assert [record.getMessage() for record in caplog.records] == list(config.warnings)
    assert len(config.warnings) == 1


@pytest.mark.parametrize(
    ("value", "path"),
    [('"/a"', "/a"), ("'/a'", "/a"), (r'"/it\"s"', '/it"s'), (r"'/it\'s'", "/it's"), ('"/a"s"', '/a"s'), ('"', '"')],
)
def test_quotes_of_an_env_file_are_read_as_lmcache_reads_them(value: str, path: str) -> None:
    assert Config.load(environ={"LMCACHE_LOCAL_DISK": value}).local_disk == (path,)


def test_escaped_json_of_an_env_file_is_read_as_lmcache_reads_it() -> None:
    assert Config.load(environ={"LMCACHE_EXTRA_CONFIG": r'"{\"use_odirect\": true}"'}).use_odirect is True


def test_variables_that_mean_nothing_any_more_or_elsewhere_or_are_set_by_kubernetes_are_left_alone() -> None:
    environ = {
        "LMCACHE_USE_EXPERIMENTAL": "True",
        "LMCACHE_LOG_LEVEL": "DEBUG",
        "LMCACHE_CONTROLLER_CONFIG_FILE": "/x",
        "LMCACHE_ROCM_ENABLE_BATCH_MEMCPY": "1",
        "LMCACHE_SERVER_SERVICE_HOST": "10.0.0.1",
        "LMCACHE_SERVER_PORT": "tcp://10.0.0.1:80",
        "LMCACHE_SERVER_PORT_80_TCP_ADDR": "10.0.0.1",
        "TIERCACHE_SERVICE_PORT_HTTP": "80",
    }
    config = Config.load(environ=environ)
    assert config == Config() and config.warnings == ()
