"""Chunks of other requests that begin with the blocks which a request needs next."""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vllm.test_lookup import Worker, answer_of, begun, engine  # noqa: F401
from tiercache.core.keys import keys_from_hashes
from tiercache.integrations.vllm.lookup import LookupClient
from tiercache.integrations.vllm.planning import BlockGeometry, BlockTransfer, Sibling, plan_loads
from tiercache.integrations.vllm.siblings import Siblings

STEP = 4
GEOMETRY = BlockGeometry(block_tokens=16, blocks_per_chunk=STEP)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=12),
    st.lists(st.integers(0, 2), max_size=9),
    st.booleans(),
)
def test_the_chunk_with_the_most_blocks_in_common_comes_first(
    requests: list[list[int]], wanted: list[int], tails: bool
) -> None:
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
    assert plan_loads(names, 6, 0, 96, tables, GEOMETRY, other) == [
        BlockTransfer(names[3], 4, 0, (101, 102, 103, 104)),
        BlockTransfer(other.name, 4, 0, (105, 106)),
    ]
    assert plan_loads(names, 6, 80, 96, tables, GEOMETRY, other) == [BlockTransfer(other.name, 4, 1, (106,))]
    tail = Sibling(b"t" * 32, 3)
    assert plan_loads(names, 6, 64, 96, tables, GEOMETRY, tail) == [BlockTransfer(tail.name, 3, 0, (105, 106))]
    assert plan_loads(names, 6, 0, 64, tables, GEOMETRY, other) == [BlockTransfer(names[3], 4, 0, (101, 102, 103, 104))]


class Holder(Worker):
    """A worker that has been asked for a request of two chunks, and then stored them."""

    def __init__(self, engine: str, rank: int, stored: list[bytes]) -> None:  # noqa: F811
        super().__init__(engine, rank, 0)
        self.thread.submit(self.server.find(stored, "before")).result(10)
        cache = self.thread.cache
        self.keys = keys_from_hashes(cache.namespace, stored[3::4])
        for key in self.keys:
            assert self.thread.submit(cache.put(key, b"x" * 4096)).result(10)


STORED = [bytes([number]) * 32 for number in range(8)]
ASKED = [*STORED[:6], b"other 6".ljust(32), b"other 7".ljust(32)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hit_goes_on_into_another_requests_chunk(engine: str, ranks: int) -> None:  # noqa: F811
    client = LookupClient(engine, ranks, GEOMETRY)
    with ExitStack() as stack:
        workers = [stack.enter_context(Holder(engine, rank, STORED)) for rank in range(ranks)]
        match = answer_of(begun(client, ASKED, "r"))
        assert (match.blocks, match.tokens_by_tier, match.sibling) == (6, {"cpu": 96}, Sibling(STORED[7], 4))
        for worker in workers:
            assert set(worker.server.claims.leases) == set(worker.keys)
        last = workers[-1]
        last.thread.submit(last.thread.cache.forget(last.keys[1:])).result(10)
        match = answer_of(begun(client, ASKED))
        assert (match.blocks, match.sibling) == (4, None), "only what all have in RAM is used so"
    client.close()


def test_a_hit_goes_on_into_another_requests_tail(engine: str) -> None:  # noqa: F811
    client = LookupClient(engine, 1, GEOMETRY)
    with Worker(engine, 0, 0) as worker:
        cache = worker.thread.cache
        worker.thread.submit(worker.server.find(STORED[:7], "before")).result(10)
        for key, blocks in zip(keys_from_hashes(cache.namespace, [STORED[3], STORED[6]]), (4, 3), strict=True):
            assert worker.thread.submit(cache.put(key, b"x" * 1024 * blocks)).result(10)
        match = answer_of(begun(client, ASKED))
        assert (match.blocks, match.sibling) == (6, Sibling(STORED[6], 3))
    client.close()
