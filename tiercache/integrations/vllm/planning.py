"""Decide which blocks of a request make which chunks, what to load and what to save. Pure: no vLLM, no asyncio.

A chunk is `blocks_per_chunk` engine blocks, counted from the start of the request; a tail is shorter. Both are named by
the name of their last block, which is chained over the whole prefix, so the position distinguishes a tail from a full
chunk.

Some models have several groups of layers. Some groups keep only a window (Gemma 3, gpt-oss) or a recurrent state (Granite
4, LFM2, Qwen3-Next). Each group has its own blocks and block table. A chunk has the same tokens in all groups, and its
part of each group is stored by itself, under the chunk's name and the group's position. A hit of n chunks needs all of
them of a group that sees every token. Of a group with a window it needs those with a block that the engine keeps at that
position: the blocks before them are not read any more. If a window is shorter than a chunk, only the end of the chunk can
be needed, and only that is stored.

A recurrent state is like a window of one block, the last. It exists only where a step of the engine ended, which the
engine reports (vLLM's boundary states). So chunks are single blocks if there are states: the last one of a prompt counts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tiercache.core.keys import TAG_BYTES, ChunkKey, keys_from_hashes

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


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
        transfers.append(
            BlockTransfer(names[ready_blocks - 1], ready_blocks - start, 0, tuple(blocks[start:ready_blocks]))
        )
        start = ready_blocks
    return transfers, max(saved_blocks, start)


NAME_BYTES = 32
"""Of a block's name, without its tenant's tag."""

Tables = Sequence[Sequence[int]]
"""A request's block ids by group, as vLLM numbers groups. Block 0 is the null block."""

NULL_BLOCK = 0

_TAGGED_BYTES = NAME_BYTES + TAG_BYTES
"""Of a block's name with its tenant's tag."""
_SUFFIX_BYTES = 2
"""Behind a chunk's name: of which group it is."""
_MOST_EMPTY = 0.1
_LEAST_PART = 4
"""Of the `chunk_size` that was asked for. Small chunks cost more a token."""


@dataclass(frozen=True)
class GroupChunk:
    group: int
    """Its position among the geometry's groups."""
    chunk: int


def name_of(chunk_name: bytes, group: int, geometry: BlockGeometry) -> bytes:
    """Of a group's part of a chunk. One group alone has the chunk to itself."""
    if len(geometry.groups) > 1 or geometry.parts is not None:
        return chunk_name + group.to_bytes(_SUFFIX_BYTES, "big")
    return chunk_name


def in_parts(geometry: BlockGeometry, groups: Sequence[KvGroup], parts: HeadParts) -> BlockGeometry:
    """With every one of `groups` cut into a rank's parts."""
    cut = tuple(replace(group, part=part) for group in groups for part in range(parts.here))
    return replace(geometry, groups=cut, save_tails=False, parts=parts)


def keys_of(namespace: bytes, names: Sequence[bytes], geometry: BlockGeometry) -> list[ChunkKey]:
    """The keys of a worker's chunks. In names, which are the same to all workers, its parts are counted from its first; in
    keys from the first of all ranks. A tenant's tag comes from the name to the end of the key."""
    if (parts := geometry.parts) is not None:
        names = [_counted_from_the_first_of_all(name, parts) for name in names]
    if not any(len(name) >= _TAGGED_BYTES for name in names):
        return keys_from_hashes(namespace, names)
    untagged = [name[:NAME_BYTES] + name[_TAGGED_BYTES:] if len(name) >= _TAGGED_BYTES else name for name in names]
    keys = keys_from_hashes(namespace, untagged)
    return [
        key + name[NAME_BYTES:_TAGGED_BYTES] if len(name) >= _TAGGED_BYTES else key
        for key, name in zip(keys, names, strict=True)
    ]


def _counted_from_the_first_of_all(name: bytes, parts: HeadParts) -> bytes:
    group, part = divmod(int.from_bytes(name[-_SUFFIX_BYTES:], "big"), parts.here)
    number = group * parts.all + parts.first + part
    return name[:-_SUFFIX_BYTES] + number.to_bytes(_SUFFIX_BYTES, "big")


def full_chunks(chunks: int, geometry: BlockGeometry) -> list[GroupChunk]:
    """Those of groups that keep every token, in the order of the prefix."""
    groups = [position for position, group in enumerate(geometry.groups) if group.window_tokens is None]
    return [GroupChunk(group, chunk) for chunk in range(chunks) for group in groups]


