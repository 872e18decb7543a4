"""Leaf LRU: which resident of the hot cache is evicted."""

import random
from collections.abc import Sequence
from unittest import TestCase

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiercache.core.eviction import MEAN_LRU, POLICIES, LeafLru, Resident
from tiercache.core.keys import tenant_of, tenant_tag

TENANTS = (b"", tenant_tag("a"), tenant_tag("b"))


def key(number: int, tenant: bytes = b"") -> bytes:
    return number.to_bytes(24, "big") + tenant


def keys_of(numbers: Sequence[int]) -> list[bytes]:
    return [key(number) for number in numbers]


def put(order: LeafLru, numbers: Sequence[int], slots: int | None = None) -> list[int]:
    """Put a prefix as the hot cache does. Return what was evicted where there are only so many slots."""
    keys, evicted = keys_of(numbers), []
    time = order.access(keys)
    for position, one in enumerate(keys):
        if one in order.entries:
            continue
        if slots is not None and len(order.entries) >= slots:
            victim = order.pop_victim()
            assert victim is not None
            evicted.append(number_of(victim))
        parent = keys[position - 1] if position else None
        order.insert(Resident(one), parent, time - position, in_order=True)
    order.link(keys)
    return evicted


def number_of(entry: Resident | None) -> int | None:
    return None if entry is None else int.from_bytes(entry.key[:24], "big")


def queued(order: LeafLru) -> int:
    """Return the number of items in the queue of all leaves, stale items included: its memory."""
    return sum(len(bucket.heap) for bucket in order._queue.buckets.values())


def all_victims(order: LeafLru) -> list[int | None]:
    return [number_of(order.pop_victim()) for _ in range(len(order.entries))]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("LRU", [2, 3, 1]), ("FIFO", [1, 2, 3]), ("LFU", [3, 2, 1]), ("MRU", [1, 3, 2])],
)
def test_the_rank_decides_among_leaves(policy: str, expected: list[int]) -> None:
    order = LeafLru(policy)
    for number in (1, 2, 3):
        put(order, [number])
    for number in (1, 1, 2, 2, 3, 1):
        order.access([key(number)])
    assert all_victims(order) == expected


@pytest.mark.parametrize("policy", MEAN_LRU)
def test_policies_that_are_not_built_mean_lru(policy: str) -> None:
    assert policy in POLICIES
    assert LeafLru(policy.lower()).policy == "LRU"


def test_of_one_access_the_tail_is_colder_than_the_head() -> None:
    order = LeafLru()
    for number in range(4):
        order.insert(Resident(key(number)))
    order.access(keys_of([2, 0, 3, 1]))
    assert all_victims(order) == [1, 3, 0, 2]


def test_a_prefix_that_is_larger_than_the_cache_keeps_its_head() -> None:
    order = LeafLru()
    put(order, range(100, 110), slots=10)
    evicted = put(order, range(30), slots=10)
    assert evicted[:10] == list(range(109, 99, -1)), "first what was used before"
    assert sorted(int.from_bytes(one[:24], "big") for one in order.entries)[:9] == list(range(9))
    assert evicted[10:] == list(range(9, 29)), "then the prefix's own end"


def test_a_chunk_whose_head_came_back_makes_no_room_for_the_next_one() -> None:
    """Its head was evicted before it came, and was then put alone: the put of the whole prefix evicted it."""
    order = LeafLru()
    put(order, [1])
    order.insert(Resident(key(9)), key(8), in_order=True)
    put(order, [8])
    assert put(order, [8, 9, 10], slots=3) == [1]


def test_an_access_while_leased_counts() -> None:
    order = LeafLru()
    put(order, [1])
    put(order, [2])
    entry = order.entries[key(1)]
    entry.leases = 1
    order.leased(entry)
    order.access(keys_of([1]))
    entry.leases = 0
    order.released(entry)
    assert all_victims(order) == [2, 1]


def test_links_in_contradicting_orders_never_close_a_circle() -> None:
    order = LeafLru()
    chance = random.Random(1)
    for number in range(40):
        order.insert(Resident(key(number)))
    for _ in range(300):
        order.link(keys_of([chance.randrange(40) for _ in range(chance.randrange(2, 12))]))
    assert sorted(all_victims(order)) == list(range(40))


def test_a_renewed_leaf_outlives_its_equals_and_counts_no_access() -> None:
    order = LeafLru()
    put(order, [1])
    put(order, [2])
    order.renew(keys_of([1]))
    assert all_victims(order) == [2, 1]
    often = LeafLru("LFU")
    put(often, [1])
    put(often, [2])
    often.access(keys_of([2]))
    for _ in range(5):
        often.renew(keys_of([1]))
    assert all_victims(often) == [1, 2]


