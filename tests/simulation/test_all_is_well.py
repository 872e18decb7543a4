"""When the simulation takes a cache for well again."""

from typing import Any

import pytest

from tests.torture.simulation.plan import Operation, Setting
from tests.torture.simulation.run import run_seed


def operation(kind: str, *keys: int, **values: Any) -> Operation:
    return Operation(kind, 0, 0.01, keys, None, values)


@pytest.mark.parametrize(("tier", "for_s", "seed"), [("fs", 0.01, 3), ("disk", 0.3, 4)])
def test_not_before_a_count_that_was_deleted_is_known_again(tier: str, for_s: float, seed: int) -> None:
    """Until then nothing is written, and scans that fail are at least a second apart."""
    operations = [
        operation("put_many", 1, 2, 3),
        operation("flush", timeout_s=5.0),
        operation("fault", place=tier, fault="slow", rate=1.0),
        operation("wipe", name="ledger"),
        *[operation("put", key) for key in range(5, 12)],
        operation("rest", for_s=for_s),
        operation("fault", place=tier, fault="eio", rate=0.3),
        *[operation("put", key) for key in range(15, 19)],
        operation("rest", for_s=1.0),
    ]
    setting = Setting(1, 8, (tier,), {}, 240, True, 40, False, 4)
    assert run_seed(seed, operations, setting=setting).failure is None
