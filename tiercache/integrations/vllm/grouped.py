"""Models whose layers are in several groups, some of which keep a window only (Gemma 3, gpt-oss) or a recurrent state
(Granite 4, LFM2, Qwen3-Next). Pure.

Each group has blocks and a block table of its own. A chunk is the same tokens in all groups, and a chunk of one group is
stored by itself, under the chunk's name and the group's position. A hit of so many chunks needs all of them of a group that
sees every token, and of one with a window those that hold a block which the engine keeps when that much is computed: what
the blocks before them hold will not be read any more. Where a window is shorter than a chunk, only the end of the chunk can
ever be needed, and only that is stored.

A recurrent state is like a window of one block, the last, but it is there only where a step of the engine ended: the engine
says where (vLLM's boundary states). So chunks are single blocks where there are states: the last one of a prompt counts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tiercache.core.keys import TAG_BYTES, ChunkKey, keys_from_hashes
from tiercache.integrations.vllm.block_names import NAME_BYTES
from tiercache.integrations.vllm.planning import (
    BlockGeometry,
    BlockTransfer,
    HeadParts,
    KvGroup,
    chunk_ends,
    plan_load,
    plan_save,
    stored_ends,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

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
                raise ValueError(f"group {group.index}: expected blocks {first} .. {stop - 1} to load into, found {blocks}")
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
    for request_id, tables, tokens in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
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
