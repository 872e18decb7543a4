"""Callers may name chunks in whatever order: an order of eviction stays in step, and what was said last counts."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.core.eviction import ORDERS, EvictionOrder, make_order

KEYS = st.integers(0, 9).map(lambda number: bytes([number]))
NAMED = st.one_of(st.lists(KEYS, min_size=1, max_size=10, unique=True), st.lists(KEYS, min_size=1, max_size=8))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), KEYS, st.none() | KEYS),
        st.tuples(st.sampled_from(["insert_cold", "touch", "renew", "age", "discard", "readmit"]), KEYS),
        st.tuples(st.sampled_from(["touch_prefix", "follow", "put"]), NAMED),
        st.tuples(st.sampled_from(["pop_victim", "park", "coldest"])),
    ),
    max_size=40,
)


class Played:
    """An order, and beside it who has to be in it."""

    def __init__(self, policy: str) -> None:
        self.order: EvictionOrder[int] = make_order(policy)
        self.resident: set[bytes] = set()
        self.parked: dict[bytes, bytes | None] = {}

    def step(self, how: str, named: bytes | Sequence[bytes] = b"", parent: bytes | None = None) -> None:
        order = self.order
        if isinstance(named, list):
            if how == "put":
                self.put(named)
            else:
                getattr(order, how)(named)
        elif how in ("pop_victim", "park"):
            if self.resident:
                key = self.pop()
                if how == "park":
                    self.parked[key] = order.victims_parent
        elif how == "coldest":
            assert (order.coldest() in self.resident) == bool(self.resident)
        elif how == "discard":
            assert (order.discard(named) is not None) == (named in self.resident)
            self.resident.discard(named)
        elif how == "readmit":
            if named in self.parked:
                order.readmit(named, 0, self.parked.pop(named))
                self.resident.add(named)
        elif how in ("touch", "renew", "age"):
            if named in self.resident:
                getattr(order, how)(named)
        elif named not in self.resident and named not in self.parked:
            order.insert(named, 0, parent) if how == "insert" else order.insert_cold(named, 0)
            self.resident.add(named)

    def put(self, keys: Sequence[bytes]) -> None:
        """As a put of a prefix does it, in a cache of six chunks."""
        self.order.touch_prefix(keys)
        for place, key in enumerate(keys):
            if key not in self.resident and key not in self.parked:
                while len(self.resident) >= 6:
                    self.pop()
                self.step("insert", key, keys[place - 1] if place else None)
            self.order.follow(keys[max(0, place - 1) : place + 2])

    def pop(self) -> bytes:
        order = self.order
        before = None if order._strays else set(order._family.children)
        key, _ = order.pop_victim()
        self.resident.remove(key)
        assert before is None or key not in before, "it went before one that follows it"
        assert order.entries.keys() == self.resident
        return key

    def pop_all(self) -> list[bytes]:
        gone = [self.pop() for _ in range(len(self.resident))]
        order = self.order
        assert order.coldest() is None
        assert not order._spared.standings and not order._spared.groups and not order._recent.ends and not order._strays
        assert not order._family.parents and not order._family.children and not order._recent.chunks
        return gone


@pytest.mark.parametrize("policy", ORDERS)
@given(steps=STEPS)
@settings(max_examples=150, deadline=None)
def test_every_resident_is_evicted_once_whatever_was_said_of_it(policy: str, steps: list[tuple[str]]) -> None:
    played = Played(policy)
    for step in steps:
        played.step(*step)
        assert played.order.entries.keys() == played.resident
    played.pop_all()


@pytest.mark.parametrize("policy", ORDERS)
@given(steps=STEPS)
@settings(max_examples=100, deadline=None)
def test_who_is_aged_stands_where_he_would_had_he_left_and_been_found_again(
    policy: str, steps: list[tuple[str]]
) -> None:
    aged, found_again = Played(policy), Played(policy)
    for how, *named in steps:
        aged.step(how, *named)
        if how != "age":
            found_again.step(how, *named)
        elif named[0] in found_again.resident:
            found_again.step("discard", *named)
            found_again.step("insert_cold", *named)
    assert aged.pop_all() == found_again.pop_all()


@pytest.mark.parametrize("policy", ORDERS)
@given(steps=STEPS, keys=st.lists(KEYS, unique=True), parents=st.dictionaries(KEYS, KEYS, max_size=2))
@settings(max_examples=100, deadline=None)
def test_who_comes_with_others_stands_where_he_would_had_they_come_one_by_one(
    policy: str, steps: list[tuple[str]], keys: list[bytes], parents: dict[bytes, bytes]
) -> None:
    together, one_by_one = Played(policy), Played(policy)
    for step in steps:
        together.step(*step)
        one_by_one.step(*step)
    new = dict.fromkeys((key for key in keys if key not in together.resident | together.parked.keys()), 0)
    together.order.insert_all(new, parents)
    together.resident |= new.keys()
    for key in new:
        one_by_one.step("insert", key, parents.get(key))
    assert together.pop_all() == one_by_one.pop_all()


@pytest.mark.parametrize("policy", ORDERS)
@given(steps=STEPS, data=st.data())
@settings(max_examples=100, deadline=None)
def test_the_prefix_that_was_used_last_goes_from_its_tail(
    policy: str, steps: list[tuple[str]], data: st.DataObject
) -> None:
    played = Played(policy)
    for step in steps:
        played.step(*step)
    if played.resident:
        keys = data.draw(st.lists(st.sampled_from(sorted(played.resident)), min_size=1, unique=True))
        played.order.touch_prefix(keys)
        assert [key for key in played.pop_all() if key in keys] == keys[::-1]


def filled(policy: str, keys: Sequence[bytes]) -> EvictionOrder[int]:
    order: EvictionOrder[int] = make_order(policy)
    for key in keys:
        order.insert(key, 0)
    return order


def all_victims(order: EvictionOrder[int]) -> list[bytes]:
    return [order.pop_victim()[0] for _ in range(len(order))]


@pytest.mark.parametrize("how", ["touch_prefix", "follow"])
@pytest.mark.parametrize("policy", ORDERS)
def test_of_two_orders_the_last_counts(policy: str, how: str) -> None:
    order = filled(policy, [b"a", b"b", b"c", b"d"])
    getattr(order, how)([b"a", b"b", b"c", b"d"])
    getattr(order, how)([b"c", b"a", b"d", b"b"])
    assert all_victims(order) == [b"b", b"d", b"a", b"c"]


@pytest.mark.parametrize("how", ["touch_prefix", "follow"])
@pytest.mark.parametrize("policy", ORDERS)
def test_what_stands_between_and_is_not_named_stays_behind_the_one_that_it_follows(policy: str, how: str) -> None:
    order = filled(policy, [b"a", b"b", b"c"])
    order.follow([b"a", b"b", b"c"])
    getattr(order, how)([b"c", b"a"])
    assert all_victims(order) == [b"b", b"a", b"c"]


@pytest.mark.parametrize("how", ["touch_prefix", "follow"])
@pytest.mark.parametrize("policy", ORDERS)
def test_a_key_that_is_named_twice_stands_where_it_was_named_first(policy: str, how: str) -> None:
    order = filled(policy, [b"a", b"b", b"c"])
    getattr(order, how)([b"a", b"b", b"a", b"b", b"c", b"a", b"a"])
    assert all_victims(order) == [b"c", b"b", b"a"]


@pytest.mark.parametrize("policy", [policy for policy in ORDERS if policy not in ("LFU", "MRU")])
def test_what_was_known_of_the_way_to_a_victim_is_not_believed_when_it_changes(policy: str) -> None:
    """The end of a prefix is looked for once, not for each victim. Here what comes before that goes elsewhere meanwhile."""
    order = filled(policy, [b"new", *(b"single %d" % number for number in range(8))])
    for key in (b"d", b"c", b"b", b"a"):
        order.insert_cold(key, 0)
    order.follow([b"a", b"b", b"c", b"d"])
    assert order.pop_victim()[0] == b"d"
    order.follow([b"new", b"b"])
    assert order.pop_victim()[0] == b"a"
    rest = all_victims(order)
    assert rest.index(b"c") < rest.index(b"b") < rest.index(b"new")


@pytest.mark.parametrize("policy", ORDERS)
def test_what_was_spared_for_a_prefix_is_judged_again_also_when_what_continued_that_was_forgotten(policy: str) -> None:
    """Two ends, one behind the other, each with chunks that are spared for its sake. Seen: StopIteration (FIFO)."""
    order = filled(policy, [b"single %d" % number for number in range(10)])
    for key in (b"middle", b"head"):
        order.insert_cold(key, 0)
    order.touch_prefix([b"head", b"middle"])
    order.coldest()
    order.insert_cold(b"tail", 0)
    order.touch_prefix([b"middle", b"tail"])
    order.coldest()
    order.discard(b"tail")
    order.touch_prefix([b"absent"])
    residents = set(order.entries)
    assert set(all_victims(order)) == residents


@pytest.mark.parametrize("policy", ORDERS)
def test_what_was_useless_is_not_when_its_prefix_was_used_from_the_beginning(policy: str) -> None:
    """`continued` came behind a prefix that had lost its end. Somebody names it first, and uses what follows it."""
    order: EvictionOrder[int] = make_order(policy)
    order.insert(b"0", 0)
    order.insert(b"1", 0, b"0")
    assert order.pop_victim()[0] == b"1"
    order.insert(b"continued", 0, b"1")
    order.touch_prefix([b"continued", b"0"])
    assert all_victims(order) == [b"0", b"continued"]


def test_cost_notes_uses_of_what_was_found_after_a_restart_before_anything_came() -> None:
    order = make_order("COST")
    for number in range(64):
        order.insert_cold(bytes([number]), 0)
    for number in range(64):
        order.touch(bytes([number]))
    assert len(all_victims(order)) == 64
