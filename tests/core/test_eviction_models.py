"""SLRU, S3-FIFO and COST against models made of lists; and what every order promises about prefixes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiercache.core.eviction import ORDERS, CostAware, EvictionOrder, S3Fifo, Slru, make_order
from tiercache.core.eviction.family import Family
from tiercache.core.eviction.recent import Recent
from tiercache.core.eviction.reuse import BUCKETS, MARGIN, bucket_of, expected_uses


class Nothing(Recent):
    """Nothing is too recent to be judged: the policy alone decides."""

    def used(self, end: bytes, chunks: int = 1) -> None:
        pass

    def grew(self, key: bytes, parent: bytes) -> None:
        pass


def judging(order: EvictionOrder[Any]) -> EvictionOrder[Any]:
    order._recent = Nothing()
    return order


KEYS = st.integers(0, 11).map(lambda number: bytes([number]))


class SlruModel:
    def __init__(self) -> None:
        self.probation: list[bytes] = []
        self.protected: list[bytes] = []

    def insert(self, key: bytes) -> None:
        self.probation.append(key)

    def insert_cold(self, key: bytes) -> None:
        self.probation.insert(0, key)

    def touch(self, key: bytes) -> None:
        size = len(self.probation) + len(self.protected)
        self.discard(key)
        self.protected.append(key)
        while len(self.protected) > max(1, int(Slru.PROTECTED * size)):
            self.probation.append(self.protected.pop(0))

    def discard(self, key: bytes) -> None:
        for segment in (self.probation, self.protected):
            if key in segment:
                segment.remove(key)

    def victim(self) -> bytes:
        return (self.probation or self.protected).pop(0)


class S3FifoModel:
    def __init__(self) -> None:
        self.small: list[list[Any]] = []
        self.main: list[list[Any]] = []
        self.ghosts: list[bytes] = []

    def insert(self, key: bytes) -> None:
        (self.main if key in self.ghosts else self.small).append([key, 0])
        if key in self.ghosts:
            self.ghosts.remove(key)

    def insert_cold(self, key: bytes) -> None:
        if key in self.ghosts:
            self.ghosts.remove(key)
        self.small.insert(0, [key, 0])

    def touch(self, key: bytes) -> None:
        for entry in self.small + self.main:
            if entry[0] == key:
                entry[1] = min(3, entry[1] + 1)

    def discard(self, key: bytes) -> None:
        self.small = [entry for entry in self.small if entry[0] != key]
        self.main = [entry for entry in self.main if entry[0] != key]
        if key in self.ghosts:
            self.ghosts.remove(key)

    def victim(self) -> bytes:
        while True:
            size = len(self.small) + len(self.main)
            if self.small and (len(self.small) >= S3Fifo.SMALL * size or not self.main):
                key, uses = self.small.pop(0)
                if not uses:
                    self.ghosts.append(key)
                    return bytes(key)
                self.main.append([key, 0])
            else:
                key, uses = self.main.pop(0)
                if not uses:
                    return bytes(key)
                self.main.append([key, uses - 1])


class AgainstModel(RuleBasedStateMachine):
    order_of: type[EvictionOrder[int]]
    model_of: type[Any]

    def __init__(self) -> None:
        super().__init__()
        self.order = judging(self.order_of())
        self.model = self.model_of()
        self.resident: set[bytes] = set()

    @rule(key=KEYS, cold=st.booleans())
    def insert(self, key: bytes, cold: bool) -> None:
        if key in self.resident:
            return
        (self.order.insert_cold if cold else self.order.insert)(key, key[0])
        (self.model.insert_cold if cold else self.model.insert)(key)
        self.resident.add(key)

    @rule(key=KEYS)
    def touch(self, key: bytes) -> None:
        if key in self.resident:
            self.order.touch(key)
            self.model.touch(key)

    @rule(key=KEYS)
    def discard(self, key: bytes) -> None:
        assert self.order.discard(key) == (key[0] if key in self.resident else None)
        self.model.discard(key)
        self.resident.discard(key)

    @precondition(lambda self: self.resident)
    @rule()
    def evict(self) -> None:
        expected = self.model.victim()
        assert self.order.coldest() == expected
        assert self.order.pop_victim() == (expected, expected[0])
        self.resident.remove(expected)

    @invariant()
    def agrees(self) -> None:
        assert set(self.order.entries) == self.resident


class CostModel:
    """Who is in which class since when, kept by hand; what ages are worth is the order's."""

    def __init__(self) -> None:
        self.there: dict[bytes, tuple[int, int]] = {}
        self.gone: dict[bytes, int] = {}
        self.clock = 0

    def insert(self, key: bytes) -> None:
        self.clock += 1
        self.there[key] = self.gone.pop(key, -1) | 1 if key in self.gone else 0, self.clock

    def touch(self, key: bytes) -> None:
        self.clock += 1
        self.there[key] = self.there[key][0] | 1, self.clock

    def discard(self, key: bytes) -> None:
        self.there.pop(key, None)
        self.gone.pop(key, None)


class CostAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.order: CostAware[int] = CostAware()
        judging(self.order)
        self.order.sample.mask = 0
        self.order.sample._next_fit = 20  # so that there is a table in the few steps of a test
        self.model = CostModel()

    @rule(key=KEYS)
    def insert(self, key: bytes) -> None:
        if key not in self.model.there:
            self.order.insert(key, key[0])
            self.model.insert(key)

    @rule(key=KEYS)
    def touch(self, key: bytes) -> None:
        if key in self.model.there:
            self.order.touch(key)
            self.model.touch(key)

    @rule(key=KEYS)
    def renew(self, key: bytes) -> None:
        """As far from going as one that was used just now; its class stays."""
        if key in self.model.there:
            self.order.renew(key)
            self.model.there[key] = self.model.there[key][0], self.model.clock

    @rule(key=KEYS)
    def discard(self, key: bytes) -> None:
        assert self.order.discard(key) == (key[0] if key in self.model.there else None)
        self.model.discard(key)

    @precondition(lambda self: self.model.there)
    @rule()
    def evict(self) -> None:
        there, sample = self.model.there, self.order.sample
        oldest = min((since, class_) for class_, since in there.values())  # of one age (`renew`) the first class has it
        heads = {class_: min(since for c, since in there.values() if c == class_) for class_, _ in there.values()}
        key, value = self.order.pop_victim()
        class_, since = there.pop(key)
        assert value == key[0]
        assert since == heads[class_], "the least recent of its class"
        if sample.table is None:
            assert (since, class_) == oldest
        else:
            worth = {class_: sample.table[class_][bucket_of(self.model.clock - at)] for class_, at in heads.items()}
            least = min(worth[class_] / (MARGIN if (at, class_) == oldest else 1) for class_, at in heads.items())
            assert worth[class_] / (MARGIN if (since, class_) == oldest else 1) == least
        self.model.gone[key] = class_

    @invariant()
    def agrees(self) -> None:
        assert set(self.order.entries) == set(self.model.there)
        assert sum(map(len, self.order._queues)) == len(self.model.there)
        assert self.order._classes == {key: class_ for key, (class_, _) in self.model.there.items()}


TestSlru = type("SlruAgainstModel", (AgainstModel,), {"order_of": Slru, "model_of": SlruModel}).TestCase
TestS3Fifo = type("S3FifoAgainstModel", (AgainstModel,), {"order_of": S3Fifo, "model_of": S3FifoModel}).TestCase
TestCost = CostAgainstModel.TestCase
for case in (TestSlru, TestS3Fifo, TestCost):
    case.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)


def chain(name: int, length: int) -> list[bytes]:
    return [bytes([name, position]) for position in range(length)]


