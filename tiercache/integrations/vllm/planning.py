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

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from tiercache.core.keys import TAG_BYTES, ChunkKey, keys_from_hashes

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(frozen=True)
class KvGroup:
    """Layers that share block tables. A block of one group and a block of another have nothing to do with each other."""

    index: int
    """The number of the group's block table among those of a request."""
    block_tokens: int
    layers: tuple[str, ...] = ()
    """Empty: all of the model's."""
    window_tokens: int | None = None
    """The engine keeps the last so many tokens less one, which the next token sees besides itself; None: all."""
    spec: Any = field(default=None, compare=False, repr=False)
    """vLLM's own description of the KV."""
    part: int = 0
    """The number of this part of the heads among those of this rank, where heads are cut into parts."""
    recurrent: bool = False
    """A block holds one state for all tokens up to its end, and only where a step ended there. To the next token that is
    what a window of two tokens is: one block, the last."""

    def first_block(self, computed_tokens: int) -> int:
        """Return the first block that is kept when so many tokens are computed (vLLM's `get_num_skipped_tokens`)."""
        if self.window_tokens is None:
            return 0
        return max(0, computed_tokens - self.window_tokens + 1) // self.block_tokens


@dataclass(frozen=True)
class HeadParts:
    """Into how many parts the KV heads of all ranks are cut, how many of them a rank has, and which is the first of this
    rank. To the scheduler all ranks are the first.
    """

    all: int
    here: int
    first: int = 0


