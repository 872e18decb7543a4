"""Several groups of layers: which hit all agree on, and what is loaded and saved for it. The rule is vLLM's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.integrations.vllm.planning import (
    BlockGeometry,
    GroupChunk,
    HeadParts,
    HitSearch,
    KvGroup,
    Match,
    all_names,
    blocks_behind,
    empty_part,
    fitted,
    held_names,
    in_parts,
    keys_of,
    loadable_tokens,
    names_of,
    part_blocks,
    plan_loads,
    plan_saves,
    window_chunks,
)

FULL = KvGroup(1, 16)
WINDOW = KvGroup(0, 16, window_tokens=40)
"""The next token sees itself and the 39 before it, which lie in three or four blocks of 16."""
TWO = BlockGeometry(16, 2, groups=(WINDOW, FULL))
NAMES = [bytes([number]) * 32 for number in range(64)]


def geometries() -> st.SearchStrategy[BlockGeometry]:
    """Blocks of 4 or 8 tokens, windows of any length, full attention in none, one or several groups."""
    windows = st.one_of(st.none(), st.integers(2, 60))
    group = st.tuples(st.sampled_from([4, 8]), windows)
    return st.builds(
        lambda groups, a_chunk: BlockGeometry(
            8, a_chunk, groups=tuple(KvGroup(n, size, window_tokens=window) for n, (size, window) in enumerate(groups))
        ),
        st.lists(group, min_size=1, max_size=4),
        st.integers(1, 3),
    )


def agreed(geometry: BlockGeometry, chunks: int, present: set[GroupChunk]) -> int:
    """The longest hit, by trying all, token by token."""
    size = geometry.chunk_tokens

    def holds(hit: int) -> bool:
        for position, group in enumerate(geometry.groups):
            skipped = 0 if group.window_tokens is None else max(0, hit * size - group.window_tokens + 1)
            kept = range(skipped // group.block_tokens * group.block_tokens, hit * size)
            if any((position, token // size) not in present for token in kept):
                return False
        return True

    return next(hit for hit in range(chunks, -1, -1) if holds(hit))


@given(st.data())
def test_the_search_finds_the_longest_hit_that_all_groups_agree_on(data: st.DataObject) -> None:
    geometry = data.draw(geometries())
    chunks = data.draw(st.integers(0, 12))
    possible = [(group, chunk) for group in range(len(geometry.groups)) for chunk in range(chunks)]
    present = set(possible) - set(data.draw(st.lists(st.sampled_from(possible)) if possible else st.just([])))
    search, questions = HitSearch(chunks, geometry), 0
    while search.question:
        questions += 1
        found = next((n for n, one in enumerate(search.question) if one not in present), len(search.question))
        search.answer(found)
    assert search.chunks == agreed(geometry, chunks, present)
    assert questions <= chunks + 2


@settings(deadline=None)  # the import takes long
@given(window=st.integers(1, 100), extra=st.integers(0, 3), size=st.sampled_from([1, 4, 16]), computed=st.integers(0, 400))
def test_what_a_window_keeps_is_what_vllm_keeps(window: int, extra: int, size: int, computed: int) -> None:
    from vllm.v1.core import single_type_kv_cache_manager as vllm
    manager: Any = SimpleNamespace(sliding_window=window, extra_retained_tokens=extra)
    skipped = vllm.SlidingWindowManager.get_num_skipped_tokens(manager, computed)
    assert KvGroup(0, size, window_tokens=window + extra).first_block(computed) == skipped // size
    assert KvGroup(0, size).first_block(computed) == 0


def parts_of(position: int, geometry: BlockGeometry) -> list[tuple[bytes, range]]:
    """Name and blocks of what is saved, of the first chunks of a request whose blocks are all there."""
    group = geometry.groups[position]
    tables = [range(1, 1000)] * len(geometry.groups)
    transfers, _ = plan_saves(NAMES, 0, 8 * geometry.blocks_per_chunk, tables, geometry, last=True)
    own = [one for one in transfers if one.group == position]
    assert len(own) == 8 and all(one.chunk_blocks <= part_blocks(group, geometry) for one in own)
    return [(one.name, range(one.blocks[0] - 1, one.blocks[-1])) for one in own]


def test_of_a_window_only_the_end_is_asked_for() -> None:
    assert window_chunks(6, TWO) == [(0, 5), (0, 4)]
    search = HitSearch(6, TWO)
    assert search.question == [(1, chunk) for chunk in range(6)]
    search.answer(6)
    assert search.question == [(0, 5), (0, 4)]
    search.answer(1)
    assert search.chunks == 4 and search.question == [(0, 3), (0, 2)]
    search.answer(2)
    assert search.chunks == 4 and search.question == []


@given(st.data())
def test_a_load_fills_what_vllm_keeps_and_nothing_else(data: st.DataObject) -> None:
    geometry = data.draw(geometries())
    hit = data.draw(st.integers(1, 8)) * geometry.chunk_tokens
    computed = data.draw(st.integers(0, hit // geometry.block_tokens - 1)) * geometry.block_tokens
    tables, numbers = [], iter(range(1, 10_000))
    for group in geometry.groups:
        kept = range(group.first_block(hit), hit // group.block_tokens + 1)
        tables.append([next(numbers) if block in kept else 0 for block in range(kept.stop)])
    transfers = plan_loads(NAMES, hit // geometry.block_tokens, computed, hit, tables, geometry)
    for position, group in enumerate(geometry.groups):
        fresh = tables[position][computed // group.block_tokens : hit // group.block_tokens]
        own = [one for one in transfers if one.group == position]
        assert [block for one in own for block in one.blocks] == [block for block in fresh if block]
        for one in own:
            (stored,) = (part for name, part in parts_of(position, geometry) if name == one.name)
            start = stored.start + one.skip
            assert list(one.blocks) == tables[position][start : start + len(one.blocks)]
            assert one.skip + len(one.blocks) <= one.chunk_blocks == len(stored)


@given(geometries(), st.integers(1, 8))
def test_what_is_saved_of_a_chunk_is_all_that_any_hit_needs_of_it(geometry: BlockGeometry, chunks: int) -> None:
    """So a request whose windows have left nothing of it behind stores it also where the window is shorter."""
    for position, group in enumerate(geometry.groups):
        step = geometry.chunk_tokens // group.block_tokens
        for chunk, (_, part) in enumerate(parts_of(position, geometry)[:chunks]):
            ends = [end * geometry.chunk_tokens for end in range(chunk + 1, chunks + 1)]
            needed = {block for end in ends for block in range(group.first_block(end), end // group.block_tokens)}
            assert set(part) == needed & set(range(chunk * step, (chunk + 1) * step))


@pytest.mark.parametrize("table", [[0, 0, 7, 0, 9, 10], [0, 0, 7, 8, 9]])
def test_null_or_missing_blocks_are_never_loaded_into(table: list[int]) -> None:
    with pytest.raises(ValueError, match=r"group 0: expected blocks \d \.\. \d to load into, found"):
        plan_loads(NAMES, 6, 0, 96, (table, [*range(20, 26)]), TWO)


def test_every_group_is_saved_but_what_its_window_has_left() -> None:
    window, full = [0, 0, 0, 13, 14, 15, 16], [20, 21, 22, 23, 24, 25, 26]
    transfers, saved = plan_saves(NAMES, 0, 7, (window, full), TWO, last=True)
    assert saved == 6
    assert [(one.group, one.blocks) for one in transfers] == [
        (0, (14, 15)),
        (1, (20, 21)),
        (1, (22, 23)),
        (1, (24, 25)),
    ]
    assert plan_saves(NAMES, saved, 7, (window, full), TWO, last=True) == ([], 6)


def shaped(chunk_tokens: int, windows: list[int | None]) -> BlockGeometry:
    groups = tuple(KvGroup(index, 16, window_tokens=window) for index, window in enumerate(windows))
    return BlockGeometry.for_chunk_size(chunk_tokens, 16, False, groups)


@pytest.mark.parametrize(
    ("chunk_tokens", "windows", "tokens", "empty"),
    [
        (256, [128, None], 128, 0.0),  # gpt-oss
        (512, [128, None], 128, 0.0),
        (1024, [128, None], 256, 0.25),  # no further than to a quarter
        (256, [512] * 5 + [None], 256, 0.0),  # Gemma 3 with 270 million parameters
        (1024, [512] * 5 + [None], 512, 0.0),
        (256, [512, 128], 128, 0.0),
        (256, [128, 128], 256, 0.0),  # as small as the other, and a slot is no larger
        (16, [2, None], 16, 0.0),
    ],
)
def test_chunks_are_halved_until_windows_fill_their_slots(
    chunk_tokens: int, windows: list[int | None], tokens: int, empty: float
) -> None:
    found = fitted(shaped(chunk_tokens, windows))
    assert found.chunk_tokens == tokens
    assert empty_part(found, [1] * len(windows)) == pytest.approx(empty)


@given(geometries())
def test_a_chunk_that_is_cut_leaves_no_more_of_a_slot_empty(geometry: BlockGeometry) -> None:
    sizes, cut = [1] * len(geometry.groups), fitted(geometry)
    assert empty_part(cut, sizes) <= max(0.1, empty_part(geometry, sizes))
    assert cut.chunk_tokens >= geometry.chunk_tokens // 4 and cut.groups == geometry.groups


@pytest.mark.parametrize("groups", [(FULL,), (WINDOW, FULL)], ids=["full", "windows"])
def test_ranks_of_any_number_have_the_same_keys_for_the_same_heads(groups: tuple[KvGroup, ...]) -> None:
    def keys(ranks: int) -> list[bytes]:
        found: dict[tuple[int, int], bytes] = {}
        here = 4 // ranks
        for rank in range(ranks):
            geometry = in_parts(TWO, groups, HeadParts(4, here, rank * here))
            chunks = [(position, 1) for position in range(len(geometry.groups))]
            names = names_of(chunks, NAMES, geometry)
            assert names == names_of(chunks, NAMES, in_parts(TWO, groups, HeadParts(4, here))), "the scheduler's differ"
            for (position, group), key in zip(
                enumerate(geometry.groups), keys_of(b"n" * 24, names, geometry), strict=True
            ):
                found[position // here, rank * here + group.part] = key
        assert len(set(found.values())) == 4 * len(groups)
        return [found[one] for one in sorted(found)]

    assert keys(1) == keys(2) == keys(4)


def test_a_state_is_saved_where_the_engine_says_that_it_is_and_nowhere_else() -> None:
    """What stands in its block table may be the state in the middle of a block."""
    state = KvGroup(0, 16, window_tokens=2, recurrent=True)
    geometry = BlockGeometry.for_chunk_size(64, 16, True, (state, FULL))
    assert geometry.blocks_per_chunk == 1 and not geometry.save_tails
    tables = ([9, 9, 9, 9], [20, 21, 22, 23])
    transfers, saved = plan_saves(NAMES, 1, 4, tables, geometry, last=False, states=[(0, 7, 48), (0, 8, 72), (1, 5, 64)])
    assert saved == 4
    assert [(one.group, one.blocks) for one in transfers] == [(0, (7,)), (1, (21,)), (1, (22,)), (1, (23,))]
    assert transfers[0].name == names_of([(0, 2)], NAMES, geometry)[0]
    loads = plan_loads(NAMES, 3, 0, 48, ([0, 0, 7], [20, 21, 22]), geometry)
    assert [(one.group, one.blocks) for one in loads] == [(0, (7,)), (1, (20,)), (1, (21,)), (1, (22,))]
    assert window_chunks(3, geometry) == [(0, 2)], "a hit needs one state"


def test_blocks_that_are_given_away_hold_nothing_that_is_computed() -> None:
    assert blocks_behind(([0, 0, 3, 4], [5, 6, 7, 8]), 48, TWO) == {4, 8}
    assert blocks_behind(([9], [10]), 0, TWO) == {9, 10}
    assert blocks_behind(([0, 4], [8, 9], [1]), 16, TWO) == {4, 9, 1}, "a group that is not cached has blocks, too"
    assert blocks_behind((), 0, TWO) == set()


def test_chunks_of_groups_have_names_of_their_own_and_a_single_group_has_the_chunks() -> None:
    one, other = (names_of([(group, 0)], NAMES, TWO)[0] for group in range(2))
    assert one != other and one.startswith(NAMES[1]) and other.startswith(NAMES[1])
    alone = BlockGeometry(16, 2, groups=(WINDOW,))
    assert names_of([(0, 0)], NAMES, alone) == [NAMES[1]]


def test_names_that_hold_a_prefix_are_the_whole_of_it_and_the_end_of_the_windows() -> None:
    plain = BlockGeometry(16, 2)
    assert held_names(NAMES, 5, plain) == [NAMES[1], NAMES[3]]
    held = [(0, 3), (0, 2), *((1, chunk) for chunk in range(4))]
    assert set(held_names(NAMES, 8, TWO)) == {names_of([one], NAMES, TWO)[0] for one in held}
    assert len(all_names(NAMES[:9], TWO)) == 8
    assert all_names(NAMES[:3], BlockGeometry(16, 2, save_tails=True)) == NAMES[:3]


def test_a_hit_of_groups_is_loaded_as_it_was_found_or_not_at_all() -> None:
    match = Match(6)
    assert loadable_tokens(match, 97, 0, 0, TWO) == 96
    assert loadable_tokens(match, 96, 0, 0, TWO) == 0
    assert loadable_tokens(match, 200, 48, 0, TWO) == 48


def test_a_shortened_match_counts_the_first_tiers_first() -> None:
    match = Match(6, {"cpu": 32, "disk": 64})
    assert match.shortened(4, TWO) == Match(4, {"cpu": 32, "disk": 32})
    assert match.shortened(0, TWO) == Match(0, {"cpu": 0, "disk": 0})
