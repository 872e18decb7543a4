"""Whatever the policy: a prefix that was just stored or read is whole for the next request, in every state of the cache."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tiercache.core.eviction import ORDERS, EvictionOrder, make_order
from tiercache.replay.formats import Trace

EXCERPTS = Path(__file__).parents[1] / "replay" / "excerpts"


class Cache:
    """An order with so many places. `wants` is what a scheduler does with a request."""

    def __init__(self, policy: str, places: int) -> None:
        self.order: EvictionOrder[int] = make_order(policy)
        self.places = places

    def wants(self, keys: Sequence[bytes], *, linked: bool = True) -> int:
        """Use what is there of a prefix, and put the rest. Returns how many chunks it may have, which is fewer than there
        are places where its first is known to follow others: these count as one prefix with it."""
        if linked:
            self.order.touch_prefix(keys)
        else:
            for key in keys:
                if key in self.order:
                    self.order.touch(key)
        room = self.places - self.before(keys[0])
        for place, key in enumerate(keys):
            if key not in self.order:
                self.put(key, keys[place - 1] if linked and place else None)
                if linked:
                    self.order.follow(keys[max(0, place - 1) : place + 2])
        return room

    def put(self, key: bytes, parent: bytes | None) -> None:
        while len(self.order) >= self.places:
            self.order.pop_victim()
        self.order.insert(key, 0, parent)

    def whole(self, keys: Sequence[bytes]) -> int:
        for place, key in enumerate(keys):
            if key not in self.order:
                return place
        return len(keys)

    def before(self, key: bytes) -> int:
        parents, count = self.order._family.parents, 0
        while (key := parents.get(key)) is not None:
            count += 1
        return count


def prefix(name: int, length: int) -> list[bytes]:
    """Prefixes of names that are equal modulo 3 have their first four chunks in common."""
    shared = [b"shared %d %d" % (name % 3, place) for place in range(min(4, length))]
    return shared + [b"own %d %d" % (name, place) for place in range(4, length)]


def fresh(length: int) -> list[bytes]:
    return [b"new %d" % place for place in range(length)]


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.integers(1, 30),
        st.sampled_from(["linked", "single", "renewed", "forgotten", "backwards", "shuffled"]),
    ),
    max_size=25,
)


CONTRADICTED = [(0, 5, "linked"), (3, 4, "shuffled"), (1, 7, "linked")]
"""Of a prefix that was named in another order, parts are left. Seen (FIFO): its head went for what filled the gap."""


def play(cache: Cache, requests: Sequence[tuple[int, int, str]]) -> None:
    order = cache.order
    for name, length, how in requests:
        keys = prefix(name, length)
        if how == "renewed":
            for key in reversed(keys):
                if key in order:
                    order.renew(key)
        elif how == "forgotten":
            for key in keys[length // 2 :]:
                order.discard(key)
        else:
            if how == "backwards":
                keys.reverse()
            elif how == "shuffled":
                random.Random(name).shuffle(keys)
            cache.wants(keys, linked=how != "single")
            order.follow(keys)


@pytest.mark.parametrize("policy", ORDERS)
@pytest.mark.parametrize("linked", [True, False], ids=["linked", "one by one"])
@given(requests=REQUESTS, places=st.integers(5, 60), share=st.floats(0.05, 0.8))
@settings(max_examples=40, deadline=None)
def test_what_was_just_stored_is_whole(
    policy: str, linked: bool, requests: list[tuple[int, int, str]], places: int, share: float
) -> None:
    cache = Cache(policy, places)
    play(cache, requests)
    keys = fresh(max(1, int(share * places)))
    cache.wants(keys, linked=linked)
    assert cache.whole(keys) == len(keys)


@pytest.mark.parametrize("policy", ORDERS)
@given(requests=REQUESTS, places=st.integers(10, 60), length=st.integers(1, 40))
@example(requests=CONTRADICTED, places=10, length=6)
@example(requests=CONTRADICTED, places=10, length=4)
@settings(max_examples=40, deadline=None)
def test_what_was_read_and_continued_is_whole(
    policy: str, requests: list[tuple[int, int, str]], places: int, length: int
) -> None:
    """The prefix that was found stays for what is stored behind it, however old its first chunks are."""
    cache = Cache(policy, places)
    play(cache, requests)
    for name in range(13):
        keys = prefix(name, min(length, int(0.8 * places)))
        room = cache.wants(keys)
        assert cache.whole(keys) == len(keys) if len(keys) <= room else cache.whole(keys) >= room - 1
        if 1 < len(keys) < room:
            # It is put once more behind a prefix that nobody read here: the engine had that itself.
            more = b"more %d" % name
            cache.put(more, keys[-1])
            assert cache.whole([*keys, more]) == len(keys) + 1


@pytest.mark.parametrize("policy", ORDERS)
@given(requests=REQUESTS, places=st.integers(5, 60), over=st.integers(0, 80))
@settings(max_examples=40, deadline=None)
def test_of_a_prefix_that_is_too_long_the_head_stays(
    policy: str, requests: list[tuple[int, int, str]], places: int, over: int
) -> None:
    cache = Cache(policy, places)
    play(cache, requests)
    keys = fresh(places + over)
    for _ in range(3):
        cache.wants(keys)
        assert cache.whole(keys) >= places - 1


@pytest.mark.parametrize("policy", ORDERS)
def test_prefixes_that_are_stored_side_by_side_do_not_push_each_other_out(policy: str) -> None:
    cache = Cache(policy, 100)
    play(cache, [(number % 7, 30, "linked") for number in range(50)])
    prefixes = [[b"%d %d" % (name, place) for place in range(15)] for name in range(5)]
    for place in range(15):
        for keys in prefixes:
            cache.put(keys[place], keys[place - 1] if place else None)
    assert [cache.whole(keys) for keys in prefixes] == [15] * 5


@pytest.mark.parametrize("policy", ORDERS)
@pytest.mark.parametrize("name", ["mooncake_conversation", "agentic_coding"])
def test_in_every_state_that_a_trace_brings_about(policy: str, name: str) -> None:
    trace = [request.keys for request in Trace(EXCERPTS / f"{name}.jsonl", limit=60)]
    cache = Cache(policy, 400)
    for number, keys in enumerate(trace):
        cache.wants(keys)
        assert cache.whole(keys) == len(keys) if len(keys) <= 320 else cache.whole(keys) >= 320
        if number % 10 == 0:
            document = [b"%d %d" % (number, place) for place in range(80 + 24 * (number // 10 % 10))]
            cache.wants(document, linked=number % 20 == 0)
            assert cache.whole(document) == len(document)


@pytest.mark.parametrize("policy", ORDERS)
def test_what_is_used_when_no_prefix_is_left_is_more_recent_than_what_was_used_beside_it(policy: str) -> None:
    cache = Cache(policy, 5)
    cache.wants([b"head", b"tail"])
    singles = [b"single %d" % number for number in range(6)]
    for key in singles[:3]:
        cache.wants([key], linked=False)
    cache.order.discard(b"tail")
    for key in singles[3:]:
        cache.wants([key], linked=False)
    assert [key in cache.order for key in singles[2:]] == [True] * 4
    cache.order.touch(singles[2])
    for last in (b"last but one", b"last"):
        cache.put(last, None)
    assert singles[2] in cache.order


@pytest.mark.parametrize("policy", ["LRU", "COST"])
def test_where_all_was_just_used_the_oldest_of_it_goes_first(policy: str) -> None:
    order: EvictionOrder[int] = make_order(policy)
    read = [b"read %d" % place for place in range(16)]
    for place, key in enumerate(read):
        order.insert(key, 0, read[place - 1] if place else None)
    for number in range(16):
        order.insert(b"single %d" % number, 0)
    order.touch(read[-1])
    assert [order.pop_victim()[0] for _ in range(16)] == [b"single %d" % number for number in range(16)]
    assert order.pop_victim()[0] == read[-1]


@pytest.mark.parametrize("policy", ORDERS)
def test_what_is_no_longer_recent_is_judged_again(policy: str) -> None:
    """Nothing is spared for good: after many others it can go, and all of it can be evicted."""
    cache = Cache(policy, 50)
    for name in range(200):
        cache.wants([b"%d %d" % (name, place) for place in range(1 + name % 9)])
    order = cache.order
    assert len(order) == 50
    assert sum(len(group) for group in order._spared.groups.values()) >= len(order._spared.standings)
    assert len({order.pop_victim()[0] for _ in range(50)}) == 50
    assert not order._spared.standings and not order._spared.groups and not order._recent.ends and not order._strays
    assert order._recent.chunks == 0