@dataclass(frozen=True)
class BlockGeometry:
    """`block_tokens` is what the blocks of all groups divide."""

    block_tokens: int
    blocks_per_chunk: int
    save_tails: bool = False
    """Only where the geometry is plain."""
    groups: tuple[KvGroup, ...] = ()
    """The default is one group that keeps every token."""
    parts: HeadParts | None = None
    """If set, `groups` has every group once for each part of a rank."""

    @classmethod
    def for_chunk_size(
        cls, chunk_tokens: int, block_tokens: int, save_tails: bool, groups: tuple[KvGroup, ...] = ()
    ) -> BlockGeometry:
        """`chunk_tokens` rounded to whole blocks, at least one; one where there are recurrent states."""
        blocks = 1 if any(group.recurrent for group in groups) else max(1, round(chunk_tokens / block_tokens))
        geometry = cls(block_tokens, blocks, groups=groups)
        return replace(geometry, save_tails=save_tails and geometry.plain)

    def __post_init__(self) -> None:
        if not self.groups:
            object.__setattr__(self, "groups", (KvGroup(0, self.block_tokens),))

    @cached_property
    def plain(self) -> bool:
        """True if all layers keep every token in blocks of one table, and heads are not cut into parts. Then a hit may be
        shortened anywhere, tails count, and the engine can be told of single blocks that could not be loaded.
        """
        first = self.groups[0]
        alone = len(self.groups) == 1 and not first.layers
        return alone and first.window_tokens is None and self.parts is None

    @property
    def chunk_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_chunk

    def whole_chunks(self, blocks: int) -> int:
        """`blocks` less the tail."""
        return blocks - blocks % self.blocks_per_chunk

    def chunks_in(self, blocks: int) -> int:
        """Return how many chunks hold `blocks` blocks: full ones, and the tail where tails are stored."""
        return -(-blocks // self.blocks_per_chunk) if self.save_tails else blocks // self.blocks_per_chunk


class BlockTransfer(NamedTuple):
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
    """The result of a lookup: blocks of the contiguous prefix, and their tokens by tier."""

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
    """Return what all workers have, each of which answered for itself.

    A worker that has more need not have the tail of one that has less: it may have only the full chunk that this tail
    became. Unless all have the same, tails do not count.
    """
    match = min(answers, key=lambda match: match.blocks)
    if any(answer.blocks != match.blocks for answer in answers):
        match = match.shortened(geometry.whole_chunks(match.blocks), geometry)
    return replace(match, held=all(answer.held for answer in answers))


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
    if not geometry.plain and usable < match.blocks * geometry.block_tokens:
        return 0  # windows were found for the hit as it is, and not for a shorter one
    return max(0, usable - computed_tokens) if usable >= least_tokens else 0


def end_of_saves(ready_blocks: int, geometry: BlockGeometry, *, last: bool) -> int:
    """Return how many of the first `ready_blocks` blocks can be saved. `last` says that no further block is expected soon,
    so that a tail is worth keeping (if `save_tails`).
    """
    return ready_blocks if last and geometry.save_tails else geometry.whole_chunks(ready_blocks)


NAME_BYTES = 32
"""The length of a block's name without its tenant's tag."""

Tables = Sequence[Sequence[int]]
"""A request's block ids by group, as vLLM numbers groups. Block 0 is the null block."""

NULL_BLOCK = 0

_TAGGED_BYTES = NAME_BYTES + TAG_BYTES
"""The length of a block's name with its tenant's tag."""
_SUFFIX_BYTES = 2
"""The length of the group's number behind a chunk's name."""
_MOST_EMPTY = 0.1
_LEAST_PART = 4
"""The least part of the `chunk_size` that was asked for. Small chunks cost more a token."""


GroupChunk = tuple[int, int]
"""A group's part of a chunk: the group's position among the geometry's, and the number of the chunk."""


def suffix_of(group: int, geometry: BlockGeometry) -> bytes:
    """Return what is behind a chunk's name for a group's part of it. One group alone has the chunk to itself."""
    return group.to_bytes(_SUFFIX_BYTES, "big") if len(geometry.groups) > 1 or geometry.parts is not None else b""


def in_parts(geometry: BlockGeometry, groups: Sequence[KvGroup], parts: HeadParts) -> BlockGeometry:
    """Return the geometry with every one of `groups` cut into a rank's parts."""
    cut = tuple(replace(group, part=part) for group in groups for part in range(parts.here))
    return replace(geometry, groups=cut, save_tails=False, parts=parts)


def keys_of(namespace: bytes, names: Sequence[bytes], geometry: BlockGeometry) -> list[ChunkKey]:
    """The keys of a worker's chunks. In names, which are the same to all workers, its parts are counted from its first; in
    keys from the first of all ranks. A tenant's tag comes from the name to the end of the key.
    """
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
    """Return the chunks of groups that keep every token, in the order of the prefix."""
    groups = [position for position, group in enumerate(geometry.groups) if group.window_tokens is None]
    return [(group, chunk) for chunk in range(chunks) for group in groups]


def window_chunks(chunks: int, geometry: BlockGeometry) -> list[GroupChunk]:
    """Return the chunks that groups with a window need for a hit of so many chunks, the last first."""
    end = chunks * geometry.chunk_tokens
    firsts = {
        position: group.first_block(end) * group.block_tokens // geometry.chunk_tokens
        for position, group in enumerate(geometry.groups)
        if group.window_tokens is not None
    }
    earliest = min(firsts.values(), default=chunks)
    return [
        (position, chunk)
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
            _, self.chunks = missing[0]
        elif self._asked_windows:
            self.question = []
            return
        self._asked_windows = True
        self.question = window_chunks(self.chunks, self._geometry)


def needed_chunks(chunks: int, geometry: BlockGeometry) -> list[GroupChunk]:
    """Return all that a hit of so many chunks needs."""
    return full_chunks(chunks, geometry) + window_chunks(chunks, geometry)


def names_of(
    chunks: Sequence[GroupChunk], names: Sequence[bytes], geometry: BlockGeometry, blocks: int | None = None
) -> list[bytes]:
    """Return the names of `chunks`. `names` has one a block; a chunk that ends behind the first `blocks` of them is a tail,
    which ends with them.
    """
    step, end = geometry.blocks_per_chunk, len(names) if blocks is None else blocks
    tail = end // step
    suffixes = [suffix_of(group, geometry) for group in range(len(geometry.groups))]
    return [names[(chunk + 1) * step - 1 if chunk < tail else end - 1] + suffixes[group] for group, chunk in chunks]


def held_names(names: Sequence[bytes], blocks: int, geometry: BlockGeometry) -> list[bytes]:
    """Return the names of the chunks that a request needs which goes on behind the first `blocks` blocks."""
    return names_of(needed_chunks(geometry.chunks_in(blocks), geometry), names, geometry, blocks)


def all_names(names: Sequence[bytes], geometry: BlockGeometry) -> list[bytes]:
    """Return the names of every chunk that a request with these blocks may have stored, tails included."""
    if geometry.save_tails:
        return list(names)
    chunks = range(len(names) // geometry.blocks_per_chunk)
    return names_of([(group, chunk) for group in range(len(geometry.groups)) for chunk in chunks], names, geometry)


def part_of(group: KvGroup, first: int, end: int, geometry: BlockGeometry) -> range:
    """Return the blocks of the group, counted from the start of the request, that are stored for a chunk which is the
    geometry's blocks `first` .. `end`.
    """
    a_block = geometry.block_tokens // group.block_tokens
    start, stop = first * a_block, end * a_block
    if group.window_tokens is not None:
        start = max(start, group.first_block(end * geometry.block_tokens))
    return range(start, stop)


def named_parts(
    position: int, chunks: range, names: Sequence[bytes], blocks: int, geometry: BlockGeometry
) -> Iterator[tuple[bytes, range]]:
    """Yield name and part (see `part_of`) of a group's chunks. The request has `blocks` blocks: a chunk that ends behind
    them is a tail, which ends with them.
    """
    group, suffix, step = geometry.groups[position], suffix_of(position, geometry), geometry.blocks_per_chunk
    for chunk in chunks:
        end = min((chunk + 1) * step, blocks)
        yield names[end - 1] + suffix, part_of(group, chunk * step, end, geometry)


def part_blocks(group: KvGroup, geometry: BlockGeometry) -> int:
    """Return the most blocks that are stored for a chunk."""
    step = geometry.blocks_per_chunk
    return max(len(part_of(group, chunk * step, (chunk + 1) * step, geometry)) for chunk in range(2))


def empty_part(geometry: BlockGeometry, block_bytes: Sequence[int]) -> float:
    """Return the part of the hot cache that stays empty with as many chunks of each group: a slot holds one of any.
    `block_bytes` of each group.
    """
    stored = [part_blocks(group, geometry) * size for group, size in zip(geometry.groups, block_bytes, strict=True)]
    return 1 - sum(stored) / (max(stored) * len(stored)) if stored else 0.0


def fitted(geometry: BlockGeometry) -> BlockGeometry:
    """Return the geometry with chunks halved until hardly any of the hot cache stays empty: of a chunk that is longer than a
    window, that group stores the end only. If halving does not suffice, as little as possible stays empty.
    """
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
    """Return the bytes of a block as the engine counts them. Without its word, all groups have equal blocks."""
    return getattr(group.spec, "page_size_bytes", 1) * max(1, len(group.layers))


def plan_loads(
    names: Sequence[bytes],
    matched_blocks: int,
    first_token: int,
    end_token: int,
    tables: Tables,
    geometry: BlockGeometry,
) -> list[BlockTransfer]:
    """Return transfers that fill what the engine keeps of tokens `first_token` .. `end_token` (multiples of a block).

    `names[i]` names the prefix that ends with block `i`; `matched_blocks` is how far the cache reaches, which decides
    whether the last chunk is a tail. Of a group with a window these are the last blocks only, in chunks that may begin
    before them. Raises ValueError where a block that has to be filled is null, not there, or not to be filled whole.
    """
    if first_token % geometry.block_tokens or end_token % geometry.block_tokens:
        raise ValueError(
            f"expected whole blocks of {geometry.block_tokens} tokens to load, found tokens {first_token} .. {end_token}"
        )
    transfers = []
    for position, group in enumerate(geometry.groups):
        table, step = tables[group.index], geometry.chunk_tokens // group.block_tokens
        lower = max(first_token // group.block_tokens, group.first_block(end_token))
        upper = end_token // group.block_tokens
        chunks = range(lower // step, -(-upper // step))
        for name, part in named_parts(position, chunks, names, matched_blocks, geometry):
            first, stop = max(lower, part.start), min(upper, part.stop)
            blocks = tuple(table[first:stop])
            if len(blocks) != stop - first or (group.window_tokens is not None and NULL_BLOCK in blocks):
                raise ValueError(
                    f"group {group.index}: expected blocks {first} .. {stop - 1} to load into, found {blocks}"
                )
            transfers.append(BlockTransfer(name, len(part), first - part.start, blocks, position))
    return transfers


def blocks_behind(tables: Tables, computed_tokens: int, geometry: BlockGeometry) -> set[int]:
    """Return blocks that do not hold the first `computed_tokens` tokens, which the engine found in its own cache or has had
    loaded.
    """
    sizes = {group.index: group.block_tokens for group in geometry.groups}
    behind = {
        block
        for index, table in enumerate(tables)
        for block in table[computed_tokens // sizes[index] if index in sizes else 0 :]
    }
    return behind - {NULL_BLOCK}


def given_away(output: SchedulerOutput, geometry: BlockGeometry) -> set[int]:
    """Blocks that requests get in a step. A window's may have been another request's a step ago, and be on their way into
    the cache still.
    """
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
    """Return transfers for the chunks that became whole (blocks `saved_blocks` .. `ready_blocks`), and the new
    `saved_blocks`. `last` is as for `end_of_saves`.

    Chunks of which a window has left a block behind already are not stored. `states` are those that the engine has: group,
    block, and the tokens after which it is the state.
    """
    ready = min(ready_blocks, len(names))
    for group in geometry.groups:
        if group.window_tokens is None:
            ready = min(ready, len(tables[group.index]) * group.block_tokens // geometry.block_tokens)
    end = end_of_saves(ready, geometry, last=last)
    if end <= saved_blocks:
        return [], saved_blocks
    transfers = []
    ends = {(index, tokens): block for index, block, tokens in states}
    chunks = range(saved_blocks // geometry.blocks_per_chunk, geometry.chunks_in(end))
    for position, group in enumerate(geometry.groups):
        table = tables[group.index]
        for name, part in named_parts(position, chunks, names, end, geometry):
            if group.recurrent:
                blocks: tuple[int, ...] = (ends.get((group.index, part.stop * group.block_tokens), NULL_BLOCK),)
            else:
                blocks = tuple(table[part.start : part.stop])
            whole = group.window_tokens is None or NULL_BLOCK not in blocks
            if part and len(blocks) == len(part) and whole:
                transfers.append(BlockTransfer(name, len(part), 0, blocks, position))
    return transfers, end
