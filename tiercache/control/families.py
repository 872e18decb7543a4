"""Names and meanings of a cache's figures, shared by all programs that export or show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from tiercache.control.served import ServedCache
from tiercache.core.breaker import BreakerState
from tiercache.core.estimate import SECONDS, Distribution
from tiercache.core.tenants import MOST_SHOWN

Figures = Mapping[str, Any]
"""The answer of a cache to `Statistics`: plain dictionaries from `figures_of`."""
Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]
Row = tuple[Labels, "float | Distribution"]


@dataclass(frozen=True)
class Family:
    """Figures with the same name and meaning. A counter only grows; gauges of several caches can be summed."""

    name: str
    """The name in Prometheus, which adds `_total` to the name of a counter."""
    kind: Kind
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


def distribution_of(plain: Mapping[str, Any]) -> Distribution:
    """Return the distribution from its plain form."""
    return Distribution(tuple(plain["bounds"]), list(plain["counts"]), list(plain["sums"]))


def _part(figures: Figures, name: str) -> Any:
    """Return a part of the figures."""
    statistics = figures["statistics"]
    if name == "prefetch":
        # `promoted_bytes` falls when a read fails, so it is no counter.
        return {
            predictor: {key.removesuffix("_bytes"): size for key, size in account.items() if key != "promoted_bytes"}
            for predictor, account in statistics["prefetch"].items()
        }
    return statistics[name] if name in statistics else figures[name]


def _rows(value: Any, path: Sequence[str], labels: Labels = ()) -> Iterator[Row]:
    """Yield the figures at `path` below `value`. A star stands for all names there, which become labels."""
    if value is None:
        return
    if path and path[0] == "*":
        for name, part in value.items():
            yield from _rows(part, path[1:], (*labels, name))
    elif path:
        yield from _rows(value[path[0]], path[1:], labels)
    elif isinstance(value, str):
        for state in BreakerState:  # all of them, so that a state that has ended is reported as 0
            yield (*labels, state.value), float(state.value == value)
    else:
        yield labels, distribution_of(value) if isinstance(value, Mapping) else value


def _family(kind: Kind, name: str, path: str, text: str, labels: Labels | None = None) -> Family:
    first, *rest = path.split(".")
    return Family(
        f"tiercache_{name}",
        kind,
        text,
        labels if labels is not None else ("tier",) if "*" in rest else (),
        lambda figures: _rows(_part(figures, first), rest),
        SECONDS if kind == "histogram" else (),
    )


_counter, _gauge, _histogram = (partial(_family, kind) for kind in ("counter", "gauge", "histogram"))
_OF_TENANT = ("tier", "tenant")
TENANTS = (
    _gauge(
        "tenant_bytes",
        "tiers.*.tenants.*.held_bytes",
        f"Bytes of a tier that a tenant holds, by the hash of its salt: the {MOST_SHOWN} largest tenants, and the rest as "
        "one. Only if tenants have quotas.",
        _OF_TENANT,
    ),
    _gauge("tenant_chunks", "tiers.*.tenants.*.chunks", "Chunks of a tenant in a tier.", _OF_TENANT),
    _gauge(
        "tenant_evicted",
        "tiers.*.tenants.*.evicted",
        "Chunks of a tenant that were evicted from a tier, since it last held none.",
        _OF_TENANT,
    ),
)
"""Labels appear and disappear with tenants, so only programs that show a snapshot should use these."""

FAMILIES = (
    _counter("tier_reads", "tiers.*.reads", "Chunks read from a tier."),
    _counter("tier_read_bytes", "tiers.*.read_bytes", "Payload bytes read from a tier."),
    _counter("tier_read_misses", "tiers.*.read_misses", "Chunks that were expected in a tier and not there."),
    _counter("tier_writes", "tiers.*.writes", "Chunks written to a tier."),
    _counter("tier_written_bytes", "tiers.*.written_bytes", "Payload bytes written to a tier."),
    _counter("tier_stored_bytes", "tiers.*.stored_bytes", "Bytes stored for written payloads, if the tier may compress."),
    _counter("tier_write_failures", "tiers.*.write_failures", "Writes that failed."),
    _counter("tier_evicted", "tiers.*.evicted", "Chunks evicted from a tier."),
    _counter("tier_corrupt", "tiers.*.corrupt", "Chunks that failed verification."),
    _counter("tier_read_again", "tiers.*.read_again", "Reads that failed verification once and were tried again."),
    _gauge("tier_resident", "tiers.*.resident", "Chunks in a tier."),
    _gauge("tier_occupied_bytes", "tiers.*.occupied_bytes", "Bytes that a tier occupies."),
    _gauge("tier_mapped_bytes", "tiers.*.mapped_bytes", "Bytes of a tier that this process has mapped."),
    _gauge(
        "tier_unlinked_bytes", "tiers.*.unlinked_bytes", "Mapped bytes whose files were deleted since."
    ),
    _histogram(
        "read_seconds",
        "reads.*.seconds",
        "Durations of reads from a tier that found their chunk or were given up.",
    ),
    _counter("read_failures", "reads.*.failed", "Reads of a tier that failed, failed verification, or were given up."),
    _gauge("reading", "reads.*.reading", "Reads in flight in a tier."),
    _histogram("write_seconds", "writers.*.seconds", "Durations of writes to a tier that stored their chunk."),
    _counter("writer_written", "writers.*.written", "Chunks that a writer has written."),
    _counter("writer_skipped", "writers.*.skipped", "Chunks not written: the queue was full."),
    _counter("writer_dropped", "writers.*.dropped", "Chunks given up: the breaker was open, or every attempt failed."),
    _counter(
        "writer_declined",
        "writers.*.declined",
        "Chunks that a tier declined: larger than its cap, or not admitted.",
    ),
    _counter("writer_retried", "writers.*.retried", "Writes tried again."),
    _gauge("writer_queued", "writers.*.queued", "Chunks that wait to be written."),
    _gauge("writer_queued_bytes", "writers.*.queued_bytes", "Bytes that wait to be written."),
    _gauge("writer_writing", "writers.*.writing", "Chunks that are being written."),
    _counter("hits", "reader.hits.*", "Chunks served, by the tier that had them."),
    _counter("reader_misses", "reader.misses", "Chunks found in no tier."),
    _counter("reader_joined", "reader.joined", "Reads that joined one in flight."),
    _counter("reader_late", "reader.late", "Reads given up at their deadline."),
    _counter("reader_corrupt", "reader.corrupt", "Reads that failed verification."),
    _counter("reader_failed", "reader.failed", "Reads that failed."),
    _counter("puts_skipped", "puts_skipped", "Chunks not stored: no memory came free in time."),
    _gauge("slots", "slots", "Slots of the arena."),
    _gauge("slots_free", "slots_free", "Free slots of the arena."),
    _gauge("stuck", "stuck", "Abandoned operations that still hold memory."),
    _gauge("device_slots", "device.slots", "Slots of the pool in device memory."),
    _gauge("device_slots_free", "device.slots_free", "Free slots in device memory."),
    _gauge("pinned_chunks", "pinned", "Chunks pinned hot."),
    _gauge("held_chunks", "held", "Chunks held hot."),
    _gauge("breaker", "breakers.*", "1 for the state that the breaker of a tier's reads is in.", ("tier", "state")),
    _gauge(
        "write_breaker",
        "writers.*.breaker",
        "1 for the state that the breaker of a tier's writes is in.",
        ("tier", "state"),
    ),
    _counter(
        "prefetch_bytes",
        "prefetch.*.*",
        "Prefetched bytes by predictor: used, late or wasted once that is known; cancelled bytes were not fetched.",
        ("predictor", "outcome"),
    ),
    _counter("asked_tokens", "advice.usage.asked_tokens", "Tokens that requests asked for, in chunks and partial chunks."),
    _counter("loaded_tokens", "advice.loaded_tokens", "Tokens that were delivered instead of computed."),
    _counter(
        "missed_tokens", "advice.usage.missed_tokens.*", "Tokens that were missing, by reason; estimated.", ("reason",)
    ),
    _counter("sampled_tokens", "advice.usage.sampled_tokens", "Tokens asked for in whole chunks, as the sample has them."),
    _counter(
        "predicted_hit_tokens",
        "advice.usage.hit_tokens.*",
        "Of the sampled tokens, those that a cache of this size in bytes has.",
        ("size",),
    ),
)
