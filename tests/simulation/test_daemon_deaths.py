"""A 3FS daemon that dies and is replaced while a tier has no rings with either of them."""

from typing import Any

import pytest

from tests.torture.simulation.fittings import Fittings
from tests.torture.simulation.plan import Operation, Setting
from tests.torture.simulation.run import run_seed


def operation(kind: str, *keys: int, **values: Any) -> Operation:
    return Operation(kind, 0, 0.01, keys, None, values)


def setting(*, shared_arena: bool) -> Setting:
    fittings = Fittings(shared_arena=shared_arena, ring_places=2, ring_entries=4)
    options = {"blocking_timeout_secs": 5, "lookup_timeout_ms": 200}
    return Setting(1, 32, ("hf3fs",), options, 240, True, 64, False, 4, fittings)


@pytest.mark.parametrize("shared_arena", [True, False], ids=["arena", "buffers"])
@pytest.mark.parametrize("away_s", [0.001, 5.0])
@pytest.mark.parametrize("after_s", [10.0, 15.9, 24.8])
def test_everything_is_written_after_a_daemon_died_that_had_stopped_to_answer(
    after_s: float, away_s: float, shared_arena: bool
) -> None:
    """Rings that are worn out are given up and, while the daemon has the arena mapped, no others are made. Its death in that
    time is seen by nothing but the files that were opened on its mount, which are of no use any more."""
    died = [
        operation("fault", place="hf3fs", fault="dead", rate=1.0),
        operation("rest", for_s=away_s),
        operation("clear", place="hf3fs"),
    ]
    operations = [
        operation("put_many", 1, 2, 3),
        operation("flush", timeout_s=5.0),
        operation("clear_hot"),
        operation("fault", place="hf3fs", fault="stuck", rate=1.0),
        *(operation("put", key) for key in range(10, 16)),
        operation("get", 1),
        operation("get", 2),
        operation("rest", for_s=after_s),
        *died,
        operation("rest", for_s=60.0),
    ]
    assert run_seed(0, operations, setting=setting(shared_arena=shared_arena)).failure is None
