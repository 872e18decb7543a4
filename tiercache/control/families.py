"""Names and meanings of a cache's figures, shared by all programs that export or show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tiercache.control.served import ServedCache
from tiercache.core.breaker import BreakerState
from tiercache.core.estimate import SECONDS, Distribution
from tiercache.core.tenants import MOST_SHOWN

Figures = Mapping[str, Any]
"""The answer of a cache to `Statistics`: plain dictionaries from `figures_of`."""
Labels = tuple[str, ...]
Row = tuple[Labels, "float | Distribution"]


@dataclass(frozen=True)
class Family:
    """Figures with the same name and meaning. A counter only grows; gauges of several caches can be summed."""

    name: str
    """The name in Prometheus, which adds `_total` to the name of a counter."""
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: Labels = ()
    rows: Callable[[Figures], Iterable[Row]] = lambda _: ()
    """Return label values with their figure; empty if another program counts the figure."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""


def figures_of(cache: ServedCache) -> dict[str, Any]:
    """Return the answer to `Statistics`. Call it on the cache's loop."""
    layout = cache.layout
    return {
        "model": layout.model,
        "rank": layout.rank,
        "world_size": layout.world_size,
        "chunk_bytes": layout.chunk_bytes,
        "pinned": cache.ahead.pinned,
        "held": cache.ahead.held,
        "sessions": len(cache.ahead.sessions),
        "statistics": cache.statistics().to_dict(),
    }


def reads_by_tier(figures: Figures) -> dict[str, dict[str, Any]]:
    """Return the reads of each tier below the hot cache, host and device memory together."""
    statistics = figures["statistics"]
    found = {
        tier: {**read, "seconds": distribution_of(read["seconds"])} for tier, read in statistics["reads"].items()
    }
    device = statistics["device"]
    for tier, read in device["reads"].items() if device is not None else ():
        known = found[tier]
        known["seconds"].include(distribution_of(read["seconds"]))
        known["failed"] += read["failed"]
        known["reading"] += read["reading"]
    return found


def hits_by_tier(figures: Figures) -> dict[str, int]:
    """Return the chunks served to host and to device memory, by source tier."""
    statistics = figures["statistics"]
    hits: dict[str, int] = dict(statistics["reader"]["hits"])
    device = statistics["device"]
    for tier, chunks in device["reader"]["hits"].items() if device is not None else ():
        hits[tier] = hits.get(tier, 0) + chunks
    return hits


def distribution_of(plain: Mapping[str, Any]) -> Distribution:
    """Return the distribution from its plain form."""
    return Distribution(tuple(plain["bounds"]), list(plain["counts"]), list(plain["sums"]))


def _of_reads(key: str) -> Callable[[Figures], Iterable[Row]]:
    return lambda figures: (((tier,), values[key]) for tier, values in reads_by_tier(figures).items())


def _of_cache(key: str) -> Callable[[Figures], Iterable[Row]]:
    return lambda figures: [((), figures["statistics"][key])]


def _of_device(key: str) -> Callable[[Figures], Iterable[Row]]:
    def rows(figures: Figures) -> Iterator[Row]:
        device = figures["statistics"]["device"]
        if device is not None:
            yield (), device[key]

    return rows


def _states(breakers: Mapping[str, str]) -> Iterator[Row]:
    """Yield every state, so that a state that has ended is reported as 0."""
    for tier, found in breakers.items():
        for state in BreakerState:
            yield (tier, state.value), float(state.value == found)


def _read_breakers(figures: Figures) -> Iterator[Row]:
    """Yield the breakers of reads, including those of reads into device memory."""
    device = figures["statistics"]["device"]
    return _states(figures["statistics"]["breakers"] | (device["breakers"] if device is not None else {}))


def _write_breakers(figures: Figures) -> Iterator[Row]:
    return _states({tier: values["breaker"] for tier, values in figures["statistics"]["writers"].items()})


def _prefetched(figures: Figures) -> Iterator[Row]:
    for predictor, account in figures["statistics"]["prefetch"].items():
        for outcome, amount in account.items():
            if outcome != "promoted_bytes":  # it falls when a read fails, so it is not a counter; the others add up to it
                yield (predictor, outcome.removesuffix("_bytes")), amount


def _write_seconds(figures: Figures) -> Iterator[Row]:
    for tier, values in figures["statistics"]["writers"].items():
        yield (tier,), distribution_of(values["seconds"])


def _hits(figures: Figures) -> Iterator[Row]:
    for tier, chunks in hits_by_tier(figures).items():
        yield (tier,), chunks


def _tenant(key: str) -> Callable[[Figures], Iterable[Row]]:
    def rows(figures: Figures) -> Iterator[Row]:
        for tier, values in figures["statistics"]["tiers"].items():
            for tenant, held in values["tenants"].items():
                yield (tier, tenant), held[key]

    return rows


def _tier(kind: Literal["counter", "gauge"], key: str, text: str) -> Family:
    def rows(figures: Figures) -> Iterator[Row]:
        for tier, values in figures["statistics"]["tiers"].items():
            yield (tier,), values[key]

    return Family(f"tiercache_tier_{key}", kind, text, ("tier",), rows)


def _writer(kind: Literal["counter", "gauge"], key: str, text: str) -> Family:
    def rows(figures: Figures) -> Iterator[Row]:
        for tier, values in figures["statistics"]["writers"].items():
            yield (tier,), values[key]

    return Family(f"tiercache_writer_{key}", kind, text, ("tier",), rows)


