"""Eviction orders against the simplest models that can be written, and the index on top of them."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.core.test_eviction_models import judging
from tiercache.core.eviction import ORDERS, make_order
from tiercache.core.index import CappedIndex

KEYS = st.integers(0, 7).map(lambda number: bytes([number]) * 24)


def coldest_first(uses: dict[bytes, tuple[int, int, int]]) -> dict[str, Callable[[], bytes]]:
    """`uses`: key -> (age of insertion, age of last use, count of uses)."""
    return {
        "LRU": lambda: min(uses, key=lambda key: uses[key][1]),
        "MRU": lambda: max(uses, key=lambda key: uses[key][1]),
        "FIFO": lambda: min(uses, key=lambda key: uses[key][0]),
        "LFU": lambda: min(uses, key=lambda key: (uses[key][2], uses[key][1])),
    }


class IndexAgainstModel(RuleBasedStateMachine):
    policy = "LRU"

    def __init__(self) -> None:
        super().__init__()
        self.index = CappedIndex(judging(make_order(self.policy)))
        self.uses: dict[bytes, tuple[int, int, int]] = {}
        self.sizes: dict[bytes, int] = {}
        self.now = 0
        self.before_all = 0

    @rule(key=KEYS, size=st.integers(1, 5000))
    def add(self, key: bytes, size: int) -> None:
        self.now += 1
        self.index.add(key, size)
        inserted, _, count = self.uses.get(key, (self.now, 0, 0))
        self.uses[key] = (inserted, self.now, min(count + 1, 255))
        self.sizes[key] = size

    @rule(key=KEYS, size=st.integers(1, 5000))
    def find_after_restart(self, key: bytes, size: int) -> None:
        known = key in self.uses
        self.index.add(key, size, cold=True)
        self.sizes[key] = size
        if not known:
            self.before_all -= 1
            # Among those never used, LFU takes the first found; the others take the last found.
            self.uses[key] = (self.before_all, self.before_all if self.policy != "LFU" else -(10**6) - self.before_all, 0)

    @rule(key=KEYS)
    def touch(self, key: bytes) -> None:
        self.now += 1
        self.index.touch(key)
        if key in self.uses:
            inserted, _, count = self.uses[key]
            self.uses[key] = (inserted, self.now, min(count + 1, 255))

    @rule(key=KEYS)
    def remove(self, key: bytes) -> None:
        assert self.index.remove(key) == self.sizes.pop(key, None)
        self.uses.pop(key, None)

    @precondition(lambda self: self.uses)
    @rule()
    def evict_one(self) -> None:
        victim = coldest_first(self.uses)[self.policy]()
        assert self.index.evict(1) == [(victim, self.sizes[victim])]
        del self.uses[victim], self.sizes[victim]

    @rule(needed=st.integers(1, 12000))
    def evict_bytes(self, needed: int) -> None:
        victims = self.index.evict(needed)
        freed = sum(size for _, size in victims)
        assert freed >= needed or not self.index.used_bytes
        assert freed - (victims[-1][1] if victims else 0) < needed, "no more went than had to"
        for key, size in victims:
            assert self.sizes.pop(key) == size
            del self.uses[key]

    @invariant()
    def agrees(self) -> None:
        assert self.index.used_bytes == sum(self.sizes.values())
        assert len(self.index) == len(self.sizes)
        assert all(key in self.index for key in self.sizes)


def machine(name: str) -> type[IndexAgainstModel]:
    return type(f"IndexWith{name}", (IndexAgainstModel,), {"policy": name})


TestLru = machine("LRU").TestCase
TestMru = machine("MRU").TestCase
TestFifo = machine("FIFO").TestCase
TestLfu = machine("LFU").TestCase
for case in (TestLru, TestMru, TestFifo, TestLfu):
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("policy", ORDERS)
def test_victim_that_may_not_go_comes_back_where_the_policy_wants_it(policy: str) -> None:
    order = judging(make_order(policy))
    for number in range(3):
        order.insert(bytes([number]), number)
    key, value = order.pop_victim()
    assert key not in order
    order.readmit(key, value)
    assert order.entries[key] == value
    assert len(order) == 3
    expected = {"MRU": bytes([2]), "FIFO": bytes([0])}
    assert order.pop_victim()[0] == expected.get(policy, bytes([1]))


def test_reading_keeps_the_hottest_chunk_under_lru() -> None:
    index = CappedIndex(make_order("LRU"))
    for number in range(10):
        index.add(bytes([number]), 1)
        index.touch(bytes([0]))
    assert bytes([0]) not in {key for key, _ in index.evict(9)}


def test_evicting_beside_many_parked_victims_stays_linear() -> None:
    """4,000 leased residents are met once, not once for each eviction (that took LMCache 847 ms)."""
    order = make_order("LRU")
    for number in range(4000):
        order.insert(number.to_bytes(2, "big"), number)
    popped = [order.pop_victim()[0] for _ in range(4000)]
    assert len(set(popped)) == 4000
    with pytest.raises(KeyError):
        order.pop_victim()


def test_old_fame_does_not_grow_without_bound_under_lfu() -> None:
    order = make_order("LFU")
    order.insert(b"famous", 1)
    for _ in range(10_000):
        order.touch(b"famous")
    order.insert(b"new", 2)
    for _ in range(300):
        order.touch(b"new")
    assert order.pop_victim()[0] == b"famous", "both are at the ceiling; the older use goes first"


def test_prefix_counts_up_to_the_first_gap() -> None:
    index = CappedIndex(make_order("LRU"))
    for number in (0, 1, 3):
        index.add(bytes([number]), 1)
    assert index.prefix([bytes([number]) for number in range(4)]) == 2
