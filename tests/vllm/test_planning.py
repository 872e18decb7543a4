"""Which chunks are looked up, loaded and saved, of one group of layers and of several. No engine, no cache.

Which hit several groups agree on, and what they keep of it, is vLLM's own rule.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.config import Config
from tiercache.control.served import ServedCache
from tiercache.core.keys import ChunkKey
from tiercache.integrations.vllm.lookup import locate
from tiercache.integrations.vllm.planning import (
    BlockGeometry,
    BlockTransfer,
    GroupChunk,
    HeadParts,
    KvGroup,
    Match,
    Sibling,
    agreed,
    all_names,
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
from tiercache.scheduler.reads import Hit

PAIRS = BlockGeometry(block_tokens=128, blocks_per_chunk=2)
FOURS = BlockGeometry(block_tokens=16, blocks_per_chunk=4, save_tails=True)
FULL = KvGroup(1, 16)
WINDOW = KvGroup(0, 16, window_tokens=40)
"""The next token sees itself and the 39 before it, which lie in three or four blocks of 16."""
TWO = BlockGeometry(16, 2, groups=(WINDOW, FULL))
NAMES = [bytes([number]) * 32 for number in range(64)]
BLOCKS = list(range(100, 120))
TABLES = (BLOCKS,)


# One group of layers


def test_a_request_holds_its_full_chunks_and_its_tail_where_tails_are_stored() -> None:
    assert held_names(NAMES, 7, PAIRS) == [NAMES[1], NAMES[3], NAMES[5]]
    assert held_names(NAMES, 7, FOURS) == [NAMES[3], NAMES[6]]
    assert held_names(NAMES, 8, FOURS) == [NAMES[3], NAMES[7]]
    assert all_names(NAMES[:3], FOURS) == NAMES[:3]


def test_what_is_loaded_is_neither_the_last_token_nor_what_the_engine_has_nor_a_short_hit() -> None:
    assert loadable_tokens(Match(4), 512, 0, 0, PAIRS) == 384
    assert loadable_tokens(Match(4), 513, 0, 0, PAIRS) == 512
    assert loadable_tokens(Match(4), 600, 256, 0, PAIRS) == 256
    assert loadable_tokens(Match(2), 600, 384, 0, PAIRS) == 0
    assert loadable_tokens(Match(4), 600, 0, 512, PAIRS) == 512
    assert loadable_tokens(Match(4), 600, 0, 513, PAIRS) == 0
    # With windows a hit is loaded as it was found or not at all.
    assert [loadable_tokens(Match(6), tokens, 0, 0, TWO) for tokens in (97, 96)] == [96, 0]
    assert loadable_tokens(Match(6), 200, 48, 0, TWO) == 48


def test_a_shortened_match_counts_the_first_tiers_first() -> None:
    match = Match(6, {"cpu": 32, "disk": 64})
    assert match.shortened(4, TWO) == Match(4, {"cpu": 32, "disk": 32})
    assert match.shortened(0, TWO) == Match(0, {"cpu": 0, "disk": 0})


def test_workers_agree_on_a_tail_or_a_sibling_only_if_all_have_the_same() -> None:
    one, other = Sibling(NAMES[7], 4), Sibling(NAMES[8], 4)
    match = Match(6, {"cpu": 96}, held=True, sibling=one)
    whole = Match(4, {"cpu": 64}, held=True)
    assert agreed([match, replace(match)], FOURS) == match
    for unlike in (replace(match, sibling=other), replace(match, sibling=None), replace(match, blocks=7)):
        assert agreed([match, unlike], FOURS) == agreed([unlike, match], FOURS) == whole
    assert not agreed([match, replace(match, held=False)], FOURS).held


def test_a_load_begins_inside_a_chunk_or_ends_there_and_a_tail_has_its_own_name() -> None:
    first, second = BlockTransfer(NAMES[1], 2, 0, (100, 101)), BlockTransfer(NAMES[3], 2, 0, (102, 103))
    assert plan_loads(NAMES, 4, 0, 512, TABLES, PAIRS) == [first, second]
    assert plan_loads(NAMES, 4, 128, 512, TABLES, PAIRS)[0] == BlockTransfer(NAMES[1], 2, 1, (101,))
    assert plan_loads(NAMES, 4, 0, 384, TABLES, PAIRS)[-1] == BlockTransfer(NAMES[3], 2, 0, (102,))
    assert plan_loads(NAMES, 7, 0, 7 * 16, TABLES, FOURS)[-1] == BlockTransfer(NAMES[6], 3, 0, (104, 105, 106))


def test_every_load_covers_exactly_what_was_asked() -> None:
    for geometry in (PAIRS, FOURS):
        # Without tails a match ends with a full chunk.
        for matched in range(1, 12) if geometry.save_tails else range(2, 12, 2):
            for first in range(matched):
                for end in range(first + 1, matched + 1):
                    size = geometry.block_tokens
                    plan = plan_loads(NAMES, matched, first * size, end * size, TABLES, geometry)
                    assert [block for part in plan for block in part.blocks] == BLOCKS[first:end]
                    assert all(part.skip + len(part.blocks) <= part.chunk_blocks for part in plan)


def test_a_chunk_is_saved_once_with_its_last_block_as_soon_as_that_is_in_the_table() -> None:
    first, second = BlockTransfer(NAMES[1], 2, 0, (100, 101)), BlockTransfer(NAMES[3], 2, 0, (102, 103))
    assert plan_saves(NAMES, 0, 3, TABLES, PAIRS, last=False) == ([first], 2)
    assert plan_saves(NAMES, 0, 4, (BLOCKS[:3],), PAIRS, last=False) == ([first], 2)
    assert plan_saves(NAMES, 2, 3, TABLES, PAIRS, last=True) == ([], 2)
    assert plan_saves(NAMES, 2, 4, TABLES, PAIRS, last=False) == ([second], 4)


def test_a_tail_is_saved_at_the_end_only_and_then_its_whole_chunk() -> None:
    tail, whole = BlockTransfer(NAMES[5], 2, 0, (104, 105)), BlockTransfer(NAMES[7], 4, 0, (104, 105, 106, 107))
    assert plan_saves(NAMES, 4, 6, TABLES, FOURS, last=False) == ([], 4)
    assert plan_saves(NAMES, 4, 6, TABLES, FOURS, last=True) == ([tail], 6)
    assert plan_saves(NAMES, 6, 8, TABLES, FOURS, last=False) == ([whole], 8)


# Several groups of layers


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


def longest_hit(geometry: BlockGeometry, chunks: int, present: set[GroupChunk]) -> int:
    """That all groups agree on, by trying all, token by token."""
    size = geometry.chunk_tokens

    def holds(hit: int) -> bool:
        for position, group in enumerate(geometry.groups):
            skipped = 0 if group.window_tokens is None else max(0, hit * size - group.window_tokens + 1)
            kept = range(skipped // group.block_tokens * group.block_tokens, hit * size)
            if any((position, token // size) not in present for token in kept):
                return False
        return True

    return next(hit for hit in range(chunks, -1, -1) if holds(hit))


class Holding:
    """A cache that has these chunks, and counts the questions."""

    config, namespace = Config(), b"n" * 8

    def __init__(self, keys: set[ChunkKey]) -> None:
        self.keys, self.questions = keys, 0

    async def lookup_keys(self, keys: Sequence[ChunkKey], *, deadline_s: float, counts: bool) -> Hit:
        self.questions += 1
        return Hit(next((n for n, key in enumerate(keys) if key not in self.keys), len(keys)), 0, {})


@given(st.data())
def test_a_lookup_finds_the_longest_hit_that_all_groups_agree_on(data: st.DataObject) -> None:
    geometry = data.draw(geometries())
    chunks = data.draw(st.integers(0, 12))
    possible = [(group, chunk) for group in range(len(geometry.groups)) for chunk in range(chunks)]
    present = set(possible) - set(data.draw(st.lists(st.sampled_from(possible)) if possible else st.just([])))
    names = NAMES[: chunks * geometry.blocks_per_chunk]
    cache = Holding(set(keys_of(Holding.namespace, names_of(sorted(present), names, geometry), geometry)))
    match, found = asyncio.run(locate(cast(ServedCache, cache), names, geometry))
    assert match.blocks == longest_hit(geometry, chunks, present) * geometry.blocks_per_chunk
    assert found == keys_of(Holding.namespace, held_names(names, match.blocks, geometry), geometry)
    assert cache.questions <= chunks + 2


@settings(deadline=None)  # the import takes long
@given(st.integers(1, 100), st.integers(0, 3), st.sampled_from([1, 4, 16]), st.integers(0, 400))
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


ONE = BlockGeometry(16, 2)


@pytest.mark.parametrize(
    ("geometry", "tables"),
    [(TWO, ([0, 0, 7, 0, 9, 10], BLOCKS[:6])), (TWO, ([0, 0, 7, 8, 9], BLOCKS[:6])), (ONE, (BLOCKS[:5],))],
)
def test_null_and_missing_blocks_are_never_loaded_into(geometry: BlockGeometry, tables: tuple[list[int], ...]) -> None:
    with pytest.raises(ValueError, match=r"group 0: expected blocks \d \.\. \d to load into, found"):
        plan_loads(NAMES, 6, 0, 96, tables, geometry)


def test_a_part_of_a_block_is_never_loaded_into() -> None:
    with pytest.raises(ValueError, match=r"expected whole blocks of 16 tokens to load, found tokens 8 \.\. 96"):
        plan_loads(NAMES, 6, 8, 96, TABLES, ONE)


@given(geometries(), st.integers(1, 8))
def test_what_is_saved_of_a_chunk_is_all_that_any_hit_needs_of_it(geometry: BlockGeometry, chunks: int) -> None:
    """So a request whose windows have left nothing of it behind stores it also where the window is shorter."""
    for position, group in enumerate(geometry.groups):
        step = geometry.chunk_tokens // group.block_tokens
        for chunk, (_, part) in enumerate(parts_of(position, geometry)[:chunks]):
            ends = [end * geometry.chunk_tokens for end in range(chunk + 1, chunks + 1)]
            needed = {block for end in ends for block in range(group.first_block(end), end // group.block_tokens)}
            assert set(part) == needed & set(range(chunk * step, (chunk + 1) * step))


def test_every_group_is_saved_but_what_its_window_has_left() -> None:
    window, full = [0, 0, 0, 13, 14, 15, 16], [20, 21, 22, 23, 24, 25, 26]
    transfers, saved = plan_saves(NAMES, 0, 7, (window, full), TWO, last=True)
    assert saved == 6
    blocks = [(0, (14, 15)), (1, (20, 21)), (1, (22, 23)), (1, (24, 25))]
    assert [(one.group, one.blocks) for one in transfers] == blocks
    assert plan_saves(NAMES, saved, 7, (window, full), TWO, last=True) == ([], 6)


def test_a_state_is_saved_where_the_engine_says_that_it_is_and_nowhere_else() -> None:
    """What stands in its block table may be the state in the middle of a block."""
    state = KvGroup(0, 16, window_tokens=2, recurrent=True)
    geometry = BlockGeometry.for_chunk_size(64, 16, True, (state, FULL))
    assert geometry.blocks_per_chunk == 1 and not geometry.save_tails
    tables, states = ([9, 9, 9, 9], [20, 21, 22, 23]), [(0, 7, 48), (0, 8, 72), (1, 5, 64)]
    transfers, saved = plan_saves(NAMES, 1, 4, tables, geometry, last=False, states=states)
    assert saved == 4
    assert [(one.group, one.blocks) for one in transfers] == [(0, (7,)), (1, (21,)), (1, (22,)), (1, (23,))]
    assert transfers[0].name == names_of([(0, 2)], NAMES, geometry)[0]
    loads = plan_loads(NAMES, 3, 0, 48, ([0, 0, 7], [20, 21, 22]), geometry)
    assert [(one.group, one.blocks) for one in loads] == [(0, (7,)), (1, (20,)), (1, (21,)), (1, (22,))]
    assert window_chunks(3, geometry) == [(0, 2)], "a hit needs one state"


# Sizes and names of chunks


@pytest.mark.parametrize(
    ("chunk", "block", "windows", "tokens"),
    [
        (256, 16, [None], 256),
        (256, 128, [None], 256),
        (100, 128, [None], 128),
        (320, 128, [None], 256),
        (256, 16, [128, None], 128),  # gpt-oss
        (1024, 16, [128, None], 256),  # no further than to a quarter
        (256, 16, [512] * 5 + [None], 256),  # Gemma 3 with 270 million parameters
        (1024, 16, [512] * 5 + [None], 512),
        (256, 16, [512, 128], 128),
        (16, 16, [2, None], 16),
    ],
)
def test_a_chunk_is_whole_blocks_in_a_window(chunk: int, block: int, windows: list[int | None], tokens: int) -> None:
    """It is halved until the shortest window holds one."""
    groups = tuple(KvGroup(index, block, window_tokens=window) for index, window in enumerate(windows))
    assert BlockGeometry.for_chunk_size(chunk, block, False, groups).chunk_tokens == tokens


def test_chunks_of_groups_have_names_of_their_own_and_a_single_group_has_the_chunks() -> None:
    one, other = (names_of([(group, 0)], NAMES, TWO)[0] for group in range(2))
    assert one != other and one.startswith(NAMES[1]) and other.startswith(NAMES[1])
    alone = BlockGeometry(16, 2, groups=(WINDOW,))
    assert names_of([(0, 0)], NAMES, alone) == [NAMES[1]]
    held = [(0, 3), (0, 2), *((1, chunk) for chunk in range(4))]
    assert set(held_names(NAMES, 8, TWO)) == set(names_of(held, NAMES, TWO)), "all, and the end of the window"
    assert len(all_names(NAMES[:9], TWO)) == 8


@pytest.mark.parametrize("groups", [(FULL,), (WINDOW, FULL)], ids=["full", "windows"])
def test_ranks_of_any_number_have_the_same_keys_for_the_same_heads(groups: tuple[KvGroup, ...]) -> None:
    def keys(ranks: int) -> list[bytes]:
        found: dict[tuple[int, int], bytes] = {}
        here = 4 // ranks
        for rank in range(ranks):
            geometry = in_parts(TWO, groups, HeadParts(4, here, rank * here))
            assert not geometry.plain, "a rank with a single part, too"
            chunks = [(position, 1) for position in range(len(geometry.groups))]
            names = names_of(chunks, NAMES, geometry)
            assert names == names_of(chunks, NAMES, in_parts(TWO, groups, HeadParts(4, here))), "the scheduler's differ"
            of_groups = zip(geometry.groups, keys_of(b"n" * 24, names, geometry), strict=True)
            for position, (group, key) in enumerate(of_groups):
                found[position // here, rank * here + group.part] = key
        assert len(set(found.values())) == 4 * len(groups)
        return [found[one] for one in sorted(found)]

    assert keys(1) == keys(2) == keys(4)
