"""KV events: tell routers which blocks of the engine our tiers hold.

The workers report which chunks come and go in which tier (`Residency`, `Change`). The scheduler's half knows the blocks
of a chunk (`ChunkBlocks`) from the request that stored or loaded it. `AnnouncedBlocks` makes of both the fewest events
that keep a router right: a block is stored in a medium when the first chunk that contains it is there on all ranks, and
removed when the last one is gone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core import kv_cache_utils

from tiercache.bridge import CacheThread
from tiercache.cache import TierCache
from tiercache.core.keys import ChunkKey
from tiercache.core.layout import Layout
from tiercache.integrations.vllm.logs import survives
from tiercache.integrations.vllm.planning import BlockGeometry, BlockTransfer, KvGroup, keys_of, suffix_of
from tiercache.tiers.base import Tier

if TYPE_CHECKING:
    from vllm.v1.request import Request

MEDIA = {"cpu": "CPU", "shared_memory": "STORAGE", "disk": "STORAGE", "gds": "STORAGE"}
"""The tiers of this host, and vLLM's names for what they are. Others are reached by every engine alike, which tells a router
nothing, and what leaves them is not known here."""
MOST_CHUNKS = 65536
"""The most chunks that are announced at a time. Each takes about 2 KiB for 256 tokens in blocks of 16."""
_MOST_AT_ONCE = 8192
"""Changes that a step carries; the rest goes with the next one."""
_LINGER_S = 1.0
"""The time for which steps are asked for after the last report, while a worker is busy."""
_FIELDS = frozenset(BlockStored.__struct_fields__)
_LOCALITY = {"locality": "LOCAL"} if "locality" in _FIELDS else {}
"""Older vLLMs say nothing about that."""


class Change(NamedTuple):
    """A chunk has come to a tier of a rank, or has gone from it."""

    name: bytes
    tier: str
    there: bool
    rank: int
    part: int
    """The one of the chunk's `parts` that the rank has there: ranks that share a tier may have the same."""
    parts: int


class Report(NamedTuple):
    """The changes that one worker reports with a step."""

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
    """The hash of the block before them."""
    tokens: array[int]
    block_tokens: int
    group: int = 0
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] | None = None
    """The things that vLLM hashed besides the tokens of each block: images, cache salt, adapter."""


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
    """The part that each rank has, by tier."""
    media: set[str] = field(default_factory=set)
    """The media in which the chunk is announced."""


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
        """Return True if the chunk is known. It counts as named now."""
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
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _settle(self, name: bytes, chunk: _Chunk, medium: str, parts: int) -> None:
        """The file tiers of a host all have the same parts."""
        there = any(MEDIA[tier] == medium and len(set(ranks.values())) == parts for tier, ranks in chunk.ranks.items())
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
        """Return how many of its first blocks another chunk holds in that medium."""
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


