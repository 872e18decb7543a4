"""Which blocks of a request make which chunks, what to load and what to save. Pure: no vLLM, no asyncio.

A chunk is `blocks_per_chunk` engine blocks, counted from the start of the request; a tail is shorter. Both are named by
the name of their last block, which is chained over the whole prefix, so the position tells a tail from a full chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class KvGroup:
    """Layers that share block tables. A block of one group and a block of another have nothing to do with each other."""

    index: int
    """Of its block table among those of a request."""
    block_tokens: int
    layers: tuple[str, ...] = ()
    """Empty: all of the model's."""
    window_tokens: int | None = None
    """The engine keeps the last so many tokens less one, which the next token sees besides itself; None: all."""
    spec: Any = field(default=None, compare=False, repr=False)
    """vLLM's own description of the KV."""
    part: int = 0
    """Which of the parts of its heads that this rank has, where they are cut into parts."""
    recurrent: bool = False
    """A block holds one state for all tokens up to its end, and only where a step ended there. To the next token that is
    what a window of two tokens is: one block, the last."""

    def first_block(self, computed_tokens: int) -> int:
        """Those before it are null when so many tokens are computed (vLLM's `get_num_skipped_tokens`)."""
        if self.window_tokens is None:
            return 0
        return max(0, computed_tokens - self.window_tokens + 1) // self.block_tokens


@dataclass(frozen=True)
class HeadParts:
    """Into how many parts the KV heads of all ranks are cut, how many of them a rank has, and which is the first of this
    rank. To the scheduler all ranks are the first."""

    all: int
    here: int
    first: int = 0


@dataclass(frozen=True)
class BlockGeometry:
    """With `groups`, `block_tokens` is what the blocks of all groups divide; see `grouped.py`."""

    block_tokens: int
    blocks_per_chunk: int
    save_tails: bool = False
    groups: tuple[KvGroup, ...] = ()
    """Empty for a model whose layers all keep every token in blocks of one kind, and whose heads are not cut into parts."""
    parts: HeadParts | None = None
    """With these, `groups` has every group once for each part of a rank."""

    @classmethod
    def for_chunk_size(
        cls, chunk_tokens: int, block_tokens: int, save_tails: bool, groups: tuple[KvGroup, ...] = ()
    ) -> BlockGeometry:
        """`chunk_tokens` rounded to whole blocks, at least one; one where there are recurrent states."""
        blocks = 1 if any(group.recurrent for group in groups) else max(1, round(chunk_tokens / block_tokens))
        return cls(block_tokens, blocks, save_tails and not groups, groups)

    @property
    def chunk_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_chunk

    def whole_chunks(self, blocks: int) -> int:
        """`blocks` less the tail."""
        return blocks - blocks % self.blocks_per_chunk


@dataclass(frozen=True)
class BlockTransfer:
    """One chunk between the cache and blocks of the engine.

    `blocks` are engine block ids; they are blocks `skip` .. `skip + len(blocks)` of the chunk's `chunk_blocks`.
    """

    name: bytes
    chunk_blocks: int
    skip: int
    blocks: tuple[int, ...]
    group: int = 0
    """Whose blocks: a position in the geometry's groups."""


@dataclass
class Match:
    """What a look-up found: blocks of the contiguous prefix, and their tokens by tier."""

    blocks: int = 0
    tokens_by_tier: dict[str, int] = field(default_factory=dict)
    failed: bool = False
    """There was no answer."""
    held: bool = False
    """All of it is in RAM, and stays there for `HELD_FOR_S` from the question on: loading it cannot fail."""

    def shortened(self, blocks: int, geometry: BlockGeometry) -> Match:
        """To the first `blocks` blocks, of which those of the first tiers that are named count first."""
        left, tokens = blocks * geometry.block_tokens, {}
        for tier, count in self.tokens_by_tier.items():
            tokens[tier] = min(left, count)
            left -= tokens[tier]
        return Match(blocks, tokens)


def agreed(answers: Sequence[Match], geometry: BlockGeometry) -> Match:
    """What all workers have, each of which answered for itself.

    A worker that has more need not have the tail of one that has less: it may have only the full chunk that this tail
    became. Unless all have the same, tails do not count.
    """
    least = min(answers, key=lambda match: match.blocks)
    if all(answer.blocks == least.blocks for answer in answers):
        return replace(least, held=all(answer.held for answer in answers))
    match = Match(geometry.whole_chunks(least.blocks), held=all(answer.held for answer in answers))
    left = match.blocks * geometry.block_tokens
    for tier, tokens in least.tokens_by_tier.items():
        if part := min(tokens, left):
            match.tokens_by_tier[tier] = part
            left -= part
    return match


