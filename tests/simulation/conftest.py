"""What simulated processes hold when they are killed is no leak of the test's: the oracle looks at those that live."""

from collections.abc import Iterator

import pytest

from tests import leaks
from tests.torture.simulation.world import World


@pytest.fixture(autouse=True)
def simulated_caches_are_not_watched() -> Iterator[None]:
    before = len(leaks._watched)
    yield
    del leaks._watched[before:]


@pytest.fixture
def world() -> World:
    return World(0)
