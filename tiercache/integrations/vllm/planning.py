"""Decide how a request's blocks form chunks, which chunks to load and which to save. Pure: no vLLM, no asyncio.

A chunk is `blocks_per_chunk` engine blocks, counted from the start of the request; a tail is shorter. A chunk has the name
of its last block. Block names are chained over the whole prefix, so a tail never has the name of a full chunk.

Some models have several groups of layers. Some groups keep only a window (Gemma 3, gpt-oss) or a recurrent state (Granite
4, LFM2, Qwen3-Next). Each group has its own blocks and block table. A chunk covers the same tokens in all groups. Each
group's part of it is stored separately, under the chunk's name and the group's position. A hit of n chunks needs all n
parts from a group that sees every token. From a group with a window it needs only the parts with a block that the engine
still keeps at the end of the hit, since earlier blocks are not read any more. If a window is shorter than a chunk, only
the end of the chunk can be needed, and only that is stored.

A recurrent state is like a window of one block, the last. It exists only where a step of the engine ended, and the engine
reports where (vLLM's boundary states). Models with states have chunks of a single block, so that a hit can end at the last
state of a prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from tiercache.core.keys import TAG_BYTES, ChunkKey, keys_from_hashes

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(frozen=True)
class KvGroup:
    """Layers that share block tables. Blocks of different groups are unrelated."""

    index: int
    """Index of the group's block table in a request's `Tables`."""
    block_tokens: int
    layers: tuple[str, ...] = ()
    """Names of the layers; empty means all layers of the model."""
    window_tokens: int | None = None
    """Tokens that a token sees, itself included: the engine keeps the last `window_tokens - 1`. None: all."""
    spec: Any = field(default=None, compare=False, repr=False)
    """vLLM's own description of the KV."""
    part: int = 0
    """Index of this part of the KV heads among the rank's parts, if heads are cut into parts (`HeadParts`)."""
    recurrent: bool = False
    """A block holds one state for all tokens up to its end, and only if a step ended there. Such a group has a window of two
    tokens, since the next token needs one block, the last."""

    def first_block(self, computed_tokens: int) -> int:
        """Return the first block kept after `computed_tokens` tokens are computed (vLLM's `get_num_skipped_tokens`)."""
        if self.window_tokens is None:
            return 0
        return max(0, computed_tokens - self.window_tokens + 1) // self.block_tokens


@dataclass(frozen=True)
class HeadParts:
    """How KV heads are cut: `all` parts over all ranks, `here` parts on each rank, and `first`, the index of this rank's
    first part. The scheduler uses `first` 0 for every rank.
    """

    all: int
    here: int
    first: int = 0


