"""Configurations with the keys of LMCache's pages and examples: each loads and names what has no effect, or is refused."""

from pathlib import Path

import pytest
import yaml

from tiercache.config import Config, explain
from tiercache.config.sources import file_settings
from tiercache.errors import ConfigError

FILES = Path(__file__).parent / "fixtures" / "lmcache"
ON, MISSING = "on", "not available in this version"

TIERS: dict[str, dict[str, str]] = {
    **{name: {} for name in ("blending", "controller", "dax", "external", "peers", "phoenix", "sglang")},
    **{name: {} for name in ("nixl_object", "nixl_posix")},
    **{name: {name: MISSING} for name in ("azure", "bigtable", "blackhole", "eic", "hfbucket", "mock")},
    **{name: {name: ON} for name in ("fs", "infinistore", "redis", "s3", "valkey")},
    **{name: {"s3": ON} for name in ("s3_compatible", "s3_express", "s3_keys")},
    "bigtable_behind_redis": {"redis": ON, "bigtable": MISSING},
    "decoder": {"lm": MISSING},
    "external_url": {"external": MISSING},
    "fs_two": {"fs.near": ON, "fs.far": ON},
    "fs_url": {"fs": ON},
    "gcs": {"gcs.us": MISSING, "gcs.eu": MISSING},
    "hf3fs": {"hf3fs.primary": ON},
    "lmcache_server": {"lm": MISSING},
    "local_disk_alone": {"disk": ON},
    "mooncake": {"mooncakestore": ON},
    "redis_sentinel": {"redis-sentinel": ON},
    "resp": {"redis": ON},
    "sagemaker_hyperpod": {"sagemaker-hyperpod": MISSING},
    "valkey_cluster": {"valkey": ON},
}
REFUSED = {
    "maru": "max_local_cpu_size: expected a number of GB > 0, found 0",
    "prefiller": "remote_serde: expected naive (others lose bits of the KV; compression of a remote tier loses none)",
}


def path_of(name: str) -> Path:
    return FILES / f"{name}.yaml"


@pytest.mark.parametrize("name", TIERS)
def test_it_makes_the_tiers_that_tiercache_has_and_each_other_key_is_named_in_a_warning(name: str) -> None:
    config = Config.load(path_of(name), environ={})
    assert {tier.name: tier.state for tier in explain(config).tiers if tier.name != "cpu"} == TIERS[name]
    warned = " ".join(config.warnings)
    given = {setting.name for setting in file_settings(path_of(name))}
    silent = {key for key in given if key not in warned}
    effective = {origin.alias or key for key, origin in config.origins.items()}
    assert silent <= effective
    if MISSING in TIERS[name].values():
        assert MISSING in warned


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_meant_is_one_problem_with_its_reason(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(path_of(name), environ={})
    message = str(caught.value)
    assert message.startswith(REFUSED[name]) and "\n" not in message


def test_no_file_is_left_out_and_each_names_its_source() -> None:
    assert {path.stem for path in FILES.glob("*.yaml")} == TIERS.keys() | REFUSED.keys()
    assert all(path.read_text().startswith("# The keys of LMCache's ") for path in FILES.glob("*.yaml"))
    assert all(isinstance(yaml.safe_load(path.read_text()), dict) for path in FILES.glob("*.yaml"))


def test_the_prefix_of_objects_is_lmcaches(load_text) -> None:
    config = load_text("remote_url: s3://bucket\ns3_file_prefix: here\n")
    assert config.warnings == ()
    assert config.remote_settings == {"s3_file_prefix": "here"}


def test_a_bucket_of_google_cloud_storage_is_told_what_to_use_instead() -> None:
    (warning,) = Config.load(path_of("gcs"), environ={}).warnings
    assert "https://storage.googleapis.com" in warning


def test_further_settings_for_mooncakes_setup_are_accepted_and_named(load_text) -> None:
    """LMCache hands every key that begins with mooncake_ to Mooncake, or reads it itself."""
    keys = ["mooncake_transfer_timeout", "mooncake_storage_root_dir", "mooncake_a_setting_of_a_later_version"]
    config = load_text("remote_url: mooncakestore://host:1/\n" + "".join(f"{key}: 1\n" for key in keys))
    (warning,) = config.warnings
    assert all(key in warning for key in keys)
