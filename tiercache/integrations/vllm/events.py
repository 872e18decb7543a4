"""KV events: tell routers which blocks of the engine our tiers hold.

The worker of rank 0 reports which chunks come and go in which medium (`Residency`, `Changes`), and stands for the other
ranks, which store and evict alike. The scheduler's half knows the blocks of a chunk (`KnownChunk`) from the request that
stored or loaded it. `KvEvents` combines both into as few events as a router needs: a block is announced as stored in
a medium when the first chunk that contains it is there, and as removed when the last such chunk is gone.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import eq
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from tiercache.bridge import CacheThread
from tiercache.cache import TierCache
from tiercache.core.keys import ChunkKey
from tiercache.integrations.vllm.logs import survives
from tiercache.integrations.vllm.planning import BlockGeometry, BlockTransfer, keys_of, suffix_of
from tiercache.tiers.base import Tier

if TYPE_CHECKING:
    from vllm.v1.request import Request

MEDIA = {"cpu": "CPU", "shared_memory": "STORAGE", "disk": "STORAGE", "gds": "STORAGE"}
"""The tiers of this host, and vLLM's names of their media. Every engine reaches the other tiers equally well, so they do not
help a router, and this process does not see which chunks leave them."""
MOST_CHUNKS = 65536
"""Limit of the chunks announced at the same time. Each takes about 2 KiB for 256 tokens in blocks of 16."""
_MOST_AT_ONCE = 8192
"""Limit of the changes reported with one step; the rest follows with the next."""
_LOCALITY = "LOCAL"


Changes = Mapping[tuple[bytes, str], bool]
"""Chunks by name and medium, that have come to that medium (True), or have gone from it."""


@dataclass
class KnownChunk:
    """A chunk, as the engine's blocks in it, and where it is."""

    hashes: tuple[Any, ...]
    """The hash of each block in vLLM's own events. It is not the name under which tiercache stores the block."""
    parent: Any
    """The hash of the block before the first; None at the start of a prompt."""
    tokens: array[int]
    block_tokens: int
    group: int = 0
    kind: str | None = None
    """vLLM's name for the kind of the group's blocks."""
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] = ()
    """Inputs of vLLM's hash of each block besides its tokens: images, cache salt, adapter. Empty if no block has any."""
    media: set[str] = field(default_factory=set)
    """The media in which the chunk is announced."""

    def stored(self, medium: str, first: int = 0) -> BlockStored:
        """Return the event for the blocks from `first` on; those before are announced already."""
        untagged = getattr(kv_cache_utils, "to_event_extra_keys", list)  # vLLM 0.30 has no tags
        return BlockStored(
            block_hashes=list(self.hashes[first:]),
            parent_block_hash=self.hashes[first - 1] if first else self.parent,
            token_ids=self.tokens[first * self.block_tokens :].tolist(),
            block_size=self.block_tokens,
            lora_id=self.lora_id,
            medium=medium,
            lora_name=self.lora_name,
            # One entry per block, as in the engine's own events; None if a block has no extra keys.
            extra_keys=untagged(self.extra_keys[first:] or [None] * (len(self.hashes) - first)),
            group_idx=self.group,
            kv_cache_spec_kind=self.kind,
            locality=_LOCALITY,
        )