def window_chunks(chunks: int, geometry: BlockGeometry) -> list[GroupChunk]:
    """Those that groups with a window need for a hit of so many chunks, the last first."""
    end = chunks * geometry.chunk_tokens
    firsts = {
        position: group.first_block(end) * group.block_tokens // geometry.chunk_tokens
        for position, group in enumerate(geometry.groups)
        if group.window_tokens is not None
    }
    earliest = min(firsts.values(), default=chunks)
    return [
        GroupChunk(position, chunk)
        for chunk in range(chunks - 1, earliest - 1, -1)
        for position, first in firsts.items()
        if chunk >= first
    ]


class HitSearch:
    """The longest hit that all groups agree on, by questions about chunks.

    `question` has the chunks that `chunks` (the longest hit that is still possible) needs and of which nothing is known;
    `answer` says how many of them there are before the first that is missing. When `question` is empty, `chunks` is the hit.
    """

    def __init__(self, chunks: int, geometry: BlockGeometry) -> None:
        self.chunks = chunks
        self._geometry = geometry
        self.question = full_chunks(chunks, geometry) or window_chunks(chunks, geometry)
        self._asked_windows = not any(group.window_tokens is None for group in geometry.groups)

    def answer(self, present: int) -> None:
        missing = self.question[present:]
        if missing:
            self.chunks = missing[0].chunk
        elif self._asked_windows:
            self.question = []
            return
        self._asked_windows = True
        self.question = window_chunks(self.chunks, self._geometry)


def needed_chunks(chunks: int, geometry: BlockGeometry) -> list[GroupChunk]:
    """All that a hit of so many chunks needs."""
    return full_chunks(chunks, geometry) + window_chunks(chunks, geometry)


def names_of(chunks: Sequence[GroupChunk], names: Sequence[bytes], geometry: BlockGeometry) -> list[bytes]:
    """`names` has one a block, as everywhere."""
    step = geometry.blocks_per_chunk
    return [name_of(names[(one.chunk + 1) * step - 1], one.group, geometry) for one in chunks]


