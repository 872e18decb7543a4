"""Remote tiers: what operators of LMCache write, settings of instances, roles, and what is said about mistakes."""

import json

import pytest

from tiercache.config import Config, explain
from tiercache.config.remotes import Remote, remotes_of
from tiercache.errors import ConfigError


def only(config: Config) -> Remote:
    (remote,) = remotes_of(config)
    return remote


@pytest.mark.parametrize(
    ("url", "type_name"),
    [
        ("redis://localhost:6379", "redis"),
        ("rediss://u:p@host:6380/2", "redis"),
        ("unix:///run/redis.sock?db=1", "redis"),
        ("redis-sentinel://a:26379,b:26379", "redis"),
        ("redis-cluster://a:1,b:2", "redis"),
        ("valkey://host", "redis"),
        ("resp://host:6379", "redis"),
        ("mooncakestore://127.0.0.1:50051/", "mooncake"),
        ("infinistore://127.0.0.1:12345/?device=mlx5_1", "infinistore"),
        ("s3://bucket.s3express-usw2-az1.us-west-2.amazonaws.com", "s3"),
        ("fs://localhost:0/mnt/kv", "fs"),
    ],
)
def test_each_url_of_lmcache_makes_its_tier(load_text, url: str, type_name: str) -> None:
    config = load_text(f"remote_url: '{url}'")
    remote = only(config)
    assert (remote.type, remote.place, remote.key, remote.available) == (type_name, url, "remote_url", True)
    assert config.warnings == ()


@pytest.mark.parametrize("scheme", ["lm", "azure", "eic", "sagemaker-hyperpod"])
def test_what_is_missing_is_accepted_and_said_to_be_missing(load_text, scheme: str) -> None:
    config = load_text(f"remote_url: {scheme}://host:1")
    assert not only(config).available
    assert explain(config).tiers[-1].state == "not available in this version"
    (warning,) = config.warnings
    assert f"{scheme} (remote tiers not available in this version)" in warning


def test_plugins_come_first_and_in_their_order(load_text) -> None:
    config = load_text("""
        remote_url: valkey://old
        remote_storage_plugins: [s3.cold, redis.hot, fs.a]
        remote_storage_plugin.redis.hot.url: redis://hot
        remote_storage_plugin.s3.cold.url: s3://bucket
        remote_storage_plugin.fs.a.base_path: /mnt/a, /mnt/b
    """)
    assert [(remote.name, remote.place) for remote in remotes_of(config)] == [
        ("s3.cold", "s3://bucket"), ("redis.hot", "redis://hot"), ("fs.a", "/mnt/a, /mnt/b"), ("valkey", "valkey://old"),
    ]  # fmt: skip


def test_instance_without_a_url_uses_the_old_keys_as_lmcache_does(load_text) -> None:
    remote = only(load_text("remote_url: redis://a\nremote_storage_plugins: [redis]"))
    assert (remote.name, remote.place) == ("redis", "redis://a")
    remote = only(load_text("remote_storage_plugins: [redis]\nextra_config: {redis_url: 'redis://b'}"))
    assert remote.place == "redis://b"
    remote = only(load_text("remote_storage_plugins: [redis]\nremote_storage_plugin.redis.redis_url: redis://c"))
    assert remote.place == "redis://c"


def test_settings_have_types_and_an_instance_wins_over_all_of_its_type(load_text) -> None:
    config = load_text("""
        remote_storage_plugins: [redis.a, redis.b]
        extra_config:
          username: everybody
          valkey_ttl_sec: 60
          remote_storage_plugin.redis.b.username: me
          remote_storage_plugin.redis.b.timeout_s: "0.25"
          remote_storage_plugin.redis.b.role: read
          remote_storage_plugin.redis.b.tls_verify: "no"
    """)
    a, b = remotes_of(config)
    assert (a.options["username"], a.options["ttl_s"], a.options["timeout_s"], a.reads, a.writes) == (
        "everybody", 60.0, 5.0, True, True,
    )  # fmt: skip
    assert (b.options["username"], b.options["ttl_s"], b.options["timeout_s"]) == ("me", 60.0, 0.25)
    assert (b.options["tls_verify"], b.reads, b.writes) == (False, True, False)
    assert explain(config).tiers[-1].note == "role is read: nothing is written to it"


def test_settings_from_the_environment(load_text) -> None:
    extra = json.dumps({"remote_storage_plugin.s3.cold.region": "eu-central-1", "aws_access_key_id": "hush"})
    config = load_text(
        "remote_storage_plugins: [s3.cold]\nremote_storage_plugin.s3.cold.url: s3://b",
        {"TIERCACHE_EXTRA_CONFIG": extra},
    )
    assert only(config).options["region"] == "eu-central-1"
    assert only(config).options["access_key_id"] == "hush"
    assert "hush" not in repr(config) + repr(remotes_of(config)) + json.dumps(explain(config).to_dict())


