"""What the tests of the S3 tier share: the server, and tiers that use it."""

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.remote.made import configured
from tests.servers.s3 import BUCKET, KEY, SECRET, S3Server
from tiercache.tiers.remote.base import RemoteSettings
from tiercache.tiers.remote.s3 import S3Tier


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def lasting_descriptors() -> str:
    """obstore's runtime is the process's, and keeps connections and event descriptors for the next request."""
    return r"socket:|anon_inode:"


@pytest.fixture(autouse=True)
def no_credentials_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The user who runs the tests may have AWS credentials; no test may use them."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))


def settings_for(endpoint: str, *, bucket: str = BUCKET, timeout_s: float = 10.0, **more: Any) -> RemoteSettings:
    """With credentials of the server's, unless `more` says otherwise."""
    login = {"region": "us-east-1", "access_key_id": KEY, "secret_access_key": SECRET}
    chosen = {"name": "s3.test", "endpoint": endpoint, "allow_http": True, "timeout_s": timeout_s} | login | more
    return configured("s3", f"s3://{bucket}", **chosen)


@pytest.fixture
def make_tier(s3_server: S3Server) -> Callable[..., S3Tier]:
    """Makes tiers, not open yet, which share a prefix that no other test has."""
    prefix = uuid.uuid4().hex

    def make(**options: Any) -> S3Tier:
        return S3Tier(settings_for(s3_server.endpoint, **{"prefix": prefix} | options))

    return make
