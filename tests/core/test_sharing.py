"""What an instance knows of a directory that others change too."""

from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.index import Freshness, SharedIndex


def key(directory: int, number: int = 0) -> bytes:
    return bytes([directory]) + number.to_bytes(23, "big")


def index_with(*keys: bytes) -> SharedIndex:
    index = SharedIndex()
    for each in keys:
        index.add(each, 10)
    return index


def test_a_listing_tells_what_is_new_and_what_is_gone() -> None:
    index = index_with(key(1, 1), key(1, 2), key(2, 1))
    before = index.group(1)
    listed = {key(1, 2), key(1, 3)}
    assert index.unknown(listed) == [key(1, 3)]
    assert index.drop(before, listed) == [key(1, 1)]
    assert key(1, 1) not in index and key(2, 1) in index
    assert index.used_bytes == 20


def test_what_was_added_while_the_listing_ran_stays() -> None:
    index = index_with(key(1, 1))
    before = index.group(1)
    index.add(key(1, 9), 10)
    assert index.drop(before, {key(1, 1)}) == []
    assert key(1, 9) in index


def test_what_left_while_the_listing_ran_is_not_gone_twice() -> None:
    index = index_with(key(1, 1), key(1, 2))
    before = index.group(1)
    index.remove(key(1, 1))
    assert index.drop(before, set()) == [key(1, 2)]
    assert index.used_bytes == 0


changes = st.lists(
    st.tuples(
        st.sampled_from(["add", "cold", "remove", "evict", "age", "touch"]), st.integers(0, 3), st.integers(0, 3)
    )
)


@given(changes)
def test_groups_are_the_index_whatever_happens(steps: list[tuple[str, int, int]]) -> None:
    index = SharedIndex()
    for step, directory, number in steps:
        each = key(directory, number)
        if step in ("add", "cold"):
            index.add(each, 10 + number, cold=step == "cold")
        elif step == "remove":
            index.remove(each)
        elif step == "evict":
            index.evict(15 * number)
        elif step == "age":
            index.age([each])
        else:
            index.touch(each)
    for directory in range(256):
        assert index.group(directory) == {each for each in index.keys if each[0] == directory}


def times(**changed: int) -> list[int]:
    found = [0] * 256
    for name, time_ns in changed.items():
        found[int(name[1:])] = time_ns
    return found


def test_everything_is_listed_once_and_then_what_changes() -> None:
    freshness = Freshness(settle_s=1.0)
    assert freshness.stale(times(d3=100), now_s=10.0) == list(range(256))
    for directory in range(256):
        freshness.listed(directory, began_s=11.0)
    assert freshness.stale(times(d3=100), now_s=12.0) == []
    assert freshness.stale(times(d3=101), now_s=13.0) == [3]


def test_a_time_is_believed_when_it_has_stood_for_a_while() -> None:
    freshness = Freshness(settle_s=1.0)
    freshness.stale(times(d3=100), now_s=10.0)
    freshness.listed(3, began_s=10.5)
    assert 3 in freshness.stale(times(d3=100), now_s=10.6), "it may have changed within the same tick"
    freshness.listed(3, began_s=11.0)
    assert 3 not in freshness.stale(times(d3=100), now_s=11.1)


def test_a_directory_that_appears_or_goes_has_changed() -> None:
    freshness = Freshness(settle_s=0.0)
    freshness.stale(times(d3=100), now_s=1.0)
    for directory in range(256):
        freshness.listed(directory, began_s=1.0)
    assert freshness.stale(times(d7=100), now_s=2.0) == [3, 7]


def test_a_listing_that_failed_is_due_again() -> None:
    freshness = Freshness(settle_s=0.0)
    freshness.stale(times(d3=100), now_s=1.0)
    assert 3 in freshness.stale(times(d3=100), now_s=2.0)
