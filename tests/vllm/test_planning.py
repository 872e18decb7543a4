"""Which chunks are loaded and saved. No engine, no cache."""

from __future__ import annotations

import pytest

from tiercache.integrations.vllm.planning import (
    BlockGeometry,
    BlockTransfer,
    Match,
    end_of_saves,
    held_names,
    loadable_tokens,
    plan_loads,
    plan_saves,
    tail_lengths,
)

PAIRS = BlockGeometry(block_tokens=128, blocks_per_chunk=2)
FOURS = BlockGeometry(block_tokens=16, blocks_per_chunk=4, save_tails=True)
NAMES = [bytes([number]) for number in range(20)]
BLOCKS = list(range(100, 120))
TABLES = (BLOCKS,)


@pytest.mark.parametrize(
    ("chunk", "block", "rounded"), [(256, 128, 256), (256, 16, 256), (100, 128, 128), (320, 128, 256)]
)
def test_chunk_size_is_rounded_to_whole_blocks(chunk: int, block: int, rounded: int) -> None:
    assert BlockGeometry.for_chunk_size(chunk, block, False).chunk_tokens == rounded


def test_tails_come_longest_first() -> None:
    assert list(tail_lengths(7, 4, FOURS)) == [3, 2, 1]
    assert list(tail_lengths(12, 4, FOURS)) == [3, 2, 1]
    assert list(tail_lengths(5, 4, FOURS)) == [1]
    assert list(tail_lengths(7, 4, PAIRS)) == []


def test_chunks_that_hold_blocks_are_full_and_a_tail_where_tails_are_stored() -> None:
    assert held_names(NAMES, 7, PAIRS) == [NAMES[1], NAMES[3], NAMES[5]]
    assert held_names(NAMES, 7, FOURS) == [NAMES[3], NAMES[6]]
    assert held_names(NAMES, 8, FOURS) == [NAMES[3], NAMES[7]]


def test_the_last_token_is_always_computed() -> None:
    assert loadable_tokens(Match(4), 512, 0, 0, PAIRS) == 384
    assert loadable_tokens(Match(4), 513, 0, 0, PAIRS) == 512


def test_what_the_engine_has_is_not_loaded() -> None:
    assert loadable_tokens(Match(4), 600, 256, 0, PAIRS) == 256
    assert loadable_tokens(Match(2), 600, 384, 0, PAIRS) == 0


def test_short_hits_are_not_worth_a_load() -> None:
    assert loadable_tokens(Match(4), 600, 0, 512, PAIRS) == 512
    assert loadable_tokens(Match(4), 600, 0, 513, PAIRS) == 0


def test_load_covers_the_wanted_blocks_and_no_other() -> None:
    assert plan_loads(NAMES, 4, 0, 512, TABLES, PAIRS) == [
        BlockTransfer(NAMES[1], 2, 0, (100, 101)),
        BlockTransfer(NAMES[3], 2, 0, (102, 103)),
    ]


def test_load_begins_inside_a_chunk_where_the_engine_has_its_start() -> None:
    assert plan_loads(NAMES, 4, 128, 512, TABLES, PAIRS)[0] == BlockTransfer(NAMES[1], 2, 1, (101,))


def test_load_ends_inside_a_chunk_where_the_last_token_is_computed() -> None:
    assert plan_loads(NAMES, 4, 0, 384, TABLES, PAIRS)[-1] == BlockTransfer(NAMES[3], 2, 0, (102,))


def test_a_matched_tail_is_loaded_under_its_own_name() -> None:
    assert plan_loads(NAMES, 7, 0, 7 * 16, TABLES, FOURS)[-1] == BlockTransfer(NAMES[6], 3, 0, (104, 105, 106))


def test_a_load_into_blocks_that_are_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"group 0: expected blocks 2 \.\. 3 to load into, found \(102,\)"):
        plan_loads(NAMES, 4, 0, 512, (BLOCKS[:3],), PAIRS)


@pytest.mark.parametrize(("first", "end"), [(0, 500), (100, 512)])
def test_a_load_of_a_part_of_a_block_is_refused(first: int, end: int) -> None:
    with pytest.raises(ValueError, match=f"expected whole blocks of 128 tokens to load, found tokens {first} .. {end}"):
        plan_loads(NAMES, 4, first, end, TABLES, PAIRS)


def test_blocks_that_are_not_in_the_table_yet_are_saved_later() -> None:
    assert plan_saves(NAMES, 0, 4, (BLOCKS[:3],), PAIRS, last=False) == ([BlockTransfer(NAMES[1], 2, 0, (100, 101))], 2)


def test_every_load_covers_exactly_what_was_asked() -> None:
    for geometry in (PAIRS, FOURS):
        for matched in range(1, 12):
            for first in range(matched):
                for end in range(first + 1, matched + 1):
                    # Without tails a match ends with a full chunk.
                    whole = matched if geometry.save_tails else geometry.whole_chunks(matched)
                    if end > whole:
                        continue
                    size = geometry.block_tokens
                    plan = plan_loads(NAMES, whole, first * size, end * size, TABLES, geometry)
                    assert [block for part in plan for block in part.blocks] == BLOCKS[first:end]
                    assert all(part.skip + len(part.blocks) <= part.chunk_blocks for part in plan)


def test_a_chunk_is_saved_with_its_last_block() -> None:
    assert plan_saves(NAMES, 0, 3, TABLES, PAIRS, last=False) == ([BlockTransfer(NAMES[1], 2, 0, (100, 101))], 2)
    assert plan_saves(NAMES, 2, 3, TABLES, PAIRS, last=True) == ([], 2)
    assert plan_saves(NAMES, 2, 4, TABLES, PAIRS, last=False) == ([BlockTransfer(NAMES[3], 2, 0, (102, 103))], 4)


def test_a_tail_is_saved_at_the_end_only_and_then_its_whole_chunk() -> None:
    assert plan_saves(NAMES, 4, 6, TABLES, FOURS, last=False) == ([], 4)
    assert plan_saves(NAMES, 4, 6, TABLES, FOURS, last=True) == ([BlockTransfer(NAMES[5], 2, 0, (104, 105))], 6)
    assert plan_saves(NAMES, 6, 8, TABLES, FOURS, last=False) == ([BlockTransfer(NAMES[7], 4, 0, (104, 105, 106, 107))], 8)


def test_chunked_prefill_saves_each_chunk_once() -> None:
    saved, names = 0, []
    for ready in (1, 3, 3, 6, 11):
        transfers, saved = plan_saves(NAMES, saved, ready, TABLES, PAIRS, last=ready == 11)
        names += [transfer.name for transfer in transfers]
    assert names == [NAMES[1], NAMES[3], NAMES[5], NAMES[7], NAMES[9]]
    assert saved == 10


def test_the_cheap_question_agrees_with_the_plan() -> None:
    for geometry in (PAIRS, FOURS):
        for saved in range(10):
            for ready in range(12):
                for last in (False, True):
                    transfers, _ = plan_saves(NAMES, saved, ready, TABLES, geometry, last=last)
                    assert (end_of_saves(ready, geometry, last=last) > saved) == bool(transfers)
