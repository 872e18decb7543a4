"""What the two halves of the connector count, and what the workers' caches do, for vLLM to carry on.

Each step vLLM asks both halves what is new. What a half counts itself it has at hand. What the cache counts is looked at on
the cache's own thread, once a second at most, and given to a later step: the engine's thread neither waits nor computes.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque

from tiercache.bridge import CacheThread
from tiercache.control.families import Family, Labels, figures_of
from tiercache.core.estimate import Distribution
from tiercache.integrations.vllm import exported
from tiercache.integrations.vllm.logs import survives
from tiercache.integrations.vllm.planning import Match
from tiercache.integrations.vllm.stats import TierCacheStats

_EVERY_S = 1.0


class WorkerFigures:
    """`take` and `loaded` are called by the engine's thread, `stored` by any."""

    def __init__(self, thread: CacheThread, cache: str, every_s: float = _EVERY_S) -> None:
        """`cache` is a name that no other worker's cache has."""
        self._thread = thread
        self._cache = cache
        self._every_s = every_s
        self._due_s = 0.0
        self._stored: deque[tuple[int, float]] = deque()
        self._new = TierCacheStats()
        self._before: dict[tuple[str, Labels], float | Distribution] = {}
        self._shown: dict[str, dict[Labels, float]] = {}
        self._sampled: TierCacheStats | None = None
        """What is new in the cache, until a step takes it."""
        self._sampling = False

    def loaded(self, payload_bytes: int, took_s: float, outcome: str) -> None:
        """`outcome` is whole, part or failed."""
        self._new.count(exported.LOADS.name, 1, (outcome,))
        if payload_bytes:
            _note(self._new, payload_bytes, took_s, exported.LOAD_BYTES, exported.LOAD_TIME, exported.LOAD_SIZE)

    def stored(self, payload_bytes: int, took_s: float) -> None:
        if payload_bytes:
            self._stored.append((payload_bytes, took_s))

    def take(self) -> TierCacheStats | None:
        """What is new since the last call; None where nothing is."""
        self._ask()
        if not self._stored and self._sampled is None and self._new.is_empty():
            return None
        new, self._new = self._new, TierCacheStats()
        while self._stored:
            stored_bytes, took_s = self._stored.popleft()
            _note(new, stored_bytes, took_s, exported.STORE_BYTES, exported.STORE_TIME, exported.STORE_SIZE)
        if (sampled := self._sampled) is not None:
            self._sampled = None
            new.aggregate(sampled)
        return None if new.is_empty() else new

    def _ask(self) -> None:
        # In this order: `_sample` sets the one before it clears the other, and a sample must not replace one.
        if self._sampling or self._sampled is not None or (now_s := time.monotonic()) < self._due_s:
            return
        self._due_s = now_s + self._every_s
        with contextlib.suppress(RuntimeError):  # the cache is closed
            self._sampling = True
            self._thread.loop.call_soon_threadsafe(self._sample)

    def _sample(self) -> None:
        """On the cache's thread."""
        try:
            self._sampled = self._since_last()
        finally:
            self._sampling = False

    @survives(TierCacheStats)
    def _since_last(self) -> TierCacheStats:
        new, gauges = TierCacheStats(), {}
        figures = figures_of(self._thread.cache)
        for family in exported.SAMPLED:
            if family.kind == "gauge":
                gauges[family.name] = {labels: float(value) for labels, value in family.rows(figures)}  # type: ignore[arg-type]
                continue
            for labels, value in family.rows(figures):
                before = self._before.get((family.name, labels))
                self._before[family.name, labels] = value
                if isinstance(value, Distribution):
                    new.distribute(family.name, value.since(before) if isinstance(before, Distribution) else value, labels)
                else:
                    new.count(family.name, value - (before if isinstance(before, int | float) else 0), labels)
        if gauges != self._shown:
            self._shown = gauges
            new.show(self._cache, gauges)
        return new


class SchedulerFigures:
    """Belongs to the engine's scheduler thread."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._tiers: tuple[str, ...] = ("cpu",)
        self._new = TierCacheStats()

    def looked_up(self, match: Match, request_tokens: int, put_off_s: float | None, *, skipped: bool) -> None:
        """A request was looked up. A tier is asked for what those before it lack. `put_off_s`: how long the request waited
        for that; None where it did not. `skipped`: the hit is too short to be loaded."""
        new, chunk = self._new, self._chunk_tokens
        self._tiers = tuple(match.tokens_by_tier) or self._tiers
        asked = request_tokens
        for tier in self._tiers:
            hit = match.tokens_by_tier.get(tier, 0)
            new.count(exported.QUERIED_TOKENS.name, asked, (tier,))
            new.count(exported.HIT_TOKENS.name, hit, (tier,))
            new.count(exported.CHUNK_QUERIES.name, -(-asked // chunk), (tier,))
            new.count(exported.CHUNK_HITS.name, -(-hit // chunk), (tier,))
            asked -= hit
        new.count(exported.LOOKUPS_FAILED.name, match.failed)
        new.count(exported.LOADS_SKIPPED.name, skipped)
        if put_off_s is not None:
            delay = Distribution.of(exported.LOOKUP_DELAY.bounds)
            delay.add(put_off_s)
            new.distribute(exported.LOOKUP_DELAY.name, delay)

    def take(self) -> TierCacheStats | None:
        """What is new since the last call; None where nothing is."""
        if self._new.is_empty():
            return None
        new, self._new = self._new, TierCacheStats()
        return new


def _note(new: TierCacheStats, payload_bytes: int, took_s: float, size: Family, time_: Family, sizes: Family) -> None:
    new.count(size.name, payload_bytes)
    new.count(time_.name, took_s)
    distribution = Distribution.of(sizes.bounds)
    distribution.add(payload_bytes)
    new.distribute(sizes.name, distribution)
