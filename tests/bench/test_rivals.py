"""Rivals' benchmark clients against servers: what is compared, what clients are asked, and what is said without them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.bench.vllm import rivals
from tests.needs import LMCACHE_CLI
from tiercache.config import Config

MEMORY_GB = 0.5


def test_the_servers_have_the_same_room_in_memory_and_differ_in_what_is_compared(tmp_path: Path) -> None:
    settings = rivals._settings(64)
    assert not any("," in name for name in settings), "--servers separates them by commas"
    assert sum(name.startswith("OffloadingConnector") for name in settings) == 1, "--servers can choose it alone"
    small = [one for name, one in settings.items() if name != "engine cache that holds all"]
    assert {one.blocks for one in small} == {64} and settings["engine cache that holds all"].blocks > 64
    for name in ("tiercache", "tiercache without tails", "tiercache above a disk"):
        values = yaml.safe_load(settings[name].configured(tmp_path, MEMORY_GB))
        config = Config.load(environ={}, overrides=values)
        assert config.chunk_size == 256, "the default"
        assert config.max_local_cpu_size == MEMORY_GB
        assert bool(config.local_disk) == (name == "tiercache above a disk")
        assert config.save_unfull_chunk is (False if name == "tiercache without tails" else None)


def test_vllms_own_offloading_has_that_room_too_and_each_tier_below_it_a_directory(tmp_path: Path) -> None:
    below = {}
    for name, setting in rivals._settings(64).items():
        if "OffloadingConnector" in name:
            extra = json.loads(setting.arguments(tmp_path, MEMORY_GB)[-1])["kv_connector_extra_config"]
            assert extra["cpu_bytes_to_use"] == MEMORY_GB * 2**30
            below[name] = extra["secondary_tiers"]
        else:
            assert setting.arguments(tmp_path, MEMORY_GB) == []
    assert below["OffloadingConnector"] == []
    assert below["fs below OffloadingConnector"] == [{"type": "fs", "root_dir": str(tmp_path / "kv")}]
    (ours,) = below["ours below OffloadingConnector"]
    assert (ours.pop("type"), ours.pop("module_path")) == ("TierCacheTier", "tiercache.integrations.vllm_offloading")
    config = Config.load(environ={}, overrides=ours)
    assert config.local_disk and config.max_local_disk_size == 4


@pytest.mark.needs("lmcache-cli")
@pytest.mark.parametrize("workload", rivals._WORKLOADS)
def test_lmcaches_client_takes_the_arguments(workload: str, tmp_path: Path) -> None:
    """It writes down what it would ask, without a server."""
    command = rivals._command(workload, "http://127.0.0.1:1", Path("demo/model"), 0, LMCACHE_CLI, tmp_path)
    environment = os.environ | {"PYTHONPATH": str(LMCACHE_CLI)}
    subprocess.run([*command, "--export-config", tmp_path / "config.json"], env=environment, check=True)
    assert json.loads((tmp_path / "config.json").read_text())["workload"] == workload


def test_the_older_program_of_lmcache_is_asked_for_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(rivals.app, ["--client", str(tmp_path), "--workloads", "multi-round-qa"])
    assert result.exit_code == 2
    assert "has no multi_round_qa/multi-round-qa.py" in result.output + capsys.readouterr().err


def test_the_older_programs_rows_become_figures(tmp_path: Path) -> None:
    rows = [f"1500,{number / 10},{number},{number + 0.5}" for number in range(1, 12)]
    (tmp_path / "summary.csv").write_text("\n".join(["prompt_tokens,ttft,launch_time,finish_time", *rows]))
    found = rivals._qa_results(tmp_path / "summary.csv")
    assert found == {
        "mean_ttft_ms": pytest.approx(600),
        "p99_ttft_ms": pytest.approx(1090),
        "elapsed_time": pytest.approx(10.5),
        "successful_requests": 11,
    }


@pytest.mark.parametrize("workload", rivals._SERVE_WORKLOADS)
def test_vllms_client_takes_the_arguments(workload: str, tmp_path: Path) -> None:
    serve = pytest.importorskip("vllm.benchmarks.serve")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = rivals._command(workload, "http://127.0.0.1:1", Path("demo/model"), 0, LMCACHE_CLI, tmp_path)
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    found = parser.parse_args(command[command.index(rivals._BENCH_SERVE) + 1 :])
    assert (found.save_result, found.result_dir, found.metric_percentiles) == (True, str(tmp_path), "99")
    assert found.num_prompts % found.prefix_repetition_num_prefixes == 0, "all prompts are asked"
