"""LMCache's benchmark client against servers: what is compared, and what is said without the client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.bench.vllm import rivals
from tiercache.config import Config


def test_without_the_client_it_says_how_to_get_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(rivals.app, ["--client", str(tmp_path)])
    assert result.exit_code == 2
    assert "has no lmcache-cli" in result.output + capsys.readouterr().err


def test_the_servers_have_the_same_room_in_memory_and_differ_in_what_is_compared(tmp_path: Path) -> None:
    settings = rivals._settings(64)
    small = [one for name, one in settings.items() if name != "engine cache that holds all"]
    assert {one.blocks for one in small} == {64} and settings["engine cache that holds all"].blocks > 64
    offloaded = json.loads(settings["OffloadingConnector"].arguments[-1])["kv_connector_extra_config"]
    for name in ("tiercache", "tiercache, whole chunks", "tiercache, disk"):
        values = yaml.safe_load(settings[name].config.format(hot_gb=rivals._HOT_GB, directory=tmp_path))
        config = Config.load(environ={}, overrides=values)
        assert config.chunk_size == 256, "the default"
        assert config.max_local_cpu_size * 2**30 == offloaded["cpu_bytes_to_use"]
        assert bool(config.local_disk) == (name == "tiercache, disk")
        assert config.save_unfull_chunk is (False if name == "tiercache, whole chunks" else None)