class KvEvents:
    """The scheduler's half: turns changes of chunks into events about blocks. Knows at most `MOST_CHUNKS` chunks.

    The least recently named chunk is forgotten first, and announced as removed even if it is still there. A router that
    misses a chunk only sends a request elsewhere; one that expects a missing chunk sends it here in vain. Groups with a
    window are not announced, since their blocks are useful only at the end of a hit.
    """

    def __init__(self, geometry: BlockGeometry, hash_tokens: int) -> None:
        """`hash_tokens` is the number of tokens that each of a request's block hashes covers."""
        self._geometry = geometry
        self._hash_tokens = hash_tokens
        self._chunks: OrderedDict[bytes, KnownChunk] = OrderedDict()
        self._heads: dict[tuple[int, bytes], list[bytes]] = {}
        """Chunks that begin with the same block: tails of different lengths, and the full chunk that they became."""
        self._events: list[BlockStored | BlockRemoved] = []
        self._watching: dict[bytes, bool] = {}

    @survives(lambda: None)
    def moves(self, request: Request, names: Sequence[bytes], first: int, transfers: Sequence[BlockTransfer]) -> None:
        """Add the chunks that a request stores or loads. None of them lies before block `first`."""
        geometry = self._geometry
        start = geometry.whole_chunks(first)
        ends = {name: end for end, name in enumerate(names[start:], start + 1)} if transfers else {}
        for transfer in transfers:
            group = geometry.groups[transfer.group]
            # The parts of a rank come and go together, so only the last one is announced.
            tells = group.window_tokens is None and (geometry.parts is None or group.part == geometry.parts.here - 1)
            end = ends.get(transfer.name.removesuffix(suffix_of(transfer.group, geometry)))
            # Another request's chunk, of which only the first blocks are loaded, has no end here.
            if tells and end is not None and not self.knows(transfer.name):
                blocks = transfer.chunk_blocks * group.block_tokens // geometry.block_tokens
                self.know(transfer.name, self._described(request, transfer.group, end - blocks, end))

    def _described(self, request: Request, position: int, start: int, end: int) -> KnownChunk:
        """Describe the geometry's blocks `start` .. `end` as blocks of the group."""
        group = self._geometry.groups[position]
        first_token, end_token = start * self._geometry.block_tokens, end * self._geometry.block_tokens
        step = group.block_tokens // self._hash_tokens
        first, stop = first_token // group.block_tokens, end_token // group.block_tokens

        def hash_of(block: int) -> Any:
            return kv_cache_utils.maybe_convert_block_hash(request.block_hashes[(block + 1) * step - 1])

        lora = request.lora_request
        extra = [
            kv_cache_utils.generate_block_hash_extra_keys(
                request, block * group.block_tokens, (block + 1) * group.block_tokens, 0
            )[0]
            for block in range(first, stop)
        ]
        return KnownChunk(
            tuple(map(hash_of, range(first, stop))),
            hash_of(first - 1) if first else None,
            array("I", request.all_token_ids[first_token:end_token]),
            group.block_tokens,
            group.index,
            get_kv_cache_spec_kind(group.spec).value,
            lora.adapter_id if lora is not None else None,
            lora.name if lora is not None else None,
            tuple(extra) if any(extra) else (),
        )

    def knows(self, name: bytes) -> bool:
        """Return True if the chunk is known, and mark it as the most recently named."""
        if name not in self._chunks:
            return False
        self._chunks.move_to_end(name)
        return True

    def know(self, name: bytes, chunk: KnownChunk) -> None:
        """Add an unknown chunk that a request stores or loads. The workers will report where it is."""
        self._chunks[name] = chunk
        self._heads.setdefault((chunk.group, chunk.hashes[0]), []).append(name)
        self._watching[name] = True
        while len(self._chunks) > MOST_CHUNKS:
            self._forget(next(iter(self._chunks)))

    def changed(self, changes: Changes) -> None:
        for (name, medium), there in changes.items():
            chunk = self._chunks.get(name)
            if chunk is None or there == (medium in chunk.media):
                continue
            if there:
                shared = self._shared(name, chunk, medium)
                chunk.media.add(medium)
                if shared < len(chunk.hashes):
                    self._events.append(chunk.stored(medium, shared))
            else:
                self._remove(name, chunk, medium)
                if not chunk.media:
                    self._chunks.move_to_end(name, last=False)  # forget it first: it is nowhere

    def forget_everything(self) -> None:
        """Forget all chunks and announce them as removed, since no request finds them any more."""
        while self._chunks:
            self._forget(next(iter(self._chunks)))

    def take_watching(self) -> dict[bytes, bool]:
        """Return the chunks that the workers have to start (True) or stop (False) watching, since the last call."""
        watching, self._watching = self._watching, {}
        return watching

    def take(self) -> list[BlockStored | BlockRemoved]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _remove(self, name: bytes, chunk: KnownChunk, medium: str) -> None:
        chunk.media.discard(medium)
        gone = list(chunk.hashes[self._shared(name, chunk, medium) :])
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and (last.medium, last.group_idx) == (medium, chunk.group):
            last.block_hashes.extend(gone)
        elif gone:
            self._events.append(BlockRemoved(gone, medium=medium, group_idx=chunk.group, locality=_LOCALITY))

    def _forget(self, name: bytes) -> None:
        chunk = self._chunks[name]
        for medium in sorted(chunk.media):
            self._remove(name, chunk, medium)
        del self._chunks[name]
        head = (chunk.group, chunk.hashes[0])
        self._heads[head].remove(name)
        if not self._heads[head]:
            del self._heads[head]
        self._watching[name] = False

    def _shared(self, name: bytes, chunk: KnownChunk, medium: str) -> int:
        """Return how many of the chunk's first blocks another chunk holds in that medium.

        Hashes are chained, so blocks after the first different one differ.
        """
        most = 0
        for other in self._heads[chunk.group, chunk.hashes[0]]:
            if other != name and medium in self._chunks[other].media:
                most = max(most, sum(map(eq, chunk.hashes, self._chunks[other].hashes)))
        return most


