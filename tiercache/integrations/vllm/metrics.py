"""Export the figures of a cache in vLLM's `/metrics`, under vLLM's own names if it has them, otherwise under ours.

vLLM's names, units and labels are those of its offloading connector
(`vllm/distributed/kv_transfer/kv_connector/v1/offloading/metrics.py`, `vllm/v1/kv_offload/tiering/spec.py`).

In each step vLLM asks both halves of the connector for new figures. A half returns its own counters at once. The
cache's thread reads the cache's counters, at most once a second, and a later step returns them, so that the engine's
thread does not wait.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from tiercache.bridge import CacheThread
from tiercache.control.families import FAMILIES, Family, Figures, Labels, Row, figures_of
from tiercache.core.breaker import BreakerState
from tiercache.core.estimate import Distribution
from tiercache.integrations.vllm.logs import survives
from tiercache.integrations.vllm.planning import Match
from tiercache.tiers.cpu import CpuTier

logger = logging.getLogger("tiercache.vllm")

_SIZES_BYTES = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
_DELAYS_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)
_OFFLOAD = "vllm:kv_offload_"

LOAD_BYTES = Family(f"{_OFFLOAD}load_bytes", "counter", "Bytes loaded into the engine's blocks.")
LOAD_TIME = Family(f"{_OFFLOAD}load_time", "counter", "Time that loads took from begin to end, in seconds.")
LOAD_SIZE = Family(f"{_OFFLOAD}load_size", "histogram", "Bytes of a load.", bounds=_SIZES_BYTES)
STORE_BYTES = Family(f"{_OFFLOAD}store_bytes", "counter", "Bytes stored from the engine's blocks.")
STORE_TIME = Family(f"{_OFFLOAD}store_time", "counter", "Time that stores took from begin to end, in seconds.")
STORE_SIZE = Family(f"{_OFFLOAD}store_size", "histogram", "Bytes of a store.", bounds=_SIZES_BYTES)
LOOKUP_DELAY = Family(
    f"{_OFFLOAD}lookup_async_delay_seconds",
    "histogram",
    "Time from when a request was first put off for its lookup until that was answered.",
    bounds=_DELAYS_S,
)
CHUNK_QUERIES = Family(
    f"{_OFFLOAD}tiering_chunk_queries", "counter", "Chunks of requests that no tier above this one had.", ("tier",)
)
CHUNK_HITS = Family(f"{_OFFLOAD}tiering_chunk_hits", "counter", "Chunks of requests that lay in a tier.", ("tier",))

QUERIED_TOKENS = Family(
    "tiercache_queried_tokens", "counter", "Tokens of requests that no tier above this one had.", ("tier",)
)
HIT_TOKENS = Family("tiercache_hit_tokens", "counter", "Tokens of requests that lay in a tier.", ("tier",))
LOOKUPS_FAILED = Family("tiercache_lookups_failed", "counter", "Lookups of requests that failed or took too long.")
LOADS_SKIPPED = Family(
    "tiercache_loads_skipped", "counter", "Hits that were computed instead: shorter than min_retrieve_tokens."
)
LOADS = Family(
    "tiercache_loads",
    "counter",
    "Loads of each worker by how they ended: whole; in part, or failed, where the engine computed the rest.",
    ("outcome",),
)


def _below(key: str) -> Callable[[Figures], Iterator[Row]]:
    """Return rows of the tiers below the hot cache, which is the primary tier in vLLM's words."""

    def rows(figures: Figures) -> Iterator[Row]:
        for tier, values in figures["statistics"]["tiers"].items():
            if tier != CpuTier.name:
                yield (tier,), values[key]

    return rows


SAMPLED = (
    *FAMILIES,
    Family(
        f"{_OFFLOAD}tiering_read_bytes",
        "counter",
        "Bytes read from a tier below the hot cache.",
        ("tier",),
        _below("read_bytes"),
    ),
    Family(
        f"{_OFFLOAD}tiering_write_bytes",
        "counter",
        "Bytes written to a tier below the hot cache.",
        ("tier",),
        _below("written_bytes"),
    ),
)
"""Figures that are read from a worker's cache; see `WorkerFigures`."""

