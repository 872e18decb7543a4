"""What routers are told: the fewest events that keep a router's picture of the tiers right."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.integrations.vllm.events import AnnouncedBlocks, Change, ChunkBlocks, Removed, Stored

BLOCK_TOKENS = 4


def block(*path: int) -> bytes:
    """The hash of the block at the end of a path of contents: it stands for all before it."""
    return bytes([len(path), *path]).ljust(32, b".")


def chunk(path: tuple[int, ...], blocks: int) -> ChunkBlocks:
    """The last `blocks` blocks of a path."""
    first = len(path) - blocks
    hashes = tuple(block(*path[:end]) for end in range(first + 1, len(path) + 1))
    tokens = array("I", [content for content in path[first:] for _ in range(BLOCK_TOKENS)])
    return ChunkBlocks(hashes, block(*path[:first]) if first else None, tokens, BLOCK_TOKENS)


def change(path: tuple[int, ...], tier: str, there: bool, rank: int = 0, part: int = 0, parts: int = 1) -> Change:
    return Change(block(*path), tier, there, rank, part, parts)


FIRST, SECOND = (1, 2), (1, 2, 3, 4)


def knowing(*paths: tuple[int, ...], most: int = 100) -> AnnouncedBlocks:
    announced = AnnouncedBlocks(most)
    for path in paths:
        announced.know(block(*path), chunk(path, 2))
    return announced


def test_a_chunk_is_stored_in_a_medium_and_removed_from_it_block_by_block() -> None:
    announced = knowing(FIRST, SECOND)
    assert announced.take() == []
    announced.changed([change(SECOND, "cpu", True)])
    assert announced.take() == [Stored("CPU", chunk(SECOND, 2), 0)]
    announced.changed([change(SECOND, "disk", True), change(SECOND, "cpu", False)])
    assert announced.take() == [
        Stored("STORAGE", chunk(SECOND, 2), 0),
        Removed("CPU", 0, [block(1, 2, 3), block(1, 2, 3, 4)]),
    ]
    assert announced.take() == []


def test_removals_of_one_medium_are_told_together() -> None:
    announced = knowing(FIRST, SECOND)
    announced.changed([change(path, "cpu", True) for path in (FIRST, SECOND)])
    announced.take()
    announced.changed([change(path, "cpu", False) for path in (SECOND, FIRST)])
    (removed,) = announced.take()
    assert isinstance(removed, Removed)
    assert removed.hashes == [block(1, 2, 3), block(1, 2, 3, 4), block(1), block(1, 2)]


def test_two_tiers_of_a_medium_are_one_to_a_router() -> None:
    announced = knowing(FIRST)
    announced.changed([change(FIRST, "disk", True), change(FIRST, "gds", True)])
    assert announced.take() == [Stored("STORAGE", chunk(FIRST, 2), 0)]
    announced.changed([change(FIRST, "disk", False)])
    assert announced.take() == []
    announced.changed([change(FIRST, "gds", False)])
    assert announced.take() == [Removed("STORAGE", 0, [block(1), block(1, 2)])]


def test_every_rank_has_to_have_its_part() -> None:
    announced = knowing(FIRST)
    announced.changed([change(FIRST, "cpu", True, rank=1, part=1, parts=2)])
    assert announced.take() == []
    announced.changed([change(FIRST, "cpu", True, rank=0, part=0, parts=2)])
    assert [type(event) for event in announced.take()] == [Stored]
    announced.changed([change(FIRST, "cpu", False, rank=1, part=1, parts=2)])
    assert [type(event) for event in announced.take()] == [Removed]
    announced.changed([change(FIRST, "cpu", False, rank=0, part=0, parts=2)])
    assert announced.take() == []


def test_of_ranks_with_the_same_part_one_is_enough() -> None:
    announced = knowing(FIRST)
    announced.changed([change(FIRST, "disk", True, rank=0), change(FIRST, "disk", True, rank=1)])
    assert [type(event) for event in announced.take()] == [Stored]
    announced.changed([change(FIRST, "disk", False, rank=0)])
    assert announced.take() == []
    announced.changed([change(FIRST, "disk", False, rank=1)])
    assert [type(event) for event in announced.take()] == [Removed]


def test_a_tail_and_the_chunk_that_it_became_hold_the_same_block_once() -> None:
    announced = AnnouncedBlocks()
    announced.know(block(1), chunk((1,), 1))
    announced.know(block(*FIRST), chunk(FIRST, 2))
    announced.changed([change((1,), "cpu", True), change(FIRST, "cpu", True)])
    assert announced.take() == [Stored("CPU", chunk((1,), 1), 0), Stored("CPU", chunk(FIRST, 2), 1)]
    announced.changed([change((1,), "cpu", False)])
    assert announced.take() == []
    announced.changed([change(FIRST, "cpu", False)])
    assert announced.take() == [Removed("CPU", 0, [block(1), block(*FIRST)])]


def test_a_chunk_that_nobody_has_described_is_not_told() -> None:
    announced = knowing(FIRST)
    announced.changed([change(SECOND, "cpu", True)])
    assert announced.take() == []


def test_workers_watch_what_is_known_and_no_more() -> None:
    announced = knowing(FIRST, SECOND, most=2)
    assert announced.take_watching() == {block(*FIRST): True, block(*SECOND): True}
    announced.know(block(*FIRST), chunk(FIRST, 2))
    assert announced.take_watching() == {}
    announced.know(block(9, 9), chunk((9, 9), 2))
    assert announced.take_watching() == {block(9, 9): True, block(*SECOND): False}


def test_what_falls_over_the_bound_is_told_as_removed() -> None:
    announced = knowing(FIRST, SECOND, most=2)
    announced.changed([change(FIRST, "disk", True), change(SECOND, "disk", True)])
    announced.take()
    announced.know(block(9, 9), chunk((9, 9), 2))
    assert announced.take() == [Removed("STORAGE", 0, [block(1), block(1, 2)])]
    assert len(announced) == 2


def test_what_is_nowhere_falls_over_the_bound_first() -> None:
    announced = knowing(FIRST, SECOND, most=2)
    announced.changed([change(FIRST, "disk", True), change(SECOND, "disk", True), change(SECOND, "disk", False)])
    announced.take()
    announced.know(block(9, 9), chunk((9, 9), 2))
    assert announced.take() == []
    assert announced.knows(block(*FIRST)) and not announced.knows(block(*SECOND))


def test_after_a_reset_nothing_is_announced() -> None:
    announced = knowing(FIRST, SECOND)
    announced.changed([change(FIRST, "disk", True), change(SECOND, "cpu", True)])
    announced.take()
    announced.forget_everything()
    removed = announced.take()
    assert [(event.medium, type(event)) for event in removed] == [("STORAGE", Removed), ("CPU", Removed)]
    assert not any(announced.take_watching().values())
    announced.changed([change(FIRST, "cpu", True)])
    assert announced.take() == []


PATHS = [(1,), (1, 2), (1, 3), (1, 2, 3), (1, 2, 3, 4), (2, 1)]
LENGTHS = {path: 1 + (len(path) + 1) % 2 for path in PATHS}
STEPS = st.lists(st.tuples(st.sampled_from(PATHS), st.sampled_from(["cpu", "disk", "gds"]), st.booleans(), st.booleans()))


@settings(deadline=None, max_examples=300)
@given(STEPS, st.integers(1, 6))
def test_a_router_that_follows_the_events_knows_what_is_known_to_be_there(
    steps: list[tuple[tuple[int, ...], str, bool, bool]], most: int
) -> None:
    """Each block is stored once before it is removed once, also for a router that counts; and the picture is exact."""
    announced = AnnouncedBlocks(most)
    router: dict[str, set[bytes]] = {"CPU": set(), "STORAGE": set()}
    there: dict[tuple[int, ...], set[str]] = {}
    for path, tier, is_there, known in steps:
        if known and not announced.knows(block(*path)):
            announced.know(block(*path), chunk(path, LENGTHS[path]))
            there[path] = set()
        announced.changed([change(path, tier, is_there)])
        for one in list(there):
            if block(*one) not in announced._chunks:
                del there[one]
        if path in there:
            (there[path].add if is_there else there[path].discard)("CPU" if tier == "cpu" else tier)
        for event in announced.take():
            if isinstance(event, Stored):
                hashes = set(event.chunk.hashes[event.first :])
                assert hashes and not hashes & router[event.medium]
                router[event.medium] |= hashes
            else:
                assert set(event.hashes) <= router[event.medium] and len(set(event.hashes)) == len(event.hashes)
                router[event.medium] -= set(event.hashes)
        for medium, tiers in (("CPU", {"CPU"}), ("STORAGE", {"disk", "gds"})):
            expected = {value for one in there if there[one] & tiers for value in chunk(one, LENGTHS[one]).hashes}
            assert router[medium] == expected
    assert len(announced) <= most
