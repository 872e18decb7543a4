"""`python -m tests.bench.gpu` in host memory: all checks pass, figures have names, a failure loses nothing else."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.bench.gpu.report import TARGETS

PARTS = "paged,events,model,ttft,overlap,gds"


def gpu_bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.bench.gpu", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("gpu-bench")
    file = place / "found.json"
    run = gpu_bench("--cpu", "--parts", PARTS, "--directory", place, "--json", file)
    assert run.returncode == 0, run.stdout + run.stderr
    assert list(place.iterdir()) == [file], "what the benchmark made is gone"
    return {"stdout": run.stdout, **json.loads(file.read_text())}


def test_every_part_ends_and_every_check_passes(found: dict[str, Any]) -> None:
    assert {name: part["ended"] for name, part in found["parts"].items()} == dict.fromkeys(PARTS.split(","), "passed")
    assert set(found["checks"].values()) == {"passed"}
    assert len(found["checks"]) == 9, "the tenth needs a GPU"
    assert f"{len(found['checks'])} of {len(found['checks'])} checks passed" in found["stdout"]


def test_results_say_where_they_come_from(found: dict[str, Any]) -> None:
    assert found["machine"]["cpus"] >= 1
    assert found["packages"]["torch"]
    assert found["amount"] == "cpu"
    assert "the figures mean nothing" in found["stdout"]


def test_every_target_names_figures_that_are_measured(found: dict[str, Any]) -> None:
    measured = found["figures"]
    for target in TARGETS:
        assert target.found(measured) is not None, target


@pytest.mark.needs("no GPU")
def test_a_machine_without_a_gpu_gets_one_sentence() -> None:
    run = gpu_bench("--parts", "paged")
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].startswith("error: no NVIDIA driver here")
    assert "--cpu" in run.stderr
