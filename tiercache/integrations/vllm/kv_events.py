"""What routers are told of our tiers: which of the engine's blocks they hold. Pure: no vLLM, no asyncio.

The workers say which chunks come and go in which tier (`Change`); the scheduler's half knows the blocks of a chunk
(`ChunkBlocks`) from the request that stored or loaded it. `AnnouncedBlocks` makes of both the fewest events that keep a
router right: a block is stored in a medium when the first chunk that holds it is there whole, on all ranks, and removed
when the last one is not.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MEDIA = {"cpu": "CPU", "shared_memory": "STORAGE", "disk": "STORAGE", "gds": "STORAGE"}
"""The tiers of this host, and vLLM's names for what they are. Others are reached by every engine alike, which tells a router
nothing, and what leaves them is not known here."""
MOST_CHUNKS = 65536
"""That are announced at a time: of 256 tokens in blocks of 16, about 2 KiB each."""


class Change(NamedTuple):
    """A chunk has come to a tier of a rank, or has gone from it."""

    name: bytes
    tier: str
    there: bool
    rank: int
    part: int
    """Which of the chunk's `parts` the rank has there: ranks that share a tier may have the same."""
    parts: int


class Report(NamedTuple):
    """Of one worker, with a step."""

    rank: int
    changes: list[Change]
    is_busy: bool
    """More may follow soon, without a request: chunks are being written."""


@dataclass(frozen=True)
class ChunkBlocks:
    """The engine's blocks in a chunk, as vLLM's own events have them."""

    hashes: tuple[bytes, ...]
    """The engine's, of each block; not the names under which we store."""
    parent: bytes | None
    """Of the block before them."""
    tokens: array[int]
    block_tokens: int
    group: int = 0
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] | None = None
    """What vLLM hashed besides the tokens of each block: images, cache salt, adapter."""


@dataclass
class Stored:
    medium: str
    chunk: ChunkBlocks
    first: int
    """The blocks from this one on; those before it were stored already."""


@dataclass
class Removed:
    medium: str
    group: int
    hashes: list[bytes]


@dataclass
class _Chunk:
    blocks: ChunkBlocks
    ranks: dict[str, dict[int, int]] = field(default_factory=dict)
    """By tier: which rank has which part."""
    media: set[str] = field(default_factory=set)
    """Where it is announced."""


class AnnouncedBlocks:
    """Bounded by `most` chunks. The one that was named longest ago goes, and is announced as removed though it may be there:
    a router that knows less sends a request elsewhere, and one that knows more sends it in vain.
    """

    def __init__(self, most: int = MOST_CHUNKS) -> None:
        self._most = most
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()
        self._heads: dict[tuple[int, bytes], list[bytes]] = {}
        """Chunks that begin with the same block: tails of different lengths, and what they became."""
        self._events: list[Stored | Removed] = []
        self._watching: dict[bytes, bool] = {}

    def __len__(self) -> int:
        return len(self._chunks)

    def knows(self, name: bytes) -> bool:
        """And if so, it is named now."""
        if name not in self._chunks:
            return False
        self._chunks.move_to_end(name)
        return True

    def know(self, name: bytes, blocks: ChunkBlocks) -> None:
        """A chunk that a request has stored or loads; where it is, the workers are to say."""
        if self.knows(name):
            return
        self._chunks[name] = _Chunk(blocks)
        self._heads.setdefault((blocks.group, blocks.hashes[0]), []).append(name)
        self._watching[name] = True
        while len(self._chunks) > self._most:
            self._forget(next(iter(self._chunks)))

    def changed(self, changes: Sequence[Change]) -> None:
        for change in changes:
            chunk = self._chunks.get(change.name)
            if chunk is None:
                continue
            ranks = chunk.ranks.setdefault(change.tier, {})
            if change.there:
                ranks[change.rank] = change.part
            else:
                ranks.pop(change.rank, None)
                if not ranks:
                    del chunk.ranks[change.tier]
            self._settle(change.name, chunk, MEDIA[change.tier], change.parts)

    def forget_everything(self) -> None:
        """No request finds what was stored so far."""
        while self._chunks:
            self._forget(next(iter(self._chunks)))

    def take_watching(self) -> dict[bytes, bool]:
        """Chunks that the workers have to watch from now on (True), or no longer; since the last call."""
        watching, self._watching = self._watching, {}
        return watching

    def take(self) -> list[Stored | Removed]:
        """What is to be told since the last call, in this order."""
        events, self._events = self._events, []
        return events

    def _settle(self, name: bytes, chunk: _Chunk, medium: str, parts: int) -> None:
        """The file tiers of a host all have the same parts."""
        there = any(
            MEDIA[tier] == medium and len(set(ranks.values())) == parts for tier, ranks in chunk.ranks.items()
        )
        if there and medium not in chunk.media:
            shared = self._shared(name, chunk, medium)
            chunk.media.add(medium)
            if shared < len(chunk.blocks.hashes):
                self._events.append(Stored(medium, chunk.blocks, shared))
        elif not there and medium in chunk.media:
            self._remove(name, chunk, medium)
            if not chunk.media:
                self._chunks.move_to_end(name, last=False)  # nothing is lost with it

    def _remove(self, name: bytes, chunk: _Chunk, medium: str) -> None:
        chunk.media.discard(medium)
        gone = chunk.blocks.hashes[self._shared(name, chunk, medium) :]
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed) and (last.medium, last.group) == (medium, chunk.blocks.group):
            last.hashes.extend(gone)
        elif gone:
            self._events.append(Removed(medium, chunk.blocks.group, list(gone)))

    def _forget(self, name: bytes) -> None:
        chunk = self._chunks[name]
        for medium in sorted(chunk.media):
            self._remove(name, chunk, medium)
        del self._chunks[name]
        head = (chunk.blocks.group, chunk.blocks.hashes[0])
        self._heads[head].remove(name)
        if not self._heads[head]:
            del self._heads[head]
        self._watching[name] = False

    def _shared(self, name: bytes, chunk: _Chunk, medium: str) -> int:
        """How many of its first blocks another chunk holds in that medium."""
        most = 0
        for other in self._heads[chunk.blocks.group, chunk.blocks.hashes[0]]:
            if other != name and medium in self._chunks[other].media:
                most = max(most, _common(chunk.blocks.hashes, self._chunks[other].blocks.hashes))
        return most


def _common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """The length of the longest prefix of both."""
    for position, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return position
    return min(len(one), len(other))
