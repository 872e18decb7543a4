"""The S3 tier in a cache, from a configuration as LMCache's users have it."""

from pathlib import Path

import pytest
import yaml

from tests.remote.in_the_cache import chunks_come_back
from tests.servers.s3 import BUCKET, KEY, SECRET, S3Server
from tiercache import Config
from tiercache.commands.doctor import OK, PROBLEM, examine


def configured(path: Path, address: str, secret: str = SECRET) -> Config:
    settings = {
        "chunk_size": 16,
        "local_cpu": True,
        "max_local_cpu_size": 0.004,
        "remote_url": f"s3://{BUCKET}.{address}/{path.name}",
        "extra_config": {
            "s3_region": "us-east-1",
            "s3_num_io_threads": 64,
            "disable_tls": True,
            "aws_access_key_id": KEY,
            "aws_secret_access_key": secret,
        },
    }
    (path / "lmcache.yaml").write_text(yaml.safe_dump(settings))
    return Config.load(path / "lmcache.yaml", environ={})


async def test_chunks_come_back_in_another_cache(
    tmp_path: Path, s3_server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    writer, _ = await chunks_come_back(configured(tmp_path, f"127.0.0.1:{s3_server.port}"))
    assert writer.name == "s3"
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("server", "secret", "status", "said"),
    [
        (None, SECRET, OK, "the server answers"),
        (None, "hush", PROBLEM, "credentials"),
        ("127.0.0.1:1", SECRET, PROBLEM, "the connection was refused"),
    ],
)
def test_doctor_asks_the_store(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch,
    server: str | None, secret: str, status: str, said: str,
) -> None:  # fmt: skip
    configured(tmp_path, server or f"127.0.0.1:{s3_server.port}", secret)
    monkeypatch.setenv("TIERCACHE_CONFIG_FILE", str(tmp_path / "lmcache.yaml"))
    (finding,) = (each for each in examine(tmp_path) if each.topic == "tier s3")
    assert finding.status == status and said in finding.found
    assert secret not in finding.found