COUNTED = (
    *(LOAD_BYTES, LOAD_TIME, LOAD_SIZE, STORE_BYTES, STORE_TIME, STORE_SIZE, LOADS),
    *(LOOKUP_DELAY, CHUNK_QUERIES, CHUNK_HITS, QUERIED_TOKENS, HIT_TOKENS, LOOKUPS_FAILED, LOADS_SKIPPED),
)
"""Figures that the connector's two halves count."""

EXPORTED = {family.name: family for family in (*COUNTED, *SAMPLED)}


@dataclass
class TierCacheStats(KVConnectorStats):  # type: ignore[misc]
    """Figures in `data`, which survives pickle and msgpack. Names are those of `EXPORTED`.

    The shape of `data`:

        {"counters": {name: {labels: increase since the last time}},
         "distributions": {name: {labels: (counts, sums) added since the last time}},
         "gauges": {cache: {name: {labels: value}}}}

    Each worker has one cache. Gauges are kept by cache: those of several caches add up, and a new value replaces the
    cache's earlier one.
    """

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = {"counters": {}, "distributions": {}, "gauges": {}}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def count(self, name: str, amount: float, labels: Labels = ()) -> None:
        if amount > 0:
            counts = self.data["counters"].setdefault(name, {})
            counts[labels] = counts.get(labels, 0) + amount

    def distribute(self, name: str, came: Distribution, labels: Labels = ()) -> None:
        if came.count:
            self._distribute(name, labels, came.counts, came.sums)

    def _distribute(self, name: str, labels: Labels, counts: list[int], sums: list[float]) -> None:
        known = self.data["distributions"].setdefault(name, {})
        if labels in known:
            before = known[labels]
            counts = [one + other for one, other in zip(before[0], counts, strict=True)]
            sums = [one + other for one, other in zip(before[1], sums, strict=True)]
        known[labels] = (list(counts), list(sums))

    def show(self, cache: str, gauges: dict[str, dict[Labels, float]]) -> None:
        """Set all gauges of a cache."""
        self.data["gauges"][cache] = gauges

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, counts in other.data["counters"].items():
            for labels, amount in counts.items():
                self.count(name, amount, labels)
        for name, distributions in other.data["distributions"].items():
            for labels, (counts, sums) in distributions.items():
                self._distribute(name, labels, counts, sums)
        self.data["gauges"].update(other.data["gauges"])
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures of a log line: increases since the last line, and the queue now. Leaves out idle tiers."""
        queried = self._counts(QUERIED_TOKENS.name)
        line: dict[str, int | float] = {"Queried tokens": max(queried.values(), default=0)}
        for (tier,), tokens in self._counts(HIT_TOKENS.name).items():
            line[f"Hit tokens ({tier})"] = tokens
        for word, size, seconds_family in (
            ("Loaded", LOAD_BYTES, LOAD_TIME),
            ("Stored", STORE_BYTES, STORE_TIME),
        ):
            payload_bytes = self._total(size.name)
            line[f"{word} MB"] = round(payload_bytes / 1e6, 3)
            if seconds := self._total(seconds_family.name):
                line[f"{word} MB/s"] = round(payload_bytes / 1e6 / seconds, 1)
        for name, words in (("read_bytes", "Read MB"), ("write_bytes", "Written MB")):
            for (tier,), payload_bytes in self._counts(f"vllm:kv_offload_tiering_{name}").items():
                line[f"{words} ({tier})"] = round(payload_bytes / 1e6, 3)
        for (tier,), chunks in self._counts("tiercache_tier_evicted").items():
            line[f"Evicted chunks ({tier})"] = chunks
        line["Queued chunks"] = self._gauge("tiercache_writer_queued")
        failures = {
            "Failed lookups": self._total(LOOKUPS_FAILED.name),
            "Incomplete loads": self._total(LOADS.name) - self._counts(LOADS.name).get(("whole",), 0),
            "Failed reads": self._total("tiercache_read_failures"),
            "Chunks not written": self._total("tiercache_writer_skipped") + self._total("tiercache_writer_dropped"),
            "Chunks not stored": self._total("tiercache_puts_skipped"),
            "Breakers not closed": self._breakers_not_closed(),
        }
        return line | {words: chunks for words, chunks in failures.items() if chunks}

    def _counts(self, name: str) -> dict[Labels, float]:
        counts: dict[Labels, float] = self.data["counters"].get(name, {})
        return counts

    def _total(self, name: str) -> float:
        return sum(self._counts(name).values())

    def _gauge(self, name: str) -> float:
        return float(sum(sum(gauges.get(name, {}).values()) for gauges in self.data["gauges"].values()))

    def _breakers_not_closed(self) -> float:
        return float(
            sum(
                value
                for gauges in self.data["gauges"].values()
                for name in ("tiercache_breaker", "tiercache_write_breaker")
                for (_, state), value in gauges.get(name, {}).items()
                if state != BreakerState.CLOSED.value
            )
        )


_EVERY_S = 1.0


class WorkerFigures:
    """Collects the figures of a worker. The engine's thread calls `take` and `loaded`; any thread calls `stored`."""

    def __init__(self, thread: CacheThread, cache: str) -> None:
        """Collect the figures of the cache of `thread`. `cache` is its name, unique among all workers."""
        self._thread = thread
        self._cache = cache
        self._due_s = 0.0
        self._new: deque[TierCacheStats] = deque()
        """New figures of all threads, until a step takes them."""
        self._before: dict[tuple[str, Labels], float | Distribution] = {}
        self._shown: dict[str, dict[Labels, float]] = {}

    def loaded(self, payload_bytes: int, took_s: float, outcome: str) -> None:
        """Count a load. `outcome` is whole, part or failed."""
        new = TierCacheStats()
        new.count(LOADS.name, 1, (outcome,))
        if payload_bytes:
            _note(new, payload_bytes, took_s, LOAD_BYTES, LOAD_TIME, LOAD_SIZE)
        self._new.append(new)

    def stored(self, payload_bytes: int, took_s: float) -> None:
        if payload_bytes:
            new = TierCacheStats()
            _note(new, payload_bytes, took_s, STORE_BYTES, STORE_TIME, STORE_SIZE)
            self._new.append(new)

    def take(self) -> TierCacheStats | None:
        """Return what is new since the last call; None if nothing is."""
        if (now_s := time.monotonic()) >= self._due_s:
            self._due_s = now_s + _EVERY_S
            self._thread.call_soon(lambda: self._new.append(self._since_last()))
        if not self._new:
            return None
        taken = TierCacheStats()
        while self._new:
            taken.aggregate(self._new.popleft())
        return None if taken.is_empty() else taken

    @survives(TierCacheStats)
    def _since_last(self) -> TierCacheStats:
        new, gauges = TierCacheStats(), {}
        figures = figures_of(self._thread.cache)
        for family in SAMPLED:
            if family.kind == "gauge":
                gauges[family.name] = {labels: float(value) for labels, value in family.rows(figures)}  # type: ignore[arg-type]
                continue
            for labels, value in family.rows(figures):
                before = self._before.get((family.name, labels))
                self._before[family.name, labels] = value
                if isinstance(value, Distribution):
                    new.distribute(
                        family.name, value.since(before) if isinstance(before, Distribution) else value, labels
                    )
                else:
                    new.count(family.name, value - (before if isinstance(before, int | float) else 0), labels)
        if gauges != self._shown:
            self._shown = gauges
            new.show(self._cache, gauges)
        return new


