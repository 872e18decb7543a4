"""Which of vLLM's chunks the tiers of this host have, as changes for vLLM's KV events."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from tiercache.bridge import CacheThread
from tiercache.core.keys import ChunkKey
from tiercache.integrations.vllm.kv_events import MEDIA, MOST_CHUNKS
from tiercache.tiers.base import Tier


class Changes(NamedTuple):
    """vLLM's names of chunks."""

    stored: list[bytes]
    removed: list[bytes]


class ChunkWatch:
    """`watch` and `take` are called by the scheduler's thread and do not wait; the rest is the loop's.

    Watched are the `most` chunks that were stored or loaded last: what is no longer watched is told as removed. Of what
    happens to a chunk between two calls of `take` only the last counts.
    """

    def __init__(self, thread: CacheThread, most: int = MOST_CHUNKS) -> None:
        self._thread = thread
        self._most = most
        self._names: OrderedDict[ChunkKey, bytes] = OrderedDict()
        self._there: set[ChunkKey] = set()
        self._tiers: list[Tier] = []
        self._lock = threading.Lock()
        self._changes: dict[bytes, bool] = {}
        thread.loop.call_soon_threadsafe(self._begin)

    @property
    def has_news(self) -> bool:
        return bool(self._changes)

    def watch(self, names: Mapping[ChunkKey, bytes]) -> None:
        """Tell of these chunks, where they are and when they go."""
        with contextlib.suppress(RuntimeError):  # the cache is closed: nothing changes any more
            self._thread.loop.call_soon_threadsafe(self._watch, names)

    def forget_everything(self) -> None:
        """No request finds these any more, wherever they are."""
        with contextlib.suppress(RuntimeError):
            self._thread.loop.call_soon_threadsafe(self._forget, 0)

    def take(self) -> Changes:
        with self._lock:
            changes, self._changes = self._changes, {}
        return Changes(
            [name for name, there in changes.items() if there], [name for name, there in changes.items() if not there]
        )

    def _begin(self) -> None:
        cache = self._thread.cache
        tiers = [*([cache.cpu] if cache.cpu.keep else []), *cache.tiers]
        self._tiers = [tier for tier in tiers if tier.name in MEDIA]
        for tier in self._tiers:
            tier.tell(self._look)

    def _watch(self, names: Mapping[ChunkKey, bytes]) -> None:
        for key, name in names.items():
            self._names[key] = name
            self._names.move_to_end(key)
            self._look(key)
        self._forget(self._most)

    def _forget(self, most: int) -> None:
        """Those that were watched first, until so many are left."""
        while len(self._names) > most:
            key, name = self._names.popitem(last=False)
            if key in self._there:
                self._there.discard(key)
                self._change(name, there=False)

    def _look(self, key: ChunkKey) -> None:
        name = self._names.get(key)
        if name is None:
            return
        there = any(tier.contains(key) for tier in self._tiers)
        if there != (key in self._there):
            (self._there.add if there else self._there.discard)(key)
            self._change(name, there=there)

    def _change(self, name: bytes, *, there: bool) -> None:
        with self._lock:
            self._changes[name] = there
