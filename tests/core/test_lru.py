"""The divided LRU map against one OrderedDict, and an index with quotas against one for each tenant."""

from collections import OrderedDict
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiercache.core.index import CappedIndex, LruMap
from tiercache.core.keys import KEY_BYTES, tenant_of, tenant_tag

TENANTS = [b"", tenant_tag("a")]


def key(number: int, tenant: bytes = b"") -> bytes:
    return bytes([number % 7]) + number.to_bytes(KEY_BYTES - 1, "big") + tenant


KEYS = st.integers(0, 40).map(key)


class MapAgainstOrderedDict(RuleBasedStateMachine):
    """Maps that are divided at once, on the way, and never."""

    @initialize(undivided=st.sampled_from([0, 8, 4096]))
    def begin(self, undivided: int) -> None:
        self.map = LruMap(undivided)
        self.model: OrderedDict[bytes, int] = OrderedDict()

    @rule(key=KEYS, size=st.integers(0, 1 << 43), cold=st.booleans())
    def put(self, key: bytes, size: int, cold: bool) -> None:
        known = self.model.get(key)
        assert self.map.put(key, size, cold=cold) == known
        self.model[key] = size
        if cold == (known is None):
            self.model.move_to_end(key, last=not cold)

    @rule(key=KEYS)
    def touch(self, key: bytes) -> None:
        assert self.map.touch(key) is (key in self.model)
        if key in self.model:
            self.model.move_to_end(key)

    @rule(key=KEYS)
    def age(self, key: bytes) -> None:
        assert self.map.age(key) is (key in self.model)
        if key in self.model:
            self.model.move_to_end(key, last=False)

    @rule(key=KEYS)
    def pop(self, key: bytes) -> None:
        assert self.map.pop(key) == self.model.pop(key, None)

    @precondition(lambda self: self.model)
    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        for _ in range(min(count, len(self.model))):
            coldest = self.map.coldest()
            assert coldest == next(iter(self.model))
            assert self.map.pop(coldest) == self.model.pop(coldest)

    @invariant()
    def agrees(self) -> None:
        assert len(self.map) == len(self.model)
        assert {each: self.map.get(each) for each in self.map} == self.model
        assert all(each in self.map for each in self.model) and key(99) not in self.map
        assert self.map.coldest() == next(iter(self.model), None)
        for byte in range(7):
            assert sorted(self.map.part(byte)) == sorted(each for each in self.model if each[0] == byte)


TestMap = MapAgainstOrderedDict.TestCase
TestMap.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("quota_entries", [0, 5000])
def test_large_index_evicts_in_the_order_of_an_ordered_dict(quota_entries: int) -> None:
    """The index, and what it knows of each of two tenants, is divided on the way."""
    chance = Random(1)
    index = CappedIndex(quota_entries)
    model = OrderedDict[bytes, None]()
    of_tenant = {tenant: OrderedDict[bytes, None]() for tenant in TENANTS}
    for _ in range(100_000):
        each = key(chance.randrange(12_000), chance.choice(TENANTS))
        models = (model, of_tenant[tenant_of(each)])
        step = chance.random()
        if step < 0.7:
            index.add(each, 1)
            for one in models:
                one[each] = None
                one.move_to_end(each)
        elif step < 0.85:
            index.touch(each)
            for one in models:
                if each in one:
                    one.move_to_end(each)
        elif step < 0.9:
            index.remove(each)
            for one in models:
                one.pop(each, None)
        else:
            over = [own for own in of_tenant.values() if len(own) > quota_entries > 0]
            victims = index.evict(1)
            coldest = [next(iter(own), None) for own in over or [model]]
            assert [victim for victim, _ in victims] in [[victim] for victim in coldest]
            for one in (model, of_tenant[tenant_of(victims[0][0])]):
                del one[victims[0][0]]
    assert index.used_bytes == len(index) == len(model) > 2 * 4096
    assert [each for each, _ in index.evict_own(b"x" * KEY_BYTES, 4500)] == (
        list(of_tenant[b""])[:4500] if quota_entries else []
    )


def test_clock_follows_the_time_that_it_is_told() -> None:
    known = LruMap()
    known.put(key(1), 5, time=1000)
    known.put(key(2), 5, time=1000)
    known.put(key(3), 5, time=900)
    times = [known.time(key(number)) for number in (1, 2, 3)]
    assert times == [1000, 1001, 1002] and known.time(key(4)) is None