class ChunkWatch:
    """Tracks in which tiers of this host watched chunks are.

    The engine's thread calls the public methods, which do not wait; the work is done on the cache's loop. Only the last
    change of a chunk between two calls of `take` is kept, so memory is bounded by the number of watched chunks.
    """

    def __init__(self, thread: CacheThread, place_of: Callable[[Tier], str]) -> None:
        """`place_of` names the place of a tier; tiers with the same name count as one place.

        Only the `MOST_CHUNKS` chunks that were watched last are tracked. Older ones are reported as gone.
        """
        self._thread = thread
        self._place_of = place_of
        self._names: OrderedDict[ChunkKey, bytes] = OrderedDict()
        self._there: dict[ChunkKey, set[str]] = {}
        self._lock = threading.Lock()
        self._changes: dict[tuple[bytes, str], bool] = {}
        self._tiers = self._attached()
        self._thread.call_soon(self._begin)

    @property
    def has_news(self) -> bool:
        """True if `take` returns changes. Looks at all chunks anew once a tier was detached or attached."""
        if (tiers := self._attached()) != self._tiers:
            self._tiers = tiers
            self._thread.call_soon(self._look_at_all)
        return bool(self._changes)

    def watch(self, names: Mapping[ChunkKey, bytes]) -> None:
        """Report where these chunks are, and when they come and go."""
        if names:
            self._thread.call_soon(self._watch, names)

    def drop(self, keys: Iterable[ChunkKey]) -> None:
        """Stop watching these chunks, without a report."""
        self._thread.call_soon(self._drop, keys)

    def forget_everything(self) -> None:
        """Report all chunks as gone, wherever they are, since no request finds them any more."""
        self._thread.call_soon(self._shrink, 0)

    def take(self) -> dict[tuple[bytes, str], bool]:
        """Return changes since the last call, at most `_MOST_AT_ONCE`: True if the named chunk is now in the place."""
        with self._lock:
            taken = dict(islice(self._changes.items(), _MOST_AT_ONCE))
            for change in taken:
                del self._changes[change]
        return taken

    def _begin(self) -> None:
        for tier in local_tiers(self._thread.cache):
            tier.tell(self._look)

    def _watch(self, names: Mapping[ChunkKey, bytes]) -> None:
        for key, name in names.items():
            self._names[key] = name
            self._names.move_to_end(key)
            self._look(key)
        self._shrink(MOST_CHUNKS)

    def _drop(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            self._names.pop(key, None)
            self._there.pop(key, None)

    def _shrink(self, most: int) -> None:
        while len(self._names) > most:
            key, name = self._names.popitem(last=False)
            self._change(name, self._there.pop(key, ()), there=False)

    def _attached(self) -> list[Tier]:
        """Return the tiers that are not detached. One that was attached again is another object."""
        return [tier for tier in local_tiers(self._thread.cache) if not tier.traffic.detached]

    def _look_at_all(self) -> None:
        for key in self._names:
            self._look(key)

    def _look(self, key: ChunkKey) -> None:
        name = self._names.get(key)
        if name is None:
            return
        before = self._there.get(key, set())
        now = {self._place_of(tier) for tier in self._attached() if tier.contains(key)}
        if now != before:
            self._there[key] = now
            self._change(name, now - before, there=True)
            self._change(name, before - now, there=False)

    def _change(self, name: bytes, places: Iterable[str], *, there: bool) -> None:
        with self._lock:
            for place in places:
                self._changes[name, place] = there


def local_tiers(cache: TierCache) -> list[Tier]:
    """Return the tiers of this host, without a hot cache that keeps nothing: chunks only pass through it."""
    tiers: list[Tier] = [*([cache.cpu] if cache.cpu.keep else []), *cache.tiers]
    return [tier for tier in tiers if tier.name in MEDIA]


class Residency:
    """The worker's half of KV events: reports in which media of this rank the watched chunks are."""

    def __init__(self, thread: CacheThread, geometry: BlockGeometry) -> None:
        self._namespace = thread.cache.namespace
        self._geometry = geometry
        self._chunks = ChunkWatch(thread, lambda tier: MEDIA[tier.name])

    def watch(self, watching: Mapping[bytes, bool]) -> None:
        """Start (True) or stop (False) watching chunks, by name."""
        if watching:
            keys = keys_of(self._namespace, list(watching), self._geometry)
            self._chunks.drop(keys)  # a chunk that is watched again is reported again
            self._chunks.watch({key: name for key, name in zip(keys, watching, strict=True) if watching[name]})

    @survives(lambda: None)
    def take(self) -> Changes | None:
        """Return changes since the last call, at most `_MOST_AT_ONCE`; None if there is no news."""
        return self._chunks.take() if self._chunks.has_news else None
