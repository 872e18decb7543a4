"""What operators write, and where requests go then."""

from typing import Any

import pytest

from tests.tiers.test_contract import LAYOUT
from tiercache.errors import ConfigError
from tiercache.tiers.remote.base import RemoteSettings
from tiercache.tiers.remote.s3_settings import S3Address, read_address


def place(url: str, **options: Any) -> S3Address:
    return read_address(RemoteSettings("s3", "s3", LAYOUT.fingerprint, 1 << 20, url=url, options=options))


@pytest.mark.parametrize(
    ("url", "options", "expected"),
    [
        ("s3://kv", {}, ("kv", "tiercache", None, None, None)),
        ("s3://kv/some/where/", {"prefix": "x"}, ("kv", "some/where/x", None, None, None)),
        ("s3://kv", {"prefix": ""}, ("kv", "", None, None, None)),
        ("s3://kv", {"region": "eu-west-1"}, ("kv", "tiercache", None, None, "eu-west-1")),
        ("s3://kv", {"endpoint": "https://s:9000/"}, ("kv", "tiercache", "https://s:9000", None, None)),
        ("s3://kv", {"endpoint": "s:9000", "allow_http": True}, ("kv", "tiercache", "http://s:9000", None, None)),
        (
            "s3://my.own.kv",
            {"endpoint": "https://s", "virtual_hosted": True},
            ("my.own.kv", "tiercache", "https://my.own.kv.s", True, None),
        ),
        # A host as LMCache has it.
        ("s3://kv.s3.eu-west-1.amazonaws.com", {}, ("kv", "tiercache", None, None, "eu-west-1")),
        ("s3://my.kv.s3.us-east-2.amazonaws.com", {}, ("my.kv", "tiercache", None, None, "us-east-2")),
        ("s3://kv.s3.amazonaws.com", {"region": "us-west-2"}, ("kv", "tiercache", None, None, "us-west-2")),
        (
            "s3://kv--use1-az4--x-s3.s3express-use1-az4.us-east-1.amazonaws.com",
            {"express": True},
            ("kv--use1-az4--x-s3", "tiercache", None, None, "us-east-1"),
        ),
        ("s3://kv.store.corp:9000", {}, ("kv", "tiercache", "https://kv.store.corp:9000", True, None)),
        ("s3://kv.store.corp/deep", {"allow_http": True}, ("kv", "deep/tiercache", "http://kv.store.corp", True, None)),
        ("s3://kv.store.corp", {"virtual_hosted": False}, ("kv", "tiercache", "https://store.corp", False, None)),
        ("s3://kv.127.0.0.1:9000", {}, ("kv", "tiercache", "https://127.0.0.1:9000", False, None)),
    ],
)
def test_a_bucket_and_perhaps_an_endpoint(url: str, options: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert place(url, **options) == S3Address(*expected)


@pytest.mark.parametrize(
    ("url", "options", "problem"),
    [
        ("", {}, r"\.url: this names no bucket"),
        ("http://kv", {}, r"\.url: this names no bucket"),
        ("s3://k", {}, r"\.url: this is no name of a bucket"),
        ("s3://key:hunter2@kv", {}, r"\.url: credentials do not belong here"),
        ("s3://kv?token=hunter2", {}, r"\.url: an S3 URL has no \?"),
        ("s3://kv.host:hunter2", {}, r"\.url: this is no URL"),
        ("s3://kv", {"endpoint": "ftp://s"}, r"\.endpoint: expected a URL"),
        ("s3://kv", {"endpoint": "https://me:hunter2@s"}, r"\.endpoint: expected a URL"),
        ("s3://kv", {"prefix": "../../x"}, r"\.prefix: expected names with / between them, without '\.\.'"),
        ("s3://kv", {"prefix": "a\nb"}, r"\.prefix: expected names"),
        ("s3://kv/../x", {}, r"\.url: expected names"),
        ("s3://kv", {"endpoint": "http://s"}, r"\.allow_http: http://s is plain HTTP"),
    ],
)
def test_what_cannot_be_used_is_said_without_secrets(url: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"remote_storage_plugin\.s3{problem}") as caught:
        place(url, **options)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__
