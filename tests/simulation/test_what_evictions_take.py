"""What the simulation expects of a cache whose tiers evict."""

import pytest

from tests.torture.simulation.plan import Operation, Setting
from tests.torture.simulation.run import run_seed


@pytest.mark.parametrize("tier", ["fs", "weka"])
def test_a_chunk_that_is_being_evicted_is_not_missing(tier: str) -> None:
    """The elected instance takes chunks out of its index, deletes them, and counts them then."""
    setting = Setting(1, 8, (tier,), {}, 240, True, 40, False, 4)
    operations = []
    for key in range(0, 40, 2):  # 24 fit
        operations.append(Operation("put_many", 0, 0.01, (key, key + 1)))
        operations.append(Operation("flush", 0, 0.0, values={"timeout_s": 5.0}))
    outcomes = [run_seed(seed, operations, setting=setting) for seed in range(30, 40)]
    assert {outcome.seed: str(outcome.failure) for outcome in outcomes if outcome.failure} == {}