class KvEvents:
    """The scheduler's half. Of groups with a window nothing is told: what they keep is of use at the end of a hit only."""

    def __init__(self, geometry: BlockGeometry, hash_tokens: int) -> None:
        """Each of a request's block hashes stands for `hash_tokens`."""
        self.announced = AnnouncedBlocks()
        self._geometry = geometry
        self._hash_tokens = hash_tokens
        self._kinds = {group.index: _kind_of(group) for group in geometry.groups}
        self._busy: set[int] = set()
        """Ranks that may soon have more to say."""
        self._reported_s = 0.0

    @property
    def wants_step(self) -> bool:
        """One more step is worth having, though no request needs it: events go out with steps, and what was written since
        the last one, and evicted for it, would be told only with the next request. Not for long where a tier hangs.
        """
        return bool(self._busy) and time.monotonic() - self._reported_s < _LINGER_S

    def reported(self, reports: Sequence[Report]) -> None:
        self._reported_s = time.monotonic()
        for report in reports:
            self.announced.changed(report.changes)
            (self._busy.add if report.is_busy else self._busy.discard)(report.rank)

    @survives(lambda: None)
    def moves(self, request: Request, names: Sequence[bytes], first: int, transfers: Sequence[BlockTransfer]) -> None:
        """A request stores or loads these chunks, of which none lies before block `first`."""
        geometry = self._geometry
        start = geometry.whole_chunks(first)
        ends = {name: end for end, name in enumerate(names[start:], start + 1)} if transfers else {}
        for transfer in transfers:
            group = geometry.groups[transfer.group]
            # Of the parts of a rank, which come and go together, the last says it for all.
            tells = group.window_tokens is None and (geometry.parts is None or group.part == geometry.parts.here - 1)
            if tells and not self.announced.knows(transfer.name):
                end = ends[transfer.name.removesuffix(suffix_of(transfer.group, geometry))]
                blocks = transfer.chunk_blocks * group.block_tokens // geometry.block_tokens
                self.announced.know(transfer.name, self._described(request, transfer.group, end - blocks, end))

    def take(self) -> list[KVCacheEvent]:
        return [
            _removed(event) if isinstance(event, Removed) else _stored(event, self._kinds[event.chunk.group])
            for event in self.announced.take()
        ]

    def _described(self, request: Request, position: int, start: int, end: int) -> ChunkBlocks:
        """Blocks `start` .. `end` of the geometry's, as the group counts them."""
        group = self._geometry.groups[position]
        first_token, end_token = start * self._geometry.block_tokens, end * self._geometry.block_tokens
        step = group.block_tokens // self._hash_tokens
        first, stop = first_token // group.block_tokens, end_token // group.block_tokens
        hashes = request.block_hashes
        lora = request.lora_request
        extra = [
            kv_cache_utils.generate_block_hash_extra_keys(
                request, block * group.block_tokens, (block + 1) * group.block_tokens, 0
            )[0]
            for block in range(first, stop)
        ]
        return ChunkBlocks(
            tuple(hashes[(block + 1) * step - 1] for block in range(first, stop)),
            hashes[first * step - 1] if first else None,
            array("I", request.all_token_ids[first_token:end_token]),
            group.block_tokens,
            group.index,
            lora.adapter_id if lora is not None else None,
            lora.name if lora is not None else None,
            tuple(extra) if any(extra) else None,
        )


def _kind_of(group: KvGroup) -> dict[str, str]:
    """Return the fields by which vLLM's events describe such blocks."""
    if group.spec is None or "kv_cache_spec_kind" not in _FIELDS:
        return {}
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    return {"kv_cache_spec_kind": get_kv_cache_spec_kind(group.spec).value}


def _stored(event: Stored, kind: dict[str, str]) -> KVCacheEvent:
    chunk, first = event.chunk, event.first
    parent = chunk.hashes[first - 1] if first else chunk.parent
    untagged = getattr(kv_cache_utils, "to_event_extra_keys", list)  # older vLLMs have no tags
    return BlockStored(
        block_hashes=[kv_cache_utils.maybe_convert_block_hash(value) for value in chunk.hashes[first:]],
        parent_block_hash=None if parent is None else kv_cache_utils.maybe_convert_block_hash(parent),
        token_ids=chunk.tokens[first * chunk.block_tokens :].tolist(),
        block_size=chunk.block_tokens,
        lora_id=chunk.lora_id,
        medium=event.medium,
        lora_name=chunk.lora_name,
        # What the engine says of its own blocks has an entry a block, None for nothing.
        extra_keys=untagged(chunk.extra_keys[first:] if chunk.extra_keys else [None] * (len(chunk.hashes) - first)),
        group_idx=chunk.group,
        **kind,
        **_LOCALITY,
    )


def _removed(event: Removed) -> KVCacheEvent:
    hashes = [kv_cache_utils.maybe_convert_block_hash(value) for value in event.hashes]
    return BlockRemoved(block_hashes=hashes, medium=event.medium, group_idx=event.group, **_LOCALITY)


