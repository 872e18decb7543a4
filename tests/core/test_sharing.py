"""What an instance knows of a directory that others change too."""

from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.index import CappedIndex, Freshness


def key(directory: int, number: int = 0) -> bytes:
    return bytes([directory]) + number.to_bytes(23, "big")


def index_with(*keys: bytes) -> CappedIndex:
    index = CappedIndex()
    for each in keys:
        index.add(each, 10)
    return index


changes = st.lists(
    st.tuples(
        st.sampled_from(["add", "cold", "remove", "evict", "age", "touch"]), st.integers(0, 3), st.integers(0, 3)
    )
)


@given(changes)
def test_groups_are_the_index_whatever_happens(steps: list[tuple[str, int, int]]) -> None:
    index = CappedIndex()
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
