"""An index of many chunks against one OrderedDict, and with quotas against one for each tenant."""

from collections import OrderedDict
from random import Random

import pytest

from tiercache.core.index import CappedIndex, LruMap
from tiercache.core.keys import KEY_BYTES, tenant_of, tenant_tag

TENANTS = [b"", tenant_tag("a")]


def key(number: int, tenant: bytes = b"") -> bytes:
    return bytes([number % 7]) + number.to_bytes(KEY_BYTES - 1, "big") + tenant


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
