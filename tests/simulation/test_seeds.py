"""Seeds that differ in each run, for a limited time; and all that ever failed, always.

TORTURE_SECONDS says how long: 30 where it is not set, 60 in `.ci/run`. TORTURE_SEED says where to begin instead of
at the clock's time.
"""

import os
import time
from pathlib import Path

import pytest

from tests.torture.simulation.seeds import failure_of, run_batch

_SECONDS = float(os.environ.get("TORTURE_SECONDS", "30"))
_FAILED_ONCE = Path(__file__).with_name("seeds.txt")


def _failed_once() -> list[tuple[int, str]]:
    lines = [line for line in _FAILED_ONCE.read_text().splitlines() if line and not line.startswith("#")]
    return [(int(seed), why) for seed, _, why in (line.partition(" ") for line in lines)]


def _explained(seed: int) -> str:
    failure = failure_of(seed)
    if failure is None:
        return f"seed {seed} failed, and not again: two runs of it differ"
    operations = "\n".join(map(str, failure.operations))
    return f"python -m tests.torture --seed {seed}\n{operations}\n{failure.error}"


def test_seeds_that_failed_once_hold() -> None:
    for seed, why in _failed_once():
        if run_batch([seed]).failed:
            pytest.fail(f"seed {seed} fails again ({why}):\n{_explained(seed)}")


def test_seeds_of_today_hold(capsys: pytest.CaptureFixture[str]) -> None:
    first = int(os.environ.get("TORTURE_SEED", time.time() * 1000))
    with capsys.disabled():
        print(f"\nseeds from {first}, for {_SECONDS:.0f} s")
    until_s = time.monotonic() + _SECONDS
    seed = first
    while time.monotonic() < until_s:
        if run_batch([seed]).failed:
            pytest.fail(_explained(seed))
        seed += 1
    with capsys.disabled():
        print(f"{seed - first} seeds held")