@dataclass(frozen=True)
class BlockGeometry:
    """Sizes of blocks and chunks. `block_tokens` is a multiple of every group's block size."""

    block_tokens: int
    blocks_per_chunk: int
    save_tails: bool = False
    """Store tails. Needs a plain geometry."""
    groups: tuple[KvGroup, ...] = ()
    """The default is one group that keeps every token."""
    parts: HeadParts | None = None
    """If set, `groups` repeats every group for each part of a rank."""

    @classmethod
    def for_chunk_size(
        cls, chunk_tokens: int, block_tokens: int, save_tails: bool, groups: tuple[KvGroup, ...] = ()
    ) -> BlockGeometry:
        """Round `chunk_tokens` to whole blocks, at least one. With recurrent states a chunk is one block.

        Chunks are halved until the shortest window holds one, at most to `_LEAST_PART`: a group with a shorter window
        stores only the chunk's end, and the rest of its slot stays empty.
        """
        blocks = 1 if any(group.recurrent for group in groups) else max(1, round(chunk_tokens / block_tokens))
        least = max(1, blocks // _LEAST_PART)
        shortest = min((group.window_tokens for group in groups if group.window_tokens is not None), default=None)
        while shortest is not None and blocks > least and blocks * block_tokens > shortest:
            blocks //= 2
        geometry = cls(block_tokens, blocks, groups=groups)
        return replace(geometry, save_tails=save_tails and geometry.plain)

    def __post_init__(self) -> None:
        if not self.groups:
            object.__setattr__(self, "groups", (KvGroup(0, self.block_tokens),))

    @cached_property
    def plain(self) -> bool:
        """True if all layers keep every token in blocks of one table, and heads are not cut into parts.

        Then a hit may be shortened anywhere, tails can be stored, and the engine accepts single blocks that failed to load.
        """
        first = self.groups[0]
        alone = len(self.groups) == 1 and not first.layers
        return alone and first.window_tokens is None and self.parts is None

    @property
    def chunk_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_chunk

    def whole_chunks(self, blocks: int) -> int:
        """Return `blocks` rounded down to whole chunks."""
        return blocks - blocks % self.blocks_per_chunk

    def chunks_in(self, blocks: int) -> int:
        """Return how many chunks hold `blocks` blocks: the full ones, and the tail if tails are stored."""
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
    """Position in the geometry's `groups` of the group that has the blocks."""


class Sibling(NamedTuple):
    """Another request's chunk, whose first blocks a request can load."""

    name: bytes
    chunk_blocks: int
    """Number of blocks of the whole chunk or tail."""


@dataclass
class Match:
    """The result of a lookup: blocks of the contiguous prefix, and their tokens by tier."""

    blocks: int = 0
    tokens_by_tier: dict[str, int] = field(default_factory=dict)
    failed: bool = False
    """No answer came, which counts as a miss."""
    held: bool = False
    """All blocks are in RAM and stay there for `HELD_FOR_S` after the question, so loading them cannot fail."""
    sibling: Sibling | None = None
    """The chunk whose first blocks are the blocks after the last whole chunk of this match."""

    def shortened(self, blocks: int, geometry: BlockGeometry) -> Match:
        """Return the match cut to its first `blocks` blocks. Tokens are taken from the first tiers first."""
        left, tokens = blocks * geometry.block_tokens, {}
        for tier, count in self.tokens_by_tier.items():
            tokens[tier] = min(left, count)
            left -= tokens[tier]
        return Match(blocks, tokens)


def agreed(answers: Sequence[Match], geometry: BlockGeometry) -> Match:
    """Return the match that all workers have, given one answer per worker.

    A worker with a longer match may lack the tail of a shorter one: it may have only the full chunk that this tail became.
    So tails count only if all matches are equally long, and siblings only if all workers have the same one.
    """
    match = min(answers, key=lambda match: match.blocks)
    if any((answer.blocks, answer.sibling) != (match.blocks, match.sibling) for answer in answers):
        match = match.shortened(geometry.whole_chunks(match.blocks), geometry)
    return replace(match, held=all(answer.held for answer in answers))


def loadable_tokens(
    match: Match, request_tokens: int, computed_tokens: int, least_tokens: int, geometry: BlockGeometry
) -> int:
    """Return how many tokens to load beyond the `computed_tokens` (whole blocks) that the engine has.

    They are whole blocks and never the whole request, since the last token has to be computed to get logits (vLLM's own
    prefix cache does the same). Returns 0 if the hit is shorter than `least_tokens`.
    """
    usable = min(match.blocks, (request_tokens - 1) // geometry.block_tokens) * geometry.block_tokens
    if not geometry.plain and usable < match.blocks * geometry.block_tokens:
        return 0  # windows were looked up for the end of this hit, not of a shorter one
    return max(0, usable - computed_tokens) if usable >= least_tokens else 0


def end_of_saves(ready_blocks: int, geometry: BlockGeometry, *, last: bool) -> int:
    """Return how many of the first `ready_blocks` blocks can be saved.

    `last` means that no further block is expected soon, so a tail is saved too (if `save_tails`).
    """
    return ready_blocks if last and geometry.save_tails else geometry.whole_chunks(ready_blocks)


NAME_BYTES = 32
"""The length of a block's name without its tenant's tag."""

Tables = Sequence[Sequence[int]]
"""A request's block ids by group, as vLLM numbers groups. Block 0 is the null block."""

NULL_BLOCK = 0
"""vLLM's null block, which never holds a request's KV. vLLM itself lets padding write to it."""
_TAGGED_BYTES = NAME_BYTES + TAG_BYTES
"""The length of a block's name with its tenant's tag."""
_SUFFIX_BYTES = 2
"""The length of the group's number at the end of a chunk's name."""
_LEAST_PART = 4
"""Largest divisor of the configured `chunk_size`, since small chunks cost more per token."""


GroupChunk = tuple[int, int]
"""A group's part of a chunk: the group's position in the geometry's `groups`, and the number of the chunk."""


def suffix_of(group: int, geometry: BlockGeometry) -> bytes:
    """Return the suffix of a chunk's name for one group's part; empty if there is only one part."""
    return group.to_bytes(_SUFFIX_BYTES, "big") if len(geometry.groups) > 1 or geometry.parts is not None else b""


def in_parts(geometry: BlockGeometry, groups: Sequence[KvGroup], parts: HeadParts) -> BlockGeometry:
    """Return the geometry with every one of `groups` cut into a rank's parts."""
    cut = tuple(replace(group, part=part) for group in groups for part in range(parts.here))
    return replace(geometry, groups=cut, save_tails=False, parts=parts)


def keys_of(namespace: bytes, names: Sequence[bytes], geometry: BlockGeometry) -> list[ChunkKey]:
    """Return the keys of a worker's chunks.

    Names are the same on all workers and number each rank's parts from 0. Keys number the parts of all ranks. A tenant's
    tag moves from inside the name to the end of the key.
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
    """Return the chunks that groups with a window need for a hit of `chunks` chunks, the last one first."""
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


def names_of(
    chunks: Sequence[GroupChunk], names: Sequence[bytes], geometry: BlockGeometry, blocks: int | None = None
) -> list[bytes]:
    """Return the names of `chunks`, where `names` has one name per block.

    A chunk that would extend past the first `blocks` blocks is a tail, which ends with them.
    """
    step, end = geometry.blocks_per_chunk, len(names) if blocks is None else blocks
    suffixes = [suffix_of(group, geometry) for group in range(len(geometry.groups))]
    return [names[min((chunk + 1) * step, end) - 1] + suffixes[group] for group, chunk in chunks]


def held_names(names: Sequence[bytes], blocks: int, geometry: BlockGeometry) -> list[bytes]:
    """Return the names of the chunks that a request needs to continue after its first `blocks` blocks."""
    chunks = geometry.chunks_in(blocks)
    return names_of(full_chunks(chunks, geometry) + window_chunks(chunks, geometry), names, geometry, blocks)


def all_names(names: Sequence[bytes], geometry: BlockGeometry) -> list[bytes]:
    """Return the names of every chunk that a request with these blocks may have stored, tails included."""
    if geometry.save_tails:
        return list(names)
    chunks = range(len(names) // geometry.blocks_per_chunk)
    return names_of([(group, chunk) for group in range(len(geometry.groups)) for chunk in chunks], names, geometry)


def part_of(group: KvGroup, chunk: int, end: int, geometry: BlockGeometry) -> range:
    """Return the group's blocks, from the start of the request, that are stored for a chunk of the first `end` blocks."""
    a_block, step = geometry.block_tokens // group.block_tokens, geometry.blocks_per_chunk
    end = min((chunk + 1) * step, end)
    return range(max(chunk * step * a_block, group.first_block(end * geometry.block_tokens)), end * a_block)


def part_blocks(group: KvGroup, geometry: BlockGeometry) -> int:
    """Return the largest number of the group's blocks that are stored for a chunk."""
    return max(len(part_of(group, chunk, 2 * geometry.blocks_per_chunk, geometry)) for chunk in range(2))


def plan_loads(
    names: Sequence[bytes],
    matched_blocks: int,
    first_token: int,
    end_token: int,
    tables: Tables,
    geometry: BlockGeometry,
    sibling: Sibling | None = None,
) -> list[BlockTransfer]:
    """Return transfers that fill the blocks kept for tokens `first_token` .. `end_token` (multiples of a block).

    `names[i]` names the prefix that ends with block `i`. `matched_blocks` is the length of the hit, which decides whether
    the last chunk is a tail. `sibling`: see `Match`; it needs a plain geometry. Groups with a window load only the blocks
    that the engine keeps; the first chunk may begin before them. Raises ValueError if a block to fill is null, missing, or
    would be filled only in part.
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
        chunks = [(position, chunk) for chunk in range(lower // step, -(-upper // step))]
        for (_, chunk), name in zip(chunks, names_of(chunks, names, geometry, matched_blocks), strict=True):
            part = part_of(group, chunk, matched_blocks, geometry)
            first, stop = max(lower, part.start), min(upper, part.stop)
            blocks = tuple(table[first:stop])
            if len(blocks) != stop - first or (group.window_tokens is not None and NULL_BLOCK in blocks):
                raise ValueError(
                    f"group {group.index}: expected blocks {first} .. {stop - 1} to load into, found {blocks}"
                )
            transfers.append(BlockTransfer(name, len(part), first - part.start, blocks, position))
    if sibling and end_token > geometry.whole_chunks(matched_blocks) * geometry.block_tokens:
        transfers[-1] = transfers[-1]._replace(name=sibling.name, chunk_blocks=sibling.chunk_blocks)
    return transfers


def given_away(output: SchedulerOutput, geometry: BlockGeometry) -> set[int]:
    """Return the blocks that requests get in a step.

    With windows, such a block may have been another request's one step ago, and its old contents may still be on their
    way into the cache.
    """
    cached = output.scheduled_cached_reqs
    # Tables of blocks, and the number of first tokens that the engine found in its own cache, or that were loaded.
    got = [(new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs]
    for request_id, tables, tokens in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        got.append((tables or (), tokens if request_id in cached.resumed_req_ids else 0))
    sizes = {group.index: group.block_tokens for group in geometry.groups}
    given = {copy.dst_block_id for copy in output.kv_cache_block_copies or ()}
    for tables, known in got:
        for index, table in enumerate(tables):
            given.update(table[known // sizes[index] if index in sizes else 0 :])
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
    """Return transfers for the chunks completed by blocks `saved_blocks` .. `ready_blocks`, and the new `saved_blocks`.

    `last` is as for `end_of_saves`. A chunk is not stored if the engine has already dropped one of its blocks from a window.
    `states` lists the recurrent states that the engine has: group, block, and the number of tokens that the state covers.
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
        table, own = tables[group.index], [(position, chunk) for chunk in chunks]
        for chunk, name in zip(chunks, names_of(own, names, geometry, end), strict=True):
            part = part_of(group, chunk, end, geometry)
            if group.recurrent:
                blocks: tuple[int, ...] = (ends.get((group.index, part.stop * group.block_tokens), NULL_BLOCK),)
            else:
                blocks = tuple(table[part.start : part.stop])
            whole = group.window_tokens is None or NULL_BLOCK not in blocks
            if part and len(blocks) == len(part) and whole:
                transfers.append(BlockTransfer(name, len(part), 0, blocks, position))
    return transfers, end