def _reader(key: str, text: str) -> Family:
    def rows(figures: Figures) -> Iterator[Row]:
        device = figures["statistics"]["device"]
        yield (), figures["statistics"]["reader"][key] + (device["reader"][key] if device is not None else 0)

    return Family(f"tiercache_reader_{key}", "counter", text, (), rows)


TENANTS = (
    Family(
        "tiercache_tenant_bytes",
        "gauge",
        f"Bytes of a tier that a tenant holds, by the tag that its salt is hashed to: the {MOST_SHOWN} that hold most, and "
        "the rest as one. Where tenants have quotas.",
        ("tier", "tenant"),
        _tenant("held_bytes"),
    ),
    Family("tiercache_tenant_chunks", "gauge", "Chunks of a tenant in a tier.", ("tier", "tenant"), _tenant("chunks")),
    Family(
        "tiercache_tenant_evicted",
        "gauge",
        "Chunks of a tenant that were evicted from a tier, since it last held none.",
        ("tier", "tenant"),
        _tenant("evicted"),
    ),
)
"""Labels appear and disappear with tenants, so only programs that show a snapshot should use these."""

FAMILIES = (
    _tier("counter", "reads", "Chunks read from a tier."),
    _tier("counter", "read_bytes", "Payload bytes read from a tier."),
    _tier("counter", "read_misses", "Chunks that were expected in a tier and not there."),
    _tier("counter", "writes", "Chunks written to a tier."),
    _tier("counter", "written_bytes", "Payload bytes written to a tier."),
    _tier("counter", "stored_bytes", "Of those, what a tier that may compress has stored."),
    _tier("counter", "write_failures", "Writes that failed."),
    _tier("counter", "evicted", "Chunks evicted from a tier."),
    _tier("counter", "corrupt", "Chunks that failed verification."),
    _tier("counter", "read_again", "Reads that failed verification once and were tried again."),
    _tier("gauge", "resident", "Chunks in a tier."),
    _tier("gauge", "occupied_bytes", "Bytes that a tier occupies."),
    _tier("gauge", "mapped_bytes", "Bytes of a tier that this process has mapped."),
    _tier("gauge", "unlinked_bytes", "Of these, bytes that were deleted since and are still held."),
    Family(
        "tiercache_read_seconds",
        "histogram",
        "What reads of a tier took that found their chunk, or until they were given up.",
        ("tier",),
        _of_reads("seconds"),
        SECONDS,
    ),
    Family(
        "tiercache_read_failures",
        "counter",
        "Reads of a tier that failed, failed verification, or were given up.",
        ("tier",),
        _of_reads("failed"),
    ),
    Family("tiercache_reading", "gauge", "Reads that a tier has begun and not ended.", ("tier",), _of_reads("reading")),
    Family(
        "tiercache_write_seconds",
        "histogram",
        "What writes to a tier took that stored their chunk.",
        ("tier",),
        _write_seconds,
        SECONDS,
    ),
    _writer("counter", "written", "Chunks that a writer has written."),
    _writer("counter", "skipped", "Chunks not written: the queue was full."),
    _writer("counter", "dropped", "Chunks given up: the breaker was open, or every attempt failed."),
    _writer("counter", "declined", "Chunks that a tier did not want: larger than its cap, or not admitted."),
    _writer("counter", "retried", "Writes tried again."),
    _writer("gauge", "queued", "Chunks that wait to be written."),
    _writer("gauge", "queued_bytes", "Bytes that wait to be written."),
    _writer("gauge", "writing", "Chunks that are being written."),
    Family("tiercache_hits", "counter", "Chunks served, by the tier that had them.", ("tier",), _hits),
    _reader("misses", "Chunks found in no tier."),
    _reader("joined", "Reads that joined one under way."),
    _reader("late", "Reads given up at their deadline."),
    _reader("corrupt", "Reads that failed verification."),
    _reader("failed", "Reads that failed."),
    Family(
        "tiercache_puts_skipped",
        "counter",
        "Chunks not stored: no memory came free in time.",
        (),
        _of_cache("puts_skipped"),
    ),
    Family("tiercache_slots", "gauge", "Slots of the arena.", (), _of_cache("slots")),
    Family("tiercache_slots_free", "gauge", "Free slots of the arena.", (), _of_cache("slots_free")),
    Family("tiercache_stuck", "gauge", "Abandoned operations that still hold memory.", (), _of_cache("stuck")),
    Family("tiercache_device_slots", "gauge", "Slots of the pool in device memory.", (), _of_device("slots")),
    Family("tiercache_device_slots_free", "gauge", "Free slots in device memory.", (), _of_device("slots_free")),
    Family("tiercache_pinned_chunks", "gauge", "Chunks pinned hot.", (), lambda figures: [((), figures["pinned"])]),
    Family("tiercache_held_chunks", "gauge", "Chunks held hot.", (), lambda figures: [((), figures["held"])]),
    Family(
        "tiercache_breaker",
        "gauge",
        "1 for the state that the breaker of a tier's reads is in.",
        ("tier", "state"),
        _read_breakers,
    ),
    Family(
        "tiercache_write_breaker",
        "gauge",
        "1 for the state that the breaker of a tier's writes is in.",
        ("tier", "state"),
        _write_breakers,
    ),
    Family(
        "tiercache_prefetch_bytes",
        "counter",
        "Bytes by predictor: used, late or wasted, as soon as it is known which; cancelled were not fetched.",
        ("predictor", "outcome"),
        _prefetched,
    ),
)
