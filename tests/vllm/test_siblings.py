"""Chunks of other requests that begin with the blocks which a request needs next."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.integrations.vllm.planning import BlockGeometry, BlockTransfer, Sibling, plan_loads
from tiercache.integrations.vllm.siblings import Siblings

STEP = 4
GEOMETRY = BlockGeometry(block_tokens=16, blocks_per_chunk=STEP)


REQUEST = st.lists(st.integers(0, 2), max_size=9)


@settings(deadline=None)
@given(st.lists(REQUEST, max_size=12), REQUEST, st.booleans())
def test_the_most_blocks_in_common_come_first(requests: list[list[int]], wanted: list[int], tails: bool) -> None:
    distinct: dict[tuple[int, ...], bytes] = {}

    def names(request: list[int]) -> list[bytes]:
        return [distinct.setdefault(tuple(request[: end + 1]), os.urandom(32)) for end in range(len(request))]

    siblings = Siblings(STEP, 1000, tails=tails)
    for request in requests:
        siblings.add(names(request))
    chunks = {
        names(request)[start:][:STEP][-1]: names(request)[start:][:STEP]
        for request in requests
        for start in range(0, len(request), STEP)
        if tails or start + STEP <= len(request)
    }
    whole = len(wanted) // STEP * STEP
    rest = names(wanted)[whole:]
    common = {name: sum(a == b for a, b in zip(blocks, rest, strict=False)) for name, blocks in chunks.items()}
    found = list(siblings.like(rest))
    assert [blocks for blocks, _ in found] == sorted((n for n in common.values() if n), reverse=True)[:8]
    for blocks, sibling in found:
        assert (common[sibling.name], len(chunks[sibling.name])) == (blocks, sibling.chunk_blocks)


def test_the_chunks_that_were_added_first_are_dropped() -> None:
    siblings = Siblings(2, 3)
    requests = [[os.urandom(32) for _ in range(2)] for _ in range(4)]
    for number in (0, 1, 2, 0, 3):
        siblings.add(requests[number])
    assert [bool(list(siblings.like(names[:1]))) for names in requests] == [True, False, True, True]


def test_the_last_blocks_of_a_hit_are_loaded_from_the_other_chunk() -> None:
    names = [bytes([number]) * 32 for number in range(8)]
    tables = [[*range(101, 109)]]
    other = Sibling(b"o" * 32, 4)
    own, last = BlockTransfer(names[3], 4, 0, (101, 102, 103, 104)), BlockTransfer(other.name, 4, 0, (105, 106))
    assert plan_loads(names, 6, 0, 96, tables, GEOMETRY, other) == [own, last]
    assert plan_loads(names, 6, 80, 96, tables, GEOMETRY, other) == [BlockTransfer(other.name, 4, 1, (106,))]
    tail = Sibling(b"t" * 32, 3)
    assert plan_loads(names, 6, 64, 96, tables, GEOMETRY, tail) == [BlockTransfer(tail.name, 3, 0, (105, 106))]
    assert plan_loads(names, 6, 0, 64, tables, GEOMETRY, other) == [own]
