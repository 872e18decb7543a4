"""The worker's half of KV events: which chunks that somebody watches are in which tier of this rank, and what changed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from itertools import islice

from tiercache.bridge import CacheThread
from tiercache.core.keys import ChunkKey
from tiercache.core.layout import Layout
from tiercache.integrations.vllm.grouped import keys_of
from tiercache.integrations.vllm.kv_events import MEDIA, Change, Report
from tiercache.integrations.vllm.planning import BlockGeometry
from tiercache.scheduler.writer import TierWriter
from tiercache.tiers.base import Tier

_MOST_AT_ONCE = 8192
"""Changes that a step carries; the rest goes with the next one."""


class Residency:
    """`watch` and `take` are called by the engine's thread and do not wait; the rest is the loop's.

    Of what happens to a chunk between two calls of `take` only the last counts, so nothing here is larger than what is
    watched.
    """

    def __init__(self, thread: CacheThread, layout: Layout, geometry: BlockGeometry) -> None:
        self._thread = thread
        self._geometry = geometry
        self._layout = layout
        self._tiers: list[Tier] = []
        self._names: dict[ChunkKey, bytes] = {}
        self._there: dict[str, set[ChunkKey]] = {}
        self._lock = threading.Lock()
        self._changes: dict[tuple[bytes, str], bool] = {}
        self._writers: list[TierWriter] = []
        self._was_busy = False
        self._call(self._begin)

    def watch(self, watching: Mapping[bytes, bool]) -> None:
        """From now on these chunks, by name; or, with False, no longer."""
        if watching:
            self._call(self._watch, watching)

    def take(self, *, is_storing: bool) -> Report | None:
        """What changed since the last call, or a part of it; None where there is no news. `is_storing`: blocks are on their
        way into the hot cache."""
        # The lengths of two dictionaries a tier, which may be looked at from here.
        is_busy = is_storing or any(writer.pending for writer in self._writers)
        if not self._changes and is_busy == self._was_busy:
            return None
        self._was_busy = is_busy
        with self._lock:
            taken = list(islice(self._changes.items(), _MOST_AT_ONCE))
            for change, _ in taken:
                del self._changes[change]
        layout = self._layout
        own = layout.rank, layout.world_size
        shared = own if layout.parts else (layout.shard, layout.shards)
        changes = [
            Change(name, tier, there, layout.rank, *(own if tier == "cpu" else shared))
            for (name, tier), there in taken
        ]
        return Report(layout.rank, changes, is_busy or bool(self._changes))

    def _call(self, call: object, *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the cache is closed: nothing changes any more
            self._thread.loop.call_soon_threadsafe(call, *arguments)  # type: ignore[arg-type]

    def _begin(self) -> None:
        """A hot cache that keeps nothing is on the way, and no place for chunks."""
        cache = self._thread.cache
        tiers = [*([cache.cpu] if cache.cpu.keep else []), *cache.tiers]
        self._tiers = [tier for tier in tiers if tier.name in MEDIA]
        for tier in self._tiers:
            self._there[tier.name] = set()
            tier.tell(self._look)
        self._writers = [writer for writer in cache.parts.fan_out.writers if writer.tier in self._tiers]

    def _watch(self, watching: Mapping[bytes, bool]) -> None:
        keys = keys_of(self._thread.cache.namespace, list(watching), self._geometry)
        for key, (name, wanted) in zip(keys, watching.items(), strict=True):
            self._names.pop(key, None)
            for there in self._there.values():
                there.discard(key)
            if wanted:
                self._names[key] = name
                self._look(key)

    def _look(self, key: ChunkKey) -> None:
        name = self._names.get(key)
        if name is None:
            return
        for tier in self._tiers:
            there = self._there[tier.name]
            if (is_there := tier.contains(key)) != (key in there):
                (there.add if is_there else there.discard)(key)
                with self._lock:
                    self._changes[name, tier.name] = is_there
