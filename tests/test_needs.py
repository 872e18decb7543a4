"""What a test needs of the machine: left out where it is missing, and said in one line at the end of the run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import SYSTEM_PACKAGES
from tests.readme.blocks import REPOSITORY

TESTS = """
import pytest

@pytest.mark.needs("redis-server")
def test_server():
    pass

@pytest.mark.needs("redis-server", "openssl")
def test_server_with_tls():
    pass

@pytest.mark.parametrize("part", [pytest.param(1, marks=pytest.mark.needs("openssl")), 2])
def test_parts(part):
    pass

@pytest.mark.uses("fuse3")
def test_more_with_a_package():
    pass

@pytest.mark.needs("minutes")
def test_long():
    pass

def test_plain():
    pass
"""
LINE = (
    "left out for what this machine lacks: redis-server (2 tests), openssl (2 tests): "
    "apt-get install --no-install-recommends redis-server openssl; minutes (1 test): make long-test"
)


def run(place: Path, *options: str, programs: tuple[str, ...] = (), tests: str = TESTS) -> tuple[int, str]:
    """pytest on `tests`, on a machine where PATH has only `programs`."""
    (place / "test_some.py").write_text(tests)
    path = place / "bin"
    path.mkdir(exist_ok=True)
    for program in programs:
        (path / program).touch(mode=0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "LONG_TESTS"))}
    command = [sys.executable, "-m", "pytest", "-q", "-ptests.needs", "-pno:cacheprovider", "--strict-markers", *options]
    environment = {**kept, "PATH": str(path), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("processes", ["0", "2"])
def test_tests_are_left_out_and_one_line_says_why(tmp_path: Path, processes: str) -> None:
    status, said = run(tmp_path, "-n", processes)
    assert status == 0, said
    assert said.count("left out") == 1 and LINE in said.splitlines()
    assert re.search(r"^3 passed", said, re.MULTILINE) and "skipped" not in said


def test_tests_that_need_or_use_a_system_package_can_be_selected(tmp_path: Path) -> None:
    status, said = run(tmp_path, "-n", "0", "-m", "system_packages", programs=("redis-server",))
    assert status == 0, said
    assert re.search(r"^2 passed", said, re.MULTILINE), "the server's, and the one that uses FUSE"
    assert "openssl (2 tests)" in said and "minutes" not in said


@pytest.mark.parametrize("marker", ["needs", "uses"])
def test_a_need_that_nobody_knows_is_an_error(tmp_path: Path, marker: str) -> None:
    status, said = run(tmp_path, "-n", "0", tests=TESTS.replace('needs("redis-server")', f'{marker}("reddis")'))
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "test_some.py::test_server: tests/needs.py knows nothing named reddis" in said


@pytest.mark.uses(*SYSTEM_PACKAGES)
def test_ci_hides_every_system_package_but_the_compiler_and_curl() -> None:
    command = [REPOSITORY / ".ci" / "bare", sys.executable, "-m", "tests.needs"]
    missing = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.split()
    assert {*missing, "g++", "curl"} >= SYSTEM_PACKAGES.keys()


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="all tests run in one process")
def test_groups_reach_who_hands_out_the_tests(request: pytest.FixtureRequest) -> None:
    """Tests that share what is dear to make run in one process, as `conftest.py` says. pytest-xdist reads their groups from
    the end of a test's name; pytest 9.2 does not let it write there."""
    assert request.node.nodeid.endswith("@tests/test_needs.py")
