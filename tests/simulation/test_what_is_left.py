"""What a run leaves in the process that it ran in."""

import gc
import warnings

import pytest

from tiercache.core.breaker import Breaker
from tiercache.testing.simulation.run import run_seed
from tiercache.testing.simulation.world import World
from tiercache.tiers.cpu import Lease


def _of_runs() -> list[object]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) in (World, Lease)]


def test_of_a_run_that_failed_nothing_is_left_but_what_is_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of its processes are said to be lost when they are collected: were that later, in somebody else's test."""
    monkeypatch.setattr(Breaker, "succeeded", lambda *_: None)
    monkeypatch.setattr(Breaker, "answered", lambda *_: None)
    before = _of_runs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcome = next(outcome for seed in range(30) if (outcome := run_seed(seed)).failure is not None)
        assert not [one for one in _of_runs() if one not in before]
    assert "after the last fault" in outcome.said
    assert 'File "' in outcome.said
