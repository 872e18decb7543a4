"""Survey a trace, and compute a bound for the hit rate of every policy with Belady's algorithm."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from tiercache.core.keys import ChunkKey
from tiercache.replay.formats import Request, TraceError

_NEVER = 1 << 62
_POSITION_BITS = 24


@dataclass(frozen=True)
class Survey:
    """Totals of a whole trace. `unique_blocks` is None if not counted, since counting takes 100 bytes per block."""

    requests: int
    blocks: int
    block_tokens: int
    span_s: float
    unique_blocks: int | None


def survey(trace: Iterable[Request], *, unique: bool = True) -> Survey:
    """Read the trace once. Raises TraceError if it is empty or has blocks of several sizes."""
    requests = blocks = block_tokens = 0
    span_s = 0.0
    seen: set[ChunkKey] = set()
    for request in trace:
        if not requests:
            block_tokens = request.block_tokens
        elif request.block_tokens != block_tokens:
            raise TraceError(f"blocks: expected one size, found {block_tokens} and {request.block_tokens} tokens")
        requests += 1
        blocks += len(request.keys)
        span_s = request.time_s
        if unique:
            seen.update(request.keys)
    if not requests:
        raise TraceError("the trace holds no request that can be replayed")
    return Survey(requests, blocks, block_tokens, span_s, len(seen) if unique else None)


def optimal_hits(trace: Iterable[Request], capacities: Iterable[int], measure_from: int) -> dict[int, float]:
    """Return the hit rate of an optimal cache for each capacity in blocks, as a fraction of all blocks.

    Belady, "A study of replacement algorithms for a virtual-storage computer" (1966), with bypass: the block
    with the latest next use, or without one, is evicted or not admitted. Hits after a gap count too, so that this is an
    upper bound. Holds 12 bytes per block of the trace, and 100 bytes per unique block.
    """
    numbers: dict[ChunkKey, int] = {}
    blocks = array("I")
    lengths = array("I")
    for request in trace:
        lengths.append(len(request.keys))
        for key in request.keys:
            blocks.append(numbers.setdefault(key, len(numbers)))
    next_use = _next_uses(blocks, lengths, len(numbers))
    return {capacity: _belady(blocks, lengths, next_use, capacity, measure_from) for capacity in set(capacities)}


def _next_uses(blocks: array[int], lengths: array[int], count: int) -> array[int]:
    """Return the next use of each block as a number that orders uses by request, then by position in the request."""
    next_use = array("q", bytes(8 * len(blocks)))
    coming = [_NEVER] * count
    end = len(blocks)
    for number in range(len(lengths) - 1, -1, -1):
        begin = end - lengths[number]
        for place in range(begin, end):
            next_use[place] = coming[blocks[place]]
        for place in range(begin, end):
            coming[blocks[place]] = (number << _POSITION_BITS) + place - begin
        end = begin
    return next_use


def _belady(
    blocks: array[int], lengths: array[int], next_use: array[int], capacity: int, measure_from: int
) -> float:
    resident: dict[int, int] = {}
    latest: list[tuple[int, int]] = []
    begin = hits = asked = 0
    for number, length in enumerate(lengths):
        end = begin + length
        if number >= measure_from:
            asked += length
            hits += sum(block in resident for block in blocks[begin:end])
        for place in range(begin, end):
            block, use = blocks[place], next_use[place]
            if use == _NEVER:
                resident.pop(block, None)
            else:
                resident[block] = use
                heapq.heappush(latest, (-use, block))
        while len(resident) > capacity:
            use, block = heapq.heappop(latest)
            if resident.get(block) == -use:
                del resident[block]
        begin = end
    return hits / asked if asked else 0.0
