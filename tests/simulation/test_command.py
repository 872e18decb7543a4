"""`python -m tests.torture`, as a user runs it."""

import json
import subprocess
import sys
from collections import Counter

import pytest
from rich.console import Console

from tests.torture.simulation.command import Torture, torture_command
from tests.torture.simulation.run import run_seed
from tiercache.tiers.cpu import CpuTier


def torture(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.torture", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_some_seeds_in_two_processes() -> None:
    done = torture("--seeds", 4, "--jobs", 2)
    assert done.returncode == 0, done.stderr
    assert not done.stderr  # nothing is left to be cleaned up at the end
    for said in ("4 seeds in", "operations a second", "0 failed", "states reached"):
        assert said in done.stdout


def test_one_seed_with_all_that_happens_in_it_is_the_same_each_time() -> None:
    first, second = (torture("--seed", 2).stdout for _ in range(2))
    assert first == second
    assert "put" in first
    assert "digest" in first


def test_json() -> None:
    found = json.loads(torture("--seeds", 2, "--jobs", 1, "--from", 7, "--json").stdout)
    assert (found["seeds"], found["failed"], found["failure"]) == (2, [], None)
    assert 300 < found["operations"] < 600
    assert found["chunks"] > found["operations"]


def test_operations_that_never_begin_are_not_counted() -> None:
    outcome = run_seed(7)
    assert len(outcome.begun) < len(outcome.operations)
    begun = Counter(operation.kind for operation in outcome.begun)
    ended = Counter[str]()
    for name, count in outcome.counts.items():
        if (kind := name.split()[0]) not in ("fault", "state") or name == "fault":
            ended[kind] += count
    assert begun == ended


def test_minutes_end_it() -> None:
    found = json.loads(torture("--minutes", 0.0001, "--jobs", 1, "--json").stdout)
    assert 1 <= found["seeds"] <= 8


def test_a_seed_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(CpuTier, "forget", lambda self, key: None)
    assert torture_command(Torture(seeds=30, jobs=1)) == 1
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert any(line.startswith("seed ") and "fails: Violation" in line for line in lines)
    assert any("of its 300 operations are enough:" in line for line in lines)
    assert "kind=forget" in said
    seed = next(line.split()[1] for line in lines if "fails: Violation" in line)
    assert lines[-1] == f"once more: python -m tests.torture --seed {seed}"


def test_no_line_is_cut_at_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(Console, "is_terminal", True)
    assert torture_command(Torture(seeds=1, jobs=1)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


def test_a_tier_of_somebodys_own_takes_part() -> None:
    done = torture("--seed", 1, "--tier", "tests.simulation.own_tiers:Dictionary")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert "own" in done.stdout


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        ("tests.simulation.own_tiers", "expected module:Class"),
        ("tests.simulation.own_tiers:Absent", "has no Absent"),
        ("tests.simulation.absent:Tier", "No module named"),
    ],
)
def test_a_tier_that_is_not_there(tier: str, said: str) -> None:
    wrong = torture("--seed", 1, "--tier", tier)
    assert wrong.returncode == 2
    assert said in wrong.stderr
