"""The benchmark as a user runs it, with tiny sizes: what it names, what it compares, what it leaves behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SIZES = ("2MiB", "32MiB")
PEERS = ("tests.bench",)
"""The command that also measures what needs emulators, servers, engines or a peer."""


def bench(*arguments: object, module: tuple[str, ...] = ("tiercache", "bench")) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *module, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def measured(place: Path, parts: str, *more: object, status: int = 0) -> tuple[str, dict[str, Any]]:
    """What the command beside peers says of these parts, and the figures that it writes."""
    file = place / "bench.json"
    options = ("--quick", "--pairs", 1, "--only", parts, "--directory", place, "--json", file, *more)
    run = bench(*options, module=PEERS)
    assert run.returncode == status, run.stderr
    return run.stderr, json.loads(file.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("bench")
    file = place / "bench.json"
    run = bench("--quick", "--pairs", 2, "--directory", place / "data", "--json", file)
    assert run.returncode == 0, run.stderr
    assert not (place / "data").exists(), "what the benchmark made is gone"
    return {"stdout": run.stdout, "stderr": run.stderr, **json.loads(file.read_text())}


NAMES = """
    ceiling.memcpy_gbps cpu.put_gbps cpu.get_gbps cpu.put_overhead_us cpu.put_loop_us cpu.put_latency_us cpu.get_overhead_us
    cpu.batch_put_overhead_us cpu.batch_get_overhead_us lookup.keys_per_s lookup.disk_keys_per_s hash.tokens_per_s
    index.bytes_per_entry index.admit_p99_us loop.lag_p99_ms loop.lag_max_ms restart.index_100k_s
"""
OF_EACH_SIZE = """
    ceiling.file_write_gbps ceiling.file_read_gbps disk.put_durable_gbps
    disk.get_cold_gbps
"""


@pytest.mark.parametrize("name", [*NAMES.split(), *(f"{name}.{size}" for name in OF_EACH_SIZE.split() for size in SIZES)])
def test_each_figure_has_its_stable_name(found: dict[str, Any], name: str) -> None:
    assert {"median", "min", "max", "count"} <= set(found[name])
    assert found[name]["min"] <= found[name]["median"] <= found[name]["max"]
    assert name in found["stdout"], "the table does not cut names off"


def test_pairs_are_counted_on_both_sides(found: dict[str, Any]) -> None:
    for ours, ceiling in (
        ("cpu.put_gbps", "ceiling.memcpy_gbps"),
        ("disk.put_durable_gbps.2MiB", "ceiling.file_write_gbps.2MiB"),
        ("disk.get_cold_gbps.32MiB", "ceiling.file_read_gbps.32MiB"),
    ):
        assert found[ours]["count"] == found[ceiling]["count"] == 2
        assert found[ours]["ratios"][ceiling] > 0


def test_the_machine_is_written_down(found: dict[str, Any]) -> None:
    assert {"cpus", "memory_gb", "kernel", "file_system", "python", "packages", "tiercache"} <= set(found["machine"])


def test_progress_is_shown(found: dict[str, Any]) -> None:
    assert "pair 2 of 2" in found["stderr"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--only", "gpu"), "expected a comma list"),
        (("--json", "/nowhere/at/all.json"), "is not a directory"),
        (("--json", "/"), "--json: / is a directory; expected the name of a file"),
        (("--directory", "/proc/bench"), "cannot be used"),
    ],
)
def test_a_wrong_argument_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    run = bench(*arguments)
    assert run.returncode == 2
    assert run.stderr.startswith("error: ")
    assert sentence in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_a_peer_whose_python_is_missing_is_one_sentence() -> None:
    run = bench("--peer-python", "/nowhere/python", module=PEERS)
    assert (run.returncode, run.stderr) == (2, "error: --peer-python: /nowhere/python does not exist\n")


def test_a_peer_that_does_not_start_is_said_and_the_rest_is_kept(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'No module named lmcache' >&2\nexit 1\n")
    broken.chmod(0o755)
    said, found = measured(tmp_path, "restart,disk", "--peer-python", broken, status=1)
    assert "it last said: No module named lmcache" in said
    assert "restart.index_100k_s" in found


def test_shared_memory_of_another_process_is_measured_beside_the_own_hot_cache(tmp_path: Path) -> None:
    _, found = measured(tmp_path, "shared_memory")
    assert found["shared_memory.get_gbps"]["ratios"]["shared_memory.hot_get_gbps"] > 0
    assert found["shared_memory.first_get_gbps"]["median"] > 0
    assert found["shared_memory.leases_per_s"]["ratios"]["shared_memory.hot_leases_per_s"] > 0
