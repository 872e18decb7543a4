"""What is secret in a URL is in nothing that people or programs get to see: errors, reprs, explanations, log lines."""

import json
from collections.abc import Callable

import pytest

from tests.config.test_config_explain import rendered
from tiercache import Layout
from tiercache.assembly import make_tiers
from tiercache.config import Config, explain
from tiercache.config.remotes import remotes_of
from tiercache.config.schema import KEYS
from tiercache.errors import ConfigError, TierCacheError

LAYOUT = Layout("m", chunk_tokens=16, bytes_per_token=4096)
TYPES = ("redis", "rediss", "redis-sentinel", "redis-cluster", "valkey", "mooncakestore", "infinistore", "s3", "fs", "hf3fs")
FORMS = (
    "{type}://:Hush2?HushTail@host:6379",
    "{type}://user:Hush#HushTail@host:6379",
    "{type}://user:Hush/HushTail@host:6379",
    "{type}://user:Hush HushTail@host:6379/0",
    "{type}://host:6379/0?auth=Hush",
    "{type}://host:6379?X-Amz-Credential=Hush%2F2026&X-Amz-Signature=Hush",
    "{type}://host:6379?Hush",
    "{type}://host:6379#Hush",
    "{type}://Hush:Hush@host:6379,Hush:Hush@other:6379",
    "{type}:/user:Hush@host",
    "user:Hush@{type}://host",
)


def everything_shown(load: Callable[[], Config]) -> str:
    """What is said while it is loaded, explained, and its tiers are made."""
    said = []
    try:
        config = load()
        said += [repr(config), repr(remotes_of(config)), json.dumps(explain(config).to_dict()), rendered(config)]
        for tier in make_tiers(config, LAYOUT):
            said += [tier.describe(), repr(tier), str(vars(tier).get("settings"))]
    except (TierCacheError, ValueError) as error:
        said += [str(error), repr(error)]
    return "\n".join(said)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", TYPES)
def test_no_part_of_a_secret_in_a_url_is_shown(load_text, caplog: pytest.LogCaptureFixture, kind: str, form: str) -> None:
    url = json.dumps(form.format(type=kind))
    of_an_instance = f"remote_storage_plugins: [{kind}.a]\nremote_storage_plugin.{kind}.a.url: {url}"
    for text in (f"remote_url: {url}", of_an_instance):
        said = everything_shown(lambda text=text: load_text(text))  # type: ignore[misc]
        assert said and "Hush" not in said + caplog.text


@pytest.mark.parametrize(
    "setting",
    [
        "s3.a.endpoint: https://host/?X-Amz-Credential=Hush",
        "s3.a.endpoint: http://host/?auth=Hush",
        "s3.a.endpoint: https://Hush:Hush@host",
        "s3.a.endpoint: http://host/#Hush@x",
        "mooncake.a.master_server_address: user:Hush@host:1",
        "mooncake.a.master_server_address: user:Hush@host",
        "mooncake.a.master_server_address: etcd://user:Hush@host:1",
        "mooncake.a.metadata_server: http://host:1/metadata?auth=Hush",
        "redis.a.authorization: Hush",
        "redis.sentinel_password: Hush",
        "redis.passwort: Hush",
    ],
)
def test_neither_is_what_other_settings_hold(load_text, setting: str) -> None:
    instance = setting.partition(":")[0].rpartition(".")[0]
    url = {"s3.a": "s3://bucket", "mooncake.a": "mooncakestore://host:1", "redis.a": "redis://host"}.get(instance)
    text = f"remote_storage_plugins: [{instance}]\nremote_storage_plugin.{setting}\n"
    text += f"remote_storage_plugin.{instance}.url: {url}" if url else ""
    said = everything_shown(lambda: load_text(text))
    assert said and "Hush" not in said


@pytest.mark.parametrize(
    "text",
    [
        "remote_storage_plugins: redis://bob:Hush@cache:6379",
        "remote_storage_plugins: [redis, 'redis:Hush@cache']",
        "remote_url: {'redis://bob:Hush@cache': 1}",
        "local_disk: {'redis://bob:Hush@cache': 1}",
        "remote_storage_plugins: [redis]\nextra_config: {redis_url: 'redis://Hush Hush@cache'}",
    ],
)
def test_neither_is_what_stands_in_another_place(load_text, text: str) -> None:
    said = everything_shown(lambda: load_text(text))
    assert "cache" in said and "Hush" not in said


@pytest.mark.parametrize(
    "text",
    [
        "remote_url: redish://user:Hush@host",
        "remote_url: [redis://user:Hush@host]",
        "tenant_salt: [Hush]",
        "extra_config: [Hush]",
        "tenant_salt: Hush\n extra_config: Hush",
        "tenant_salt: &a Hush\ntenant_salt: Hush2",
        "valkey_passwort: Hush",
        "valkey_password: *Hush",
        "valkey_password: !Hush 1",
        "remote_storage_plugin.redis.password: [Hush]",
        "remote_storage_plugins: [redis]\nremote_storage_plugin.redis.password: {a: Hush}",
    ],
)
def test_neither_is_what_is_refused(load_text, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(text)
    assert "Hush" not in str(caught.value)


@pytest.mark.parametrize("key", [*KEYS, "remote_storage_plugin.hf3fs.a.base_path", "remote_storage_plugin.fs.a.base_path"])
def test_neither_is_a_url_under_the_wrong_key(load_text, key: str) -> None:
    plugins = "remote_storage_plugins: [hf3fs.a, fs.a]\n" if "." in key else ""
    said = everything_shown(lambda: load_text(f"{plugins}{key}: redis://user:Hush@host:6379/0"))
    assert said and "Hush" not in said


def test_what_is_secret_by_its_name_is_shown_nowhere_and_its_place_is(load_text, caplog: pytest.LogCaptureFixture) -> None:
    text = """
        tenant_salt: Hush-1
        remote_url: redis://user:Hush-2@host:6379/2?db=3&password=Hush-3
        remote_storage_plugins: [redis.a]
        remote_storage_plugin.redis.a.redis_url: redis://:Hush/@-4@host
        remote_storage_plugin.redis.a.password: Hush-5
        extra_config: {valkey_password: Hush-6, aws_secret_access_key: Hush-7}
    """
    assert load_text(text).tenant_salt == "Hush-1"
    said = everything_shown(lambda: load_text(text)) + caplog.text
    assert "redis://***@host:6379/2?***" in said and "Hush" not in said
    assert explain(load_text(text)).to_dict()["values"]["remote_url"]["value"] == "redis://***@host:6379/2?***"


def test_a_password_may_hold_a_question_mark() -> None:
    from tiercache.tiers.remote.base import RemoteSettings
    from tiercache.tiers.remote.redis.address import read_address

    url = "redis://:Hunter2?Tail@host:1/5"
    address = read_address(RemoteSettings("redis", "redis", b"\0" * 16, 65536, url=url))
    assert (address.password, str(address), address.database) == ("Hunter2?Tail", "host:1", 5)
