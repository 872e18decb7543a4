"""URL, options, and Mooncake's own JSON file."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.remote.mooncake.conftest import make_tier
from tiercache.errors import ConfigError
from tiercache.tiers.remote.mooncake_settings import MooncakeAddress, read_address


def place(url: str = "", **options: Any) -> MooncakeAddress:
    return read_address(make_tier(url, **{"local_hostname": "localhost"} | options).settings)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mooncake.json"
    content = {
        "local_hostname": "host-of-the-file",
        "metadata_server": "http://meta:8080/metadata",
        "global_segment_size": "3GB",
        "local_buffer_size": 1 << 20,
        "protocol": "RDMA",
        "device_name": "mlx5_2",
        "master_server_address": "master-of-the-file:50051",
    }
    path.write_text(json.dumps(content))
    return path


def test_lmcaches_url_names_the_master() -> None:
    found = place("mooncakestore://10.0.0.7:50051/?device=mlx5_0")
    assert found.master == "10.0.0.7:50051" and found.master_endpoint == ("10.0.0.7", 50051)
    assert (found.protocol, found.metadata_server, found.device_name) == ("tcp", "P2PHANDSHAKE", "mlx5_0")
    assert place("mooncakestore://10.0.0.7:50051/?device=mlx5_0", device_name="mlx5_1").device_name == "mlx5_1"


def test_several_masters_behind_etcd_are_mooncakes_business() -> None:
    assert place(master_server_address="etcd://a:2379;b:2379").master_endpoint is None


def test_mooncakes_file_is_read(file: Path) -> None:
    found = place(config_file=str(file))
    assert found == MooncakeAddress(
        master="master-of-the-file:50051",
        local_hostname="host-of-the-file",
        metadata_server="http://meta:8080/metadata",
        protocol="rdma",
        device_name="mlx5_2",
        global_segment_bytes=3 << 30,
        local_buffer_bytes=1 << 20,
        prefer_local=False,
    )


def test_mooncakes_variable_names_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    assert place("mooncakestore://from-the-url:1").master == "master-of-the-file:50051"


def test_what_the_configuration_says_wins_over_the_file(file: Path) -> None:
    found = place(config_file=str(file), local_hostname="h", device_name="mlx5_7")
    assert (found.local_hostname, found.device_name, found.protocol) == ("h", "mlx5_7", "rdma")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object"),
        ('{"global_segment_size": "lots"}', "global_segment_size: expected a size"),
    ],
)
def test_a_wrong_file_is_a_configuration_error(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        place("mooncakestore://h:1", config_file=str(path))


def test_secrets_of_the_metadata_service_are_not_shown() -> None:
    assert "hunter2" not in repr(place("mooncakestore://h:1", metadata_server="redis://:hunter2@h:6379"))
