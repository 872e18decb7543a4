"""A third party's tier takes part in the workload, and a tier that breaks its contract is found."""

import pytest

from tests.torture.simulation.plan import setting_of
from tests.torture.simulation.run import run_seed

OPERATIONS = 150
SEEDS = range(20)


def failures(name: str, seeds: range) -> list[BaseException]:
    """The first failure of a tier, if it has one."""
    for seed in seeds:
        outcome = run_seed(seed, setting=setting_of(seed, own=f"tests.simulation.own_tiers:{name}"), count=OPERATIONS)
        if outcome.failure is not None:
            return [outcome.failure]
    return []


def test_a_tier_that_keeps_the_contract_passes() -> None:
    assert not failures("Dictionary", range(4))


@pytest.mark.parametrize("name", ["Unremoved", "Mixed", "Late", "Careless"])
def test_a_tier_that_breaks_it_is_found(name: str) -> None:
    assert failures(name, SEEDS)