def test_a_forest_that_was_accessed_as_a_whole_is_evicted_in_that_order() -> None:
    """Leaves move to other buckets, and those of the oldest ones come from parents of which no child is left."""
    order = LeafLru()
    prefixes = [range(number, number + 4) for number in range(0, 8000, 4)]
    for prefix in prefixes:
        put(order, prefix)
    again = prefixes[::-1]
    for prefix in again:
        order.access(keys_of(prefix))
    assert all_victims(order) == [number for prefix in again for number in reversed(prefix)]
    assert queued(order) == 0


class AgainstModel(RuleBasedStateMachine):
    """Random histories: the victim is the unleased resident of lowest rank that no unleased resident continues."""

    policy = "LRU"
    by_tenant = False
    KEYS = st.integers(0, 11)

    def __init__(self) -> None:
        super().__init__()
        self.order: LeafLru = LeafLru(self.policy, by_tenant=self.by_tenant)
        self.parents: dict[bytes, bytes | None] = {}
        self.chain: dict[bytes, bytes] = {}
        """The only parent that a key ever has, as with chained keys."""

    def key(self, number: int) -> bytes:
        return key(number, TENANTS[number % 3] if self.by_tenant else b"")

    def expected(self, tenant: bytes | None = None) -> bytes | None:
        entries = self.order.entries
        blocked = {parent for one, parent in self.parents.items() if not entries[one].leases}
        leaves = [one for one in entries if not entries[one].leases and one not in blocked]
        leaves = [one for one in leaves if tenant is None or tenant_of(one) == tenant]
        return min(leaves, key=lambda one: (entries[one].rank, one), default=None)

    @rule(number=KEYS, leased=st.booleans(), in_order=st.booleans(), before=KEYS)
    def insert(self, number: int, leased: bool, in_order: bool, before: int) -> None:
        one = self.key(number)
        if one in self.order.entries:
            return
        parent = self.chain.setdefault(one, self.key(min(before, number - 1))) if number else None
        entry = Resident(one)
        entry.leases = int(leased)
        self.order.insert(entry, parent, in_order=in_order)
        self.parents[one] = parent if parent in self.order.entries else None

    @rule(numbers=st.lists(KEYS, max_size=6))
    def access(self, numbers: list[int]) -> None:
        self.order.access([self.key(number) for number in numbers])

    @rule(numbers=st.lists(KEYS, max_size=6), others=st.integers(0, 3000))
    def access_behind_many_others(self, numbers: list[int], others: int) -> None:
        """So the residents have ranks far from one another."""
        self.order.access([*([key(99)] * others), *(self.key(number) for number in numbers)])

    @rule(number=KEYS)
    def renew(self, number: int) -> None:
        self.order.renew([self.key(number)])

    @rule(number=KEYS)
    def link_to_its_parent(self, number: int) -> None:
        one = self.key(number)
        parent = self.chain.get(one)
        if one in self.order.entries and parent in self.order.entries:
            self.order.link([parent, one])
            self.parents[one] = parent

    @rule(number=KEYS)
    def discard(self, number: int) -> None:
        one = self.key(number)
        known = one in self.order.entries
        assert (self.order.discard(one) is not None) == known
        self.left(one)

    @rule(number=KEYS)
    def lease_or_release(self, number: int) -> None:
        entry = self.order.entries.get(self.key(number))
        if entry is not None:
            entry.leases = 1 - entry.leases
            (self.order.leased if entry.leases else self.order.released)(entry)

    @precondition(lambda self: self.parents)
    @rule(tenant=st.sampled_from([None, *TENANTS]))
    def evict(self, tenant: bytes | None) -> None:
        if not self.by_tenant:
            tenant = None
        expected = self.expected(tenant)
        victim = self.order.pop_victim(tenant)
        assert (None if victim is None else victim.key) == expected
        if victim is not None:
            self.left(victim.key)

    def left(self, one: bytes) -> None:
        self.parents.pop(one, None)
        for child, parent in self.parents.items():
            if parent == one:
                self.parents[child] = None

    @invariant()
    def the_victim_is_the_coldest_leaf(self) -> None:
        victim = self.order.victim()
        assert (None if victim is None else victim.key) == self.expected()

    @invariant()
    def counts_add_up(self) -> None:
        entries = self.order.entries
        assert set(entries) == set(self.parents)
        assert self.order.evictable == sum(not entry.leases for entry in entries.values())
        for one, parent in self.parents.items():
            found = entries[one].parent
            assert (None if found is None else found.key) == parent
        assert queued(self.order) <= 2 * len(entries)


def histories(name: str, tenants: bool = False) -> type[TestCase]:
    case = type(f"LeafLruWith{name}{tenants}", (AgainstModel,), {"policy": name, "by_tenant": tenants}).TestCase
    case.settings = settings(max_examples=50, stateful_step_count=50, deadline=None, phases=[Phase.generate])
    return case


TestLru, TestFifo, TestLfu, TestMru = map(histories, ("LRU", "FIFO", "LFU", "MRU"))
TestTenants = histories("LRU", tenants=True)