def test_credentials_of_resp_in_lmcaches_variables(load_text) -> None:
    environ = {"LMCACHE_RESP_USERNAME": "kv", "LMCACHE_RESP_PASSWORD": "hush", "LMCACHE_RESP_NUM_THREADS": "8"}
    config = load_text("remote_url: resp://a:1", environ)
    assert (only(config).options["username"], only(config).options["password"]) == ("kv", "hush")
    assert "hush" not in repr(config) + repr(remotes_of(config)) + json.dumps(explain(config).to_dict())


def test_lmcaches_settings_of_tiers_that_are_not_there_are_named(load_text) -> None:
    (warning,) = load_text("remote_url: redis://a\nextra_config: {s3_region: x, redis_url: 'redis://b'}").warnings
    assert warning == "accepted but not honoured: s3_region (of remote tiers that are not configured)"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "remote_storage_plugins: [redis]\nremote_storage_plugin.redis.usernam: a",
            "remote_storage_plugin.redis.usernam: there is no such setting of redis; known are class_name, ",
        ),
        (
            "remote_storage_plugins: [redis.a]\nremote_storage_plugin.redis.a.timeout_s: 0",
            "remote_storage_plugin.redis.a.timeout_s: expected a number of seconds > 0, found '0'",
        ),
        (
            "remote_storage_plugins: [redis]\nremote_storage_plugin.redis.role: owner",
            "remote_storage_plugin.redis.role: expected one of both, read, write, found 'owner'",
        ),
        ("remote_storage_plugins: [redis, redis]", "every instance needs its own name"),
        (
            "remote_storage_plugins: [disk]\nextra_config: {remote_storage_plugin.disk.module_path: a, "
            "remote_storage_plugin.disk.class_name: b}",
            "remote_storage_plugins: 'disk' is the name of a tier of ours; give the instance another, such as disk.a",
        ),
        ("remote_storage_plugins: [redsi.a]", "there is no type 'redsi' (redsi.a); known are fs, "),
        (
            "remote_storage_plugins: [mine]\nremote_storage_plugin.mine.module_path: a.b",
            "remote_storage_plugin.mine: module_path and class_name belong together, found only one",
        ),
        ("remote_url: redis://a\nextra_config: {valkey_mode: ring}", "valkey_mode: expected standalone or cluster"),
        ("remote_url: s3://a\nextra_config: {s3_region: {eu: 1}}", "s3_region: expected text, found dict"),
    ],
)
def test_mistakes_are_named_with_key_value_and_what_is_right(load_text, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(text)
    assert problem in str(caught.value)


def test_third_party_class_takes_any_setting(load_text) -> None:
    config = load_text("""
        remote_storage_plugins: [mine.a]
        remote_storage_plugin.mine.a.module_path: somebody.tiers
        remote_storage_plugin.mine.a.class_name: Theirs
        remote_storage_plugin.mine.a.shelves: 3
        remote_storage_plugin.mine.a.timeout_s: 2
    """)
    remote = only(config)
    assert remote.available
    assert (remote.type, remote.options["shelves"], remote.options["timeout_s"]) == ("mine", "3", 2.0)


def test_setting_that_is_a_list_or_nothing(load_text) -> None:
    config = load_text("""
        remote_storage_plugins: [fs.a, redis]
        remote_storage_plugin.fs.a.base_path: [/mnt/a, /mnt/b]
        remote_storage_plugin.redis.password:
    """)
    fs, redis = remotes_of(config)
    assert fs.options["base_path"] == ("/mnt/a", "/mnt/b")
    assert redis.options["password"] is None


def test_settings_named_by_the_scheme_are_about_the_tier_of_the_url(load_text) -> None:
    config = load_text("remote_url: rediss://a\nremote_storage_plugin.rediss.tls_ca_file: /etc/ca.pem")
    assert only(config).options["tls_ca_file"] == "/etc/ca.pem"


def test_compression_of_a_remote_tier_that_is_not_there_gets_a_warning(load_text) -> None:
    """The URL is lent to `redis.a`, so there is no tier of the name `redis`."""
    text = "remote_url: redis://a\nremote_storage_plugins: [redis.a]\n"
    text += "extra_config: {remote_storage_plugin.NAME.compression: zstd}"
    (warning,) = load_text(text.replace("NAME", "redis")).warnings
    expected = "remote_storage_plugin.redis.compression (of remote tiers that are not configured)"
    assert warning == f"accepted but not honoured: {expected}"
    assert load_text(text.replace("NAME", "redis.a")).warnings == ()


@pytest.mark.parametrize("spelled", ["0123456", "1.10", "1_0", "yes", "00"])
def test_a_password_is_what_was_written_though_yaml_reads_a_number(load_text, spelled: str) -> None:
    for key in ("valkey_password", "remote_storage_plugin.redis.password"):
        for text in (f"{key}: {spelled}", f"extra_config: {{{key}: {spelled}}}"):
            assert only(load_text(f"remote_url: redis://h\n{text}")).options["password"] == spelled


def test_numbers_in_yamls_other_notations_stay_numbers(load_text) -> None:
    store = only(load_text("remote_url: mooncakestore://h:1\nmooncake_global_segment_size: 0x40000000\nprotocol: tcp"))
    assert store.options["global_segment_size"] == 1 << 30
