"""The index of a directory: what is evicted, what a prefix finds, and which directories have to be listed again."""

from collections import OrderedDict
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.index import CappedIndex, Freshness, LruMap, counts_in
from tiercache.core.keys import KEY_BYTES, tenant_of, tenant_tag

TENANTS = [b"", tenant_tag("a")]


def key(number: int, tenant: bytes = b"") -> bytes:
    return bytes([number % 7]) + number.to_bytes(KEY_BYTES - 1, "big") + tenant


@pytest.mark.parametrize(("keys", "quota_bytes"), [(12_000, 0), (12_000, 5000), (8, 0)])
def test_index_evicts_in_the_order_of_an_ordered_dict(keys: int, quota_bytes: int) -> None:
    """A large index, and what it knows of each of two tenants, is divided on the way."""
    chance = Random(1)
    index = CappedIndex(quota_bytes)
    everything = OrderedDict[bytes, int]()
    of_tenant = {tenant: OrderedDict[bytes, int]() for tenant in TENANTS}
    for _ in range(100_000 if keys > 8 else 5000):
        each = key(chance.randrange(keys), chance.choice(TENANTS))
        models = (everything, of_tenant[tenant_of(each)])
        step, size = chance.random(), 1 if keys > 8 else chance.randrange(1, 5)
        if step < 0.65:
            index.add(each, size)
            for model in models:
                model[each] = size
                model.move_to_end(each)
        elif step < 0.7:  # found after a restart
            index.add(each, size, cold=True)
            for model in models:
                is_new = each not in model
                model[each] = size
                if is_new:
                    model.move_to_end(each, last=False)
        elif step < 0.85:
            index.touch(each)
            for model in models:
                if each in model:
                    model.move_to_end(each)
        elif step < 0.9:
            known = [model.pop(each, None) for model in models]
            assert known == [index.remove(each)] * 2
        else:
            needed_bytes = 1 if keys > 8 else chance.randrange(1, 12)
            over = [own for own in of_tenant.values() if len(own) > quota_bytes > 0]  # a byte each
            victims = index.evict(1 if over else needed_bytes)
            if over:
                assert victims in [[next(iter(own.items()))] for own in over]
            for victim, size in victims:
                assert over or victim == next(iter(everything))
                assert everything.pop(victim) == of_tenant[tenant_of(victim)].pop(victim) == size
            freed_bytes = [size for _, size in victims]
            assert over or sum(freed_bytes) >= needed_bytes > sum(freed_bytes[:-1]) or not everything
        assert len(index) == len(everything) and (each in index) == (each in everything)
    assert index.used_bytes == sum(everything.values())
    if keys > 8:
        assert len(index) > 2 * 4096
    own_victims = index.evict_own(b"x" * KEY_BYTES, 4500)
    assert own_victims == (list(of_tenant[b""].items())[: len(own_victims)] if quota_bytes else [])


def test_clock_follows_the_time_that_it_is_told() -> None:
    known = LruMap()
    known.put(key(1), 5, time=1000)
    known.put(key(2), 5, time=1000)
    known.put(key(3), 5, time=900)
    times = [known.time(key(number)) for number in (1, 2, 3)]
    assert times == [1000, 1001, 1002] and known.time(key(4)) is None


NUMBERS = st.integers(0, 700)
SOME = st.lists(NUMBERS, max_size=700) | st.integers(0, 700).map(range)


def one_by_one(places: list[set[bytes]], keys: list[bytes]) -> list[int]:
    counts = [0] * len(places)
    for wanted in keys:
        found = next((number for number, place in enumerate(places) if wanted in place), None)
        if found is None:
            break
        counts[found] += 1
    return counts


@given(places=st.lists(st.sets(NUMBERS) | st.integers(0, 700).map(lambda end: set(range(end))), max_size=3), numbers=SOME)
def test_keys_count_where_they_are_found_first_up_to_the_first_that_is_nowhere(
    places: list[set[int]], numbers: list[int] | range
) -> None:
    those = [{key(number) for number in place} for place in places]
    keys = [key(number) for number in numbers]
    assert counts_in(those, keys) == one_by_one(those, keys)


def test_not_much_is_looked_for_behind_the_first_that_is_nowhere() -> None:
    class Place:
        asked = 0

        def __contains__(self, wanted: object) -> bool:
            self.asked += 1
            return wanted == key(0)

    place = Place()
    assert counts_in([place], [key(number) for number in range(100_000)]) == [1]
    assert place.asked <= 1 + 128, "one step of keys"


def times(**changed: int) -> list[int]:
    found = [0] * 256
    for name, time_ns in changed.items():
        found[int(name[1:])] = time_ns
    return found


def test_everything_is_listed_once_and_then_what_changes_appears_or_goes() -> None:
    freshness = Freshness(settle_s=1.0)
    assert freshness.stale(times(d3=100), now_s=10.0) == list(range(256))
    for directory in range(256):
        freshness.listed(directory, began_s=11.0)
    assert freshness.stale(times(d3=100), now_s=12.0) == []
    assert freshness.stale(times(d3=101), now_s=13.0) == [3]
    assert freshness.stale(times(d7=100), now_s=14.0) == [3, 7], "a listing that failed is due again"


def test_a_time_is_believed_when_it_has_stood_for_a_while() -> None:
    freshness = Freshness(settle_s=1.0)
    freshness.stale(times(d3=100), now_s=10.0)
    freshness.listed(3, began_s=10.5)
    assert 3 in freshness.stale(times(d3=100), now_s=10.6), "it may have changed within the same tick"
    freshness.listed(3, began_s=11.0)
    assert 3 not in freshness.stale(times(d3=100), now_s=11.1)
