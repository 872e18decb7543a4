"""The capped index of a directory against the simplest model that can be written."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiercache.core.index import CappedIndex, counts_in

KEYS = st.integers(0, 7).map(lambda number: bytes([number]) * 24)


class IndexAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = CappedIndex()
        self.uses: dict[bytes, int] = {}
        """When each was used last; what was found after a restart counts back from 0."""
        self.sizes: dict[bytes, int] = {}
        self.now = 0
        self.before_all = 0

    @rule(key=KEYS, size=st.integers(1, 5000))
    def add(self, key: bytes, size: int) -> None:
        self.now += 1
        self.index.add(key, size)
        self.uses[key] = self.now
        self.sizes[key] = size

    @rule(key=KEYS, size=st.integers(1, 5000))
    def find_after_restart(self, key: bytes, size: int) -> None:
        known = key in self.uses
        self.index.add(key, size, cold=True)
        self.sizes[key] = size
        if not known:
            self.before_all -= 1
            self.uses[key] = self.before_all

    @rule(key=KEYS)
    def touch(self, key: bytes) -> None:
        self.now += 1
        self.index.touch(key)
        if key in self.uses:
            self.uses[key] = self.now

    @rule(key=KEYS)
    def remove(self, key: bytes) -> None:
        assert self.index.remove(key) == self.sizes.pop(key, None)
        self.uses.pop(key, None)

    @precondition(lambda self: self.uses)
    @rule()
    def evict_one(self) -> None:
        victim = min(self.uses, key=self.uses.__getitem__)
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


TestIndex = IndexAgainstModel.TestCase
TestIndex.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_prefix_counts_up_to_the_first_gap() -> None:
    index = CappedIndex()
    for number in (0, 1, 3):
        index.add(bytes([number]), 1)
    assert index.prefix([bytes([number]) for number in range(4)]) == 2


NUMBERS = st.integers(0, 700)
SOME = st.lists(NUMBERS, max_size=700) | st.integers(0, 700).map(range)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def one_by_one(places: list[set[bytes]], keys: list[bytes]) -> list[int]:
    counts = [0] * len(places)
    for wanted in keys:
        for number, place in enumerate(places):
            if wanted in place:
                counts[number] += 1
                break
        else:
            break
    return counts


@given(
    places=st.lists(st.sets(NUMBERS) | st.integers(0, 700).map(lambda end: set(range(end))), max_size=3), numbers=SOME
)
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