class ChunkWatch:
    """Follows in which tiers of this host watched chunks are. All but the methods with an underscore are called by the
    engine's thread and do not wait; those belong to the loop.

    Of what happens to a chunk between two calls of `take` only the last counts, so nothing here is larger than what is
    watched.
    """

    def __init__(self, thread: CacheThread, place_of: Callable[[Tier], str], most: int | None = None) -> None:
        """`place_of` names a tier; tiers of one name count as one place. Only the `most` chunks that were named last are
        watched: the others are told as gone.
        """
        self._thread = thread
        self._place_of = place_of
        self._most = most
        self._names: OrderedDict[ChunkKey, bytes] = OrderedDict()
        self._there: dict[ChunkKey, set[str]] = {}
        self._tiers: list[Tier] = []
        self._lock = threading.Lock()
        self._changes: dict[tuple[bytes, str], bool] = {}
        self._call(self._begin)

    @property
    def has_news(self) -> bool:
        return bool(self._changes)

    def watch(self, names: Mapping[ChunkKey, bytes]) -> None:
        """Tell of these chunks: where they are, and when they come and go."""
        if names:
            self._call(self._watch, names)

    def drop(self, keys: Iterable[ChunkKey]) -> None:
        """Watch these no longer. Nothing is told of that."""
        self._call(self._drop, keys)

    def forget_everything(self) -> None:
        """Tell all as gone, wherever they are: no request finds them any more."""
        self._call(self._shrink, 0)

    def take(self, most: int | None = None) -> dict[tuple[bytes, str], bool]:
        """Return what changed since the last call, or `most` of it: whether a name's chunk is in a place."""
        with self._lock:
            taken = dict(islice(self._changes.items(), most))
            for change in taken:
                del self._changes[change]
        return taken

    def _call(self, call: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the cache is closed: nothing changes any more
            self._thread.loop.call_soon_threadsafe(call, *arguments)

    def _begin(self) -> None:
        self._tiers = local_tiers(self._thread.cache)
        for tier in self._tiers:
            tier.tell(self._look)

    def _watch(self, names: Mapping[ChunkKey, bytes]) -> None:
        for key, name in names.items():
            self._names[key] = name
            self._names.move_to_end(key)
            self._look(key)
        if self._most is not None:
            self._shrink(self._most)

    def _drop(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            self._names.pop(key, None)
            self._there.pop(key, None)

    def _shrink(self, most: int) -> None:
        while len(self._names) > most:
            key, name = self._names.popitem(last=False)
            self._change(name, self._there.pop(key, ()), there=False)

    def _look(self, key: ChunkKey) -> None:
        name = self._names.get(key)
        if name is None:
            return
        before = self._there.get(key, set())
        now = {self._place_of(tier) for tier in self._tiers if tier.contains(key)}
        if now != before:
            self._there[key] = now
            self._change(name, now - before, there=True)
            self._change(name, before - now, there=False)

    def _change(self, name: bytes, places: Iterable[str], *, there: bool) -> None:
        with self._lock:
            for place in places:
                self._changes[name, place] = there


def local_tiers(cache: TierCache) -> list[Tier]:
    """Return the tiers of this host. A hot cache that keeps nothing is on the way, and no place for chunks."""
    tiers: list[Tier] = [*([cache.cpu] if cache.cpu.keep else []), *cache.tiers]
    return [tier for tier in tiers if tier.name in MEDIA]


class Residency:
    """The worker's half of KV events: which watched chunks are in which tier of this rank, and what changed."""

    def __init__(self, thread: CacheThread, layout: Layout, geometry: BlockGeometry) -> None:
        cache = thread.cache
        self._namespace = cache.namespace
        self._geometry = geometry
        self._layout = layout
        self._chunks = ChunkWatch(thread, lambda tier: tier.name)
        self._writers = [writer for writer in cache.parts.fan_out.writers if writer.tier in local_tiers(cache)]
        self._was_busy = False

    def watch(self, watching: Mapping[bytes, bool]) -> None:
        """Watch these chunks, by name, from now on; or, with False, no longer."""
        if watching:
            keys = keys_of(self._namespace, list(watching), self._geometry)
            self._chunks.drop(keys)  # what is watched anew is told anew
            self._chunks.watch({key: name for key, name in zip(keys, watching, strict=True) if watching[name]})

    def take(self, *, is_storing: bool) -> Report | None:
        """Return what changed since the last call, or a part of it; None where there is no news. `is_storing`: blocks are on
        their way into the hot cache.
        """
        # The lengths of two dictionaries a tier, which may be looked at from here.
        is_busy = is_storing or any(writer.pending for writer in self._writers)
        if not self._chunks.has_news and is_busy == self._was_busy:
            return None
        self._was_busy = is_busy
        layout = self._layout
        own = layout.rank, layout.world_size
        shared = own if layout.parts else (layout.shard, layout.shards)
        changes = [
            Change(name, tier, there, layout.rank, *(own if tier == "cpu" else shared))
            for (name, tier), there in self._chunks.take(_MOST_AT_ONCE).items()
        ]
        return Report(layout.rank, changes, is_busy or self._chunks.has_news)