@pytest.mark.parametrize("policy", ORDERS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_no_chunk_goes_before_one_that_follows_it(policy: str, data: st.DataObject) -> None:
    """Whatever is touched and in whatever order: prefixes lose their ends, never their beginnings."""
    order: EvictionOrder[int] = make_order(policy)
    chains = [chain(name, data.draw(st.integers(1, 6))) for name in range(4)]
    for keys in chains:
        parent = None
        for key in keys:
            order.insert(key, 0, parent)
            parent = key
    keys = [key for keys in chains for key in keys]
    for key in data.draw(st.lists(st.sampled_from(keys), max_size=30)):
        order.touch(key)
    while len(order):
        victim, _ = order.pop_victim()
        name, position = victim
        assert not any(key in order for key in chains[name][position + 1 :])


def test_a_shared_beginning_stays_for_the_branch_that_is_left() -> None:
    order = make_order("LRU")
    order.insert(b"root", 0)
    order.insert(b"left", 0, b"root")
    order.insert(b"right", 0, b"root")
    assert {order.pop_victim()[0], order.pop_victim()[0]} == {b"left", b"right"}
    assert order.pop_victim()[0] == b"root"


def test_what_follows_what_can_be_learnt_afterwards() -> None:
    order = make_order("LRU")
    for key in (b"0", b"1", b"2"):
        order.insert(key, 0)
    order.follow([b"0", b"1", b"missing", b"2"])
    assert [order.pop_victim()[0] for _ in range(3)] == [b"2", b"1", b"0"]


@pytest.mark.parametrize("how", ["singly", "as a prefix"])
@pytest.mark.parametrize("policy", ORDERS)
def test_of_a_prefix_that_does_not_fit_the_head_stays_also_where_its_middle_was_there_before(
    policy: str, how: str
) -> None:
    order: EvictionOrder[None] = make_order(policy)
    keys = chain(1, 8)
    for place in (1, 2, 3):
        order.insert(keys[place], None, keys[place - 1] if how == "as a prefix" else None)
    order.touch_prefix(keys)
    for place, key in enumerate(keys):
        if key not in order:
            if len(order) == 4:
                order.pop_victim()
            order.insert(key, None, keys[place - 1] if place else None)
        order.follow(keys[max(0, place - 1) : place + 2])
    assert keys[0] in order
    assert keys[1] in order


@pytest.mark.parametrize("policy", ORDERS)
def test_a_prefix_that_bites_its_tail_hangs_nobody(policy: str) -> None:
    order = make_order(policy)
    for key in (b"0", b"1"):
        order.insert(key, 0)
    order.follow([b"0", b"1"])
    order.follow([b"1", b"0"])
    assert {order.pop_victim()[0], order.pop_victim()[0]} == {b"0", b"1"}
    assert order.coldest() is None


def test_the_end_of_a_long_prefix_is_looked_for_once() -> None:
    """20,000 victims from one chain: quadratic would be two hundred million steps."""
    order = make_order("LRU")
    keys = [number.to_bytes(4, "big") for number in range(20_000)]
    parent = None
    for key in keys:
        order.insert(key, 0, parent)
        parent = key
    assert [order.pop_victim()[0] for _ in keys] == keys[::-1]


@pytest.mark.parametrize("policy", [policy for policy in ORDERS if policy not in ("FIFO", "MRU")])
def test_what_is_expected_soon_outlasts_its_equals(policy: str) -> None:
    order = judging(make_order(policy))
    for key in (b"0", b"1", b"2"):
        order.insert(key, 0)
    order.renew(b"0")
    assert order.pop_victim()[0] == b"1"


def test_cost_learns_that_newcomers_are_not_worth_keeping() -> None:
    """A stream of chunks that never come back, and a small set that does, always too late for LRU."""

    def hits(policy: str) -> int:
        order = make_order(policy)
        found = 0
        for step in range(30_000):
            key = b"kept%d" % (step // 3 % 80) if step % 3 == 0 else b"once%d" % step
            if key in order:
                found += 1
                order.touch(key)
            else:
                order.insert(key, 0)
                if len(order) > 200:
                    order.pop_victim()
        return found

    assert hits("LRU") == 0
    assert hits("COST") > 7_000


def test_what_is_known_of_ages_counts_those_that_may_still_come() -> None:
    """100 names, of which every tenth comes back after 50 uses: most of the others have not been lost, but are pending."""
    hits, pending = np.zeros((1, BUCKETS)), np.zeros((1, BUCKETS))
    hits[0, bucket_of(50)] = 10
    young = expected_uses(hits, pending)
    pending[0, bucket_of(60)] = 90
    (seen,) = expected_uses(hits, pending)
    assert seen[bucket_of(40)] < young[0][bucket_of(40)] / 5, "those that have not come count"
    assert seen[bucket_of(49)] > 2 * seen[0], "nearer to its use a chunk is worth more"
    assert seen[bucket_of(80)] == 0.0, "after it, nothing"


@pytest.mark.parametrize("policy", ["LRU", "COST"])
def test_single_chunks_that_turn_out_to_be_a_prefix_are_learnt_in_one_pass(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by a walk to the end of the prefix for each of them."""
    order: EvictionOrder[int] = make_order(policy)
    keys = [number.to_bytes(24, "big") for number in range(2000)]
    for key in keys:
        order.insert(key, 0)
    steps = []
    child = Family.child

    def counted(family: Family, key: bytes) -> bytes | None:
        steps.append(key)
        return child(family, key)

    monkeypatch.setattr(Family, "child", counted)
    order.touch_prefix(keys)
    assert len(steps) <= 2 * len(keys)
