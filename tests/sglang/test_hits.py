"""Which prefixes can be restored, without SGLang."""

from __future__ import annotations

import random

from tiercache.integrations.sglang.lookup import PoolPages, restorable


def test_every_page_is_needed_where_there_is_no_window() -> None:
    found = restorable(3, [PoolPages("indexer", [True, True, False])])
    assert (found.pages, found.by_pool, found.prefixes) == (2, {"indexer": 2}, [1, 2])


def test_of_states_that_lie_here_and_there_the_last_counts() -> None:
    found = restorable(5, [PoolPages("mamba", [False, True, False, True, False], window=1)])
    assert (found.pages, found.by_pool, found.prefixes) == (4, {"mamba": 4}, [2, 4])


def test_pools_have_to_agree_on_a_prefix() -> None:
    states = PoolPages("mamba", [False, True, False, True], window=1)
    windows = PoolPages("swa", [True, True, True, False], window=2)
    found = restorable(4, [states, windows])
    assert (found.pages, found.by_pool, found.prefixes) == (2, {"mamba": 4, "swa": 3}, [2])


def test_a_window_longer_than_the_prefix_needs_the_prefix() -> None:
    assert restorable(2, [PoolPages("swa", [True, True], window=4)]).prefixes == [1, 2]


def test_windows_are_those_of_the_definition() -> None:
    chance = random.Random(1)
    for _ in range(300):
        present = [chance.random() < 0.7 for _ in range(chance.randint(0, 12))]
        window = chance.randint(1, 5)
        expected = [end for end in range(1, len(present) + 1) if all(present[max(0, end - window) : end])]
        assert PoolPages("swa", present, window).restorable(len(present)) == expected
