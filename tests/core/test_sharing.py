"""What an instance knows of a directory that others change too."""

from tiercache.core.index import Freshness


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
