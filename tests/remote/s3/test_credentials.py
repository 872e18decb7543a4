"""Whose credentials are used."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiers.test_contract import LAYOUT
from tiercache.errors import ConfigError
from tiercache.tiers.remote.base import RemoteSettings
from tiercache.tiers.remote.s3_settings import Identity, read_identity

FILES = """
[default]
aws_access_key_id = DEFAULT
aws_secret_access_key = hunter2
[team]
aws_access_key_id = TEAM
aws_secret_access_key = hunter3
aws_session_token = hunter4
"""
CONFIG = """
[default]
region = eu-west-1
[profile team]
region = eu-west-2
[profile login]
sso_start_url = https://example.com
"""


def identity(**options: Any) -> Identity:
    return read_identity(RemoteSettings("s3", "s3", LAYOUT.fingerprint, 1 << 20, url="s3://kv", options=options))


def who(identity: Identity) -> tuple[str, str | None]:
    assert identity.provider is not None
    given = identity.provider()
    return given["access_key_id"], given["token"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "credentials").write_text(FILES)
    (tmp_path / "config").write_text(CONFIG)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


@pytest.mark.usefixtures("files")
def test_settings_come_before_the_environment_and_that_before_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    assert who(identity()) == ("DEFAULT", None)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter5")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "hunter6")
    assert identity() == Identity("the environment", region="eu-west-1"), "the client reads it by itself"
    monkeypatch.setenv("AWS_PROFILE", "team")
    assert identity() == Identity("the environment", region="eu-west-2"), "as for Amazon's own programs"
    monkeypatch.delenv("AWS_PROFILE")
    given = identity(access_key_id="SETTINGS", secret_access_key="hunter7")
    assert who(given) == ("SETTINGS", None), "a token in the environment belongs to others"
    assert who(identity(access_key_id="A", secret_access_key="B", session_token="C")) == ("A", "C")
    assert identity(access_key_id="A", secret_access_key="B", skip_signature=True).anonymous


@pytest.mark.usefixtures("files")
def test_the_profile_that_aws_profile_names_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "team")
    given = identity()
    assert who(given) == ("TEAM", "hunter4")
    assert given.region == "eu-west-2"


def test_without_any_the_client_asks_instance_and_pod() -> None:
    assert identity().provider is None and not identity().anonymous


@pytest.mark.usefixtures("files")
def test_what_cannot_be_had_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"s3\.secret_access_key: .* given together"):
        identity(access_key_id="A")
    with pytest.raises(ConfigError, match=r"s3\.access_key_id: .* given together"):
        identity(secret_access_key="B")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match=r"s3\.access_key_id: AWS_PROFILE names the profile 'nobody'"):
        identity()


@pytest.mark.usefixtures("files")
def test_files_are_found_in_a_home_and_a_user_may_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "~/credentials")
    assert who(identity()) == ("DEFAULT", None)
    monkeypatch.delenv("AWS_SHARED_CREDENTIALS_FILE")
    assert identity().provider is None
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(FILES)
    assert who(identity()) == ("DEFAULT", None)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert identity().provider is None


@pytest.mark.parametrize("raw", [b"region = eu-west-1", b"# caf\xe9\n[default]"], ids=["no section", "not UTF-8"])
def test_files_of_another_form_are_said(raw: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_bytes(raw)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(ConfigError, match="config does not have the form of AWS files"):
        identity()


@pytest.mark.usefixtures("files")
def test_a_profile_that_needs_boto3_says_so_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setenv("AWS_PROFILE", "login")
    with pytest.raises(ConfigError, match=r"s3\.access_key_id: .*profile login.* pip install boto3"):
        identity()


@pytest.mark.usefixtures("files")
def test_secrets_are_in_no_repr() -> None:
    assert "hunter" not in repr(identity())
    assert "hunter" not in repr(identity(access_key_id="A", secret_access_key="hunter7"))
