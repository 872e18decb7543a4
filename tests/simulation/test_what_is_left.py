"""A run leaves no garbage in its process: lost leases are reported when they are collected, which must not happen in a
later test."""

import gc
import warnings
from collections.abc import Iterator

import pytest

from tests.simulation.test_that_it_can_fail import spins
from tests.torture.simulation import seeds
from tests.torture.simulation.plan import setting_of
from tests.torture.simulation.run import run_seed
from tests.torture.simulation.world import World
from tiercache.core.breaker import Breaker
from tiercache.memory.slots import Lease
from tiercache.tiers.cpu import CpuTier


def _of_runs() -> list[object]:
    return [one for one in gc.get_objects() if type(one) in (World, Lease)]


@pytest.fixture(autouse=True)
def nothing_is_left_or_said_late() -> Iterator[None]:
    gc.collect()
    before = _of_runs()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
            assert not [one for one in _of_runs() if one not in before]
    finally:
        gc.enable()


def test_of_a_run_that_failed_as_a_breaker_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Breaker, "succeeded", lambda *_: None)
    outcome = next(outcome for seed in range(30) if (outcome := run_seed(seed)).failure is not None)
    assert "breaker" in outcome.said
    assert "breaker" in str(outcome.failure)  # it is open at the end, or waits for a read that is over
    assert 'File "' in outcome.said


@pytest.mark.parametrize("seed", [710, 825, 1605])
def test_of_one_that_held(seed: int) -> None:
    """Garbage of one that comes back to life while it is collected, and threads that go on when they are told to end."""
    assert run_seed(seed).failure is None


def test_of_one_that_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuTier, "forget", spins)
    monkeypatch.setattr(seeds, "_AGAIN_S", 0.5)
    outcome = seeds.run_limited(0, setting_of(0), cpu_s=2.0)
    assert isinstance(outcome.failure, seeds.Spins)
    assert "something spins" in outcome.said
