"""How much of a prefix lies where."""

from hypothesis import given
from hypothesis import strategies as st

from tiercache.core import index
from tiercache.core.index import counts_in

NUMBERS = st.integers(0, 700)
KEYS = st.lists(NUMBERS, max_size=700) | st.integers(0, 700).map(range)


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
    places=st.lists(st.sets(NUMBERS) | st.integers(0, 700).map(lambda end: set(range(end))), max_size=3), numbers=KEYS
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
    assert place.asked <= index._STEP + 1