class SchedulerFigures:
    """Collects the figures of lookups. Used only by the engine's scheduler thread."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._tiers: tuple[str, ...] = ("cpu",)
        self._new = TierCacheStats()

    def looked_up(self, match: Match, request_tokens: int, put_off_s: float | None, *, skipped: bool) -> None:
        """Count the lookup of a request. Each tier is queried for the tokens that the tiers before it lack.

        `put_off_s` is the time that the request waited for the lookup; None if it did not. `skipped` means that the hit
        is too short to be loaded.
        """
        new, chunk = self._new, self._chunk_tokens
        self._tiers = tuple(match.tokens_by_tier) or self._tiers
        asked = request_tokens
        for tier in self._tiers:
            hit = match.tokens_by_tier.get(tier, 0)
            new.count(QUERIED_TOKENS.name, asked, (tier,))
            new.count(HIT_TOKENS.name, hit, (tier,))
            new.count(CHUNK_QUERIES.name, -(-asked // chunk), (tier,))
            new.count(CHUNK_HITS.name, -(-hit // chunk), (tier,))
            asked -= hit
        new.count(LOOKUPS_FAILED.name, match.failed)
        new.count(LOADS_SKIPPED.name, skipped)
        if put_off_s is not None:
            delay = Distribution.of(LOOKUP_DELAY.bounds)
            delay.add(put_off_s)
            new.distribute(LOOKUP_DELAY.name, delay)

    def take(self) -> TierCacheStats | None:
        """Return what is new since the last call; None if nothing is."""
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


_registered: list[Any] = []
"""Registered metrics with our names. vLLM unregisters only its own before it makes those of a new server."""


class TierCachePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One metric for each family, with vLLM's labels (model, engine) before the family's.

    Each is made when its first figure arrives: another connector of the same server (MultiConnector) may register the
    same name, and would fail if it were second. If the name is taken by then, the family is not exported.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        self._gauges: dict[int, dict[str, dict[str, dict[Labels, float]]]] = {}
        """The latest value of each gauge, by engine and by its caches."""
        while _registered:
            with contextlib.suppress(KeyError):  # not registered, or no longer
                REGISTRY.unregister(_registered.pop())

    @survives(lambda: None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the `data` of a TierCacheStats to the metrics of an engine."""
        for name, counts in transfer_stats_data["counters"].items():
            for labels, amount in counts.items():
                if (metric := self._metric(name, engine_idx, labels)) is not None:
                    metric.inc(amount)
        for name, distributions in transfer_stats_data["distributions"].items():
            for labels, (counts, sums) in distributions.items():
                if (metric := self._metric(name, engine_idx, labels)) is not None:
                    for amount in amounts(EXPORTED[name], counts, sums):
                        metric.observe(amount)
        if transfer_stats_data["gauges"]:
            self._set_gauges(transfer_stats_data["gauges"], engine_idx)

    def _set_gauges(self, gauges: dict[str, dict[str, dict[Labels, float]]], engine_idx: int) -> None:
        caches = self._gauges.setdefault(engine_idx, {})
        caches.update(gauges)
        for name in {name for families in caches.values() for name in families}:
            totals: dict[Labels, float] = {}
            for families in caches.values():
                for labels, value in families.get(name, {}).items():
                    totals[labels] = totals.get(labels, 0) + value
            for labels, total in totals.items():
                if (metric := self._metric(name, engine_idx, labels)) is not None:
                    metric.set(total)

    def _metric(self, name: str, engine_idx: int, labels: Labels) -> Any:
        """Return the metric with its labels; None if another connector has the name."""
        if name not in self._metrics:
            self._metrics[name] = self._make(EXPORTED[name])
        metric = self._metrics[name]
        return None if metric is None else metric.labels(*self.per_engine_labelvalues[engine_idx], *labels)

    def _make(self, family: Family) -> Any:
        makers = {
            "counter": self._counter_cls,
            "gauge": partial(self._gauge_cls, multiprocess_mode="mostrecent"),
            "histogram": partial(self._histogram_cls, buckets=family.bounds),
        }
        labels = [*self._labelnames, *family.labels]
        try:
            metric = makers[family.kind](name=family.name, documentation=family.text, labelnames=labels)
        except ValueError as error:
            logger.warning("%s is not exported: another connector exports it (%s)", family.name, error)
            return None
        if isinstance(metric, Counter | Gauge | Histogram) and not family.name.startswith("vllm:"):
            _registered.append(metric)
        return metric


def amounts(family: Family, counts: Sequence[int], sums: Sequence[float]) -> Iterator[float]:
    """Yield the mean of each bucket, as often as the bucket counts: vLLM's histograms take one amount at a time.

    The mean lies in the bucket, so counts and sums are right.
    """
    for bound, count, total in zip((*family.bounds, math.inf), counts, sums, strict=True):
        yield from [min(total / count, bound)] * count if count else ()  # rounding may put it above