def chunk_ends(blocks: int, geometry: BlockGeometry) -> list[int]:
    """Ends (in blocks) of the full chunks of a request of `blocks` full blocks."""
    step = geometry.blocks_per_chunk
    return list(range(step, blocks + 1, step))


def tail_lengths(blocks: int, matched_blocks: int, geometry: BlockGeometry) -> range:
    """Lengths (in blocks) that a stored tail behind `matched_blocks` of full chunks may have, the longest first."""
    if not geometry.save_tails:
        return range(0)
    return range(min(blocks - matched_blocks, geometry.blocks_per_chunk - 1), 0, -1)


def loadable_tokens(
    match: Match, request_tokens: int, computed_tokens: int, least_tokens: int, geometry: BlockGeometry
) -> int:
    """Tokens to load beyond the `computed_tokens` (whole blocks) that the engine has.

    Whole blocks, and never all of the request, since the last token has to be computed to get logits (vLLM's own prefix
    cache does the same). 0 where the hit is shorter than `least_tokens`.
    """
    usable = min(match.blocks, (request_tokens - 1) // geometry.block_tokens) * geometry.block_tokens
    if geometry.groups and usable < match.blocks * geometry.block_tokens:
        return 0  # windows were found for the hit as it is, and not for a shorter one
    return max(0, usable - computed_tokens) if usable >= least_tokens else 0


def plan_load(
    names: Sequence[bytes],
    matched_blocks: int,
    first_token: int,
    end_token: int,
    blocks: Sequence[int],
    geometry: BlockGeometry,
) -> list[BlockTransfer]:
    """Transfers that fill tokens `first_token` .. `end_token` (multiples of a block) of a request.

    `names[i]` names the prefix that ends with block `i`; `blocks` are all block ids of the request; `matched_blocks` is how
    far the cache reaches, which decides whether the last chunk is a tail.
    """
    step = geometry.blocks_per_chunk
    first, end = first_token // geometry.block_tokens, end_token // geometry.block_tokens
    transfers = []
    for start in range(first - first % step, end, step):
        stop = min(start + step, matched_blocks)
        lower, upper = max(start, first), min(stop, end)
        transfers.append(BlockTransfer(names[stop - 1], stop - start, lower - start, tuple(blocks[lower:upper])))
    return transfers


def stored_ends(blocks: int, geometry: BlockGeometry) -> list[int]:
    """Ends (in blocks) of the chunks that hold the first `blocks` blocks: full ones, and the tail if there is one."""
    ends = chunk_ends(blocks, geometry)
    return ends if not geometry.save_tails or not blocks or blocks in ends[-1:] else [*ends, blocks]


def wants_save(saved_blocks: int, ready_blocks: int, geometry: BlockGeometry, *, last: bool) -> bool:
    """Whether `plan_save` would have anything to do; asked every step, so it costs nothing."""
    if last and geometry.save_tails:
        return ready_blocks > saved_blocks
    return geometry.whole_chunks(ready_blocks) > saved_blocks


def plan_save(
    names: Sequence[bytes],
    saved_blocks: int,
    ready_blocks: int,
    blocks: Sequence[int],
    geometry: BlockGeometry,
    *,
    last: bool,
) -> tuple[list[BlockTransfer], int]:
    """Transfers for the chunks that became whole: blocks `saved_blocks` .. `ready_blocks`, and the new `saved_blocks`.

    `last` says that no further block is expected soon, so that a tail is worth keeping (if `save_tails`).
    """
    step = geometry.blocks_per_chunk
    ready_blocks = min(ready_blocks, len(names), len(blocks))
    start = geometry.whole_chunks(saved_blocks)
    transfers = []
    while start + step <= ready_blocks:
        transfers.append(BlockTransfer(names[start + step - 1], step, 0, tuple(blocks[start : start + step])))
        start += step
    if last and geometry.save_tails and max(saved_blocks, start) < ready_blocks:
        transfers.append(BlockTransfer(names[ready_blocks - 1], ready_blocks - start, 0, tuple(blocks[start:ready_blocks])))
        start = ready_blocks
    return transfers, max(saved_blocks, start)
