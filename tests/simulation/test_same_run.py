"""The same seed is the same run, byte for byte: whatever the hashes, the addresses and the Python."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

_SEEDS = (*range(12), *[9900067] * 8)
"""Answers of one instant came in the order of addresses, which differs within a process."""
_ROOT = Path(__file__).parents[2]
_PROGRAM = f"""
from tests.torture.simulation.run import run_seed
for seed in {_SEEDS}:
    outcome = run_seed(seed)
    print(seed, outcome.digest, outcome.steps, f"{{outcome.virtual_s:.9f}}", outcome.failure)
"""
_NEEDED = "import aiofiles, greenlet, msgspec, numpy, rich, typer, xxhash, yaml"


def _digests(python: str, hash_seed: int) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(_ROOT)}
    command = [python, "-W", "ignore::RuntimeWarning", "-c", _PROGRAM]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600).stdout


@functools.cache
def _here() -> str:
    return _digests(sys.executable, 0)


def test_with_other_hashes() -> None:
    found = _digests(sys.executable, 4_000_000_000)
    assert found == _here()
    assert len(found.splitlines()) == len(_SEEDS)
    assert len(set(found.splitlines())) == len(set(_SEEDS))


@pytest.mark.parametrize("version", [f"3.{minor}" for minor in (11, 12, 13, 14) if minor != sys.version_info[1]])
def test_in_another_python(version: str) -> None:
    python = _python(version)
    if python is None:
        pytest.skip(f"no Python {version} with what a simulation needs")
    assert _digests(python, 7) == _here()


def _python(version: str) -> str | None:
    """One that is not ours: named in TORTURE_PYTHONS (paths, separated by colons), the PATH's, or pyenv's."""
    named = [path for path in os.environ.get("TORTURE_PYTHONS", "").split(":") if path]
    places = [*named, f"python{version}", *map(str, sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python")))]
    for python in places:
        try:
            asked = subprocess.run(
                [python, "-c", f"import sys; {_NEEDED}; print('%d.%d' % sys.version_info[:2])"],
                capture_output=True, text=True, check=False, timeout=60,
            )  # fmt: skip
        except OSError:
            continue
        if asked.returncode == 0 and asked.stdout.strip() == version:
            return python
    return None