def held_names(names: Sequence[bytes], blocks: int, geometry: BlockGeometry) -> list[bytes]:
    """Of the chunks that hold the first `blocks` blocks of a request, for whoever goes on behind them."""
    if geometry.groups:
        return names_of(needed_chunks(blocks // geometry.blocks_per_chunk, geometry), names, geometry)
    return [names[end - 1] for end in stored_ends(blocks, geometry)]


def all_names(names: Sequence[bytes], geometry: BlockGeometry) -> list[bytes]:
    """Of every chunk that a request with these blocks may have stored, tails included."""
    if geometry.groups:
        chunks = range(len(names) // geometry.blocks_per_chunk)
        both = [GroupChunk(group, chunk) for group in range(len(geometry.groups)) for chunk in chunks]
        return names_of(both, names, geometry)
    if geometry.save_tails:
        return list(names)
    return [names[end - 1] for end in chunk_ends(len(names), geometry)]


def part_of(group: KvGroup, chunk: int, geometry: BlockGeometry) -> range:
    """The blocks of the group, counted from the start of the request, that are stored for a chunk."""
    step = geometry.chunk_tokens // group.block_tokens
    return range(max(chunk * step, group.first_block((chunk + 1) * geometry.chunk_tokens)), (chunk + 1) * step)


def part_blocks(group: KvGroup, geometry: BlockGeometry) -> int:
    """The most that are stored for a chunk."""
    return max(len(part_of(group, chunk, geometry)) for chunk in range(2))


def empty_part(geometry: BlockGeometry, block_bytes: Sequence[int]) -> float:
    """What part of the hot cache stays empty when as many chunks of each group are in it: a slot holds one of any.
    `block_bytes` of each group."""
    stored = [part_blocks(group, geometry) * size for group, size in zip(geometry.groups, block_bytes, strict=True)]
    return 1 - sum(stored) / (max(stored) * len(stored)) if stored else 0.0


def fitted(geometry: BlockGeometry) -> BlockGeometry:
    """With chunks halved until hardly any of the hot cache stays empty: of a chunk that is longer than a window, that group
    stores the end only. What is left where no part of a chunk does is as little as it can be."""
    block_bytes = [_block_bytes(group) for group in geometry.groups]
    parts = [
        replace(geometry, blocks_per_chunk=geometry.blocks_per_chunk // part)
        for part in (1, 2, _LEAST_PART)
        if geometry.blocks_per_chunk >= part
    ]
    for smaller in parts:
        if empty_part(smaller, block_bytes) <= _MOST_EMPTY:
            return smaller
    return min(parts, key=lambda smaller: empty_part(smaller, block_bytes))


def _block_bytes(group: KvGroup) -> int:
    """As the engine counts them; without its word, all groups have equal blocks."""
    return getattr(group.spec, "page_size_bytes", 1) * max(1, len(group.layers))


def plan_loads(
    names: Sequence[bytes],
    matched_blocks: int,
    first_token: int,
    end_token: int,
    tables: Tables,
    geometry: BlockGeometry,
) -> list[BlockTransfer]:
    """Transfers that fill what the engine keeps of tokens `first_token` .. `end_token` (multiples of a block).

    Of a group with a window these are the last blocks only, in chunks that may begin before them. Raises ValueError where
    one that has to be filled is null, or not there.
    """
    if not geometry.groups:
        return plan_load(names, matched_blocks, first_token, end_token, tables[0], geometry)
    transfers = []
    for position, group in enumerate(geometry.groups):
        table, step = tables[group.index], geometry.chunk_tokens // group.block_tokens
        lower = max(first_token // group.block_tokens, group.first_block(end_token))
        upper = end_token // group.block_tokens
        for chunk in range(lower // step, -(-upper // step)):
            part = part_of(group, chunk, geometry)
            first, stop = max(lower, part.start), min(upper, part.stop)
            blocks = tuple(table[first:stop])
            if len(blocks) != stop - first or NULL_BLOCK in blocks:
                raise ValueError(
                    f"group {group.index}: expected blocks {first} .. {stop - 1} to load into, found {blocks}"
                )
            (name,) = names_of([GroupChunk(position, chunk)], names, geometry)
            transfers.append(BlockTransfer(name, len(part), first - part.start, blocks, position))
    return transfers


def blocks_behind(tables: Tables, computed_tokens: int, geometry: BlockGeometry) -> set[int]:
    """Those that do not hold the first `computed_tokens` tokens already, which the engine found in its own cache or has had
    loaded."""
    sizes = {group.index: group.block_tokens for group in geometry.groups}
    behind = {
        block
        for index, table in enumerate(tables)
        for block in table[computed_tokens // sizes[index] if index in sizes else 0 :]
    }
    return behind - {NULL_BLOCK}


def given_away(output: SchedulerOutput, geometry: BlockGeometry) -> set[int]:
    """Blocks that requests get in a step. A window's may have been another request's a step ago, and be on their way into
    the cache still."""
    cached, given = output.scheduled_cached_reqs, set()
    for new in output.scheduled_new_reqs:
        given |= blocks_behind(new.block_ids, new.num_computed_tokens, geometry)
    for request_id, tables, tokens in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        known = tokens if request_id in cached.resumed_req_ids else 0
        given |= blocks_behind(tables or (), known, geometry)
    given.update(copy.dst_block_id for copy in output.kv_cache_block_copies or ())
    return given


def plan_saves(
    names: Sequence[bytes],
    saved_blocks: int,
    ready_blocks: int,
    tables: Tables,
    geometry: BlockGeometry,
    *,
    last: bool,
    states: Collection[tuple[int, int, int]] = (),
) -> tuple[list[BlockTransfer], int]:
    """As `plan_save`, for all groups. Chunks of which a window has left a block behind already are not stored. `states` are
    those that the engine has: group, block, and the tokens after which it is the state."""
    if not geometry.groups:
        return plan_save(names, saved_blocks, ready_blocks, tables[0], geometry, last=last)
    a_chunk = geometry.blocks_per_chunk
    chunks = range(saved_blocks // a_chunk, min(ready_blocks, len(names)) // a_chunk)
    transfers = []
    ends = {(index, tokens): block for index, block, tokens in states}
    for position, group in enumerate(geometry.groups):
        table = tables[group.index]
        for chunk in chunks:
            part = part_of(group, chunk, geometry)
            if group.recurrent:
                blocks: tuple[int, ...] = (ends.get((group.index, (chunk + 1) * geometry.chunk_tokens), NULL_BLOCK),)
            else:
                blocks = tuple(table[part.start : part.stop])
            if part and len(blocks) == len(part) and NULL_BLOCK not in blocks:
                (name,) = names_of([GroupChunk(position, chunk)], names, geometry)
                transfers.append(BlockTransfer(name, len(part), 0, blocks, position))
    return transfers, max(saved_blocks, chunks.stop * a_chunk)
