"""Statistics of caches as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_TIER_COUNTERS = {
    "reads": "Chunks read from a tier.",
    "read_bytes": "Payload bytes read from a tier.",
    "read_misses": "Chunks that were expected in a tier and not there.",
    "writes": "Chunks written to a tier.",
    "written_bytes": "Payload bytes written to a tier.",
    "write_failures": "Writes that failed.",
    "evicted": "Chunks evicted from a tier.",
    "corrupt": "Chunks that failed verification.",
    "read_again": "Reads that failed verification once and were tried again.",
}
_TIER_GAUGES = {"resident": "Chunks in a tier.", "occupied_bytes": "Bytes that a tier occupies."}
_WRITER_COUNTERS = {
    "written": "Chunks that a writer has written.",
    "skipped": "Chunks not written: the queue was full.",
    "dropped": "Chunks given up: the breaker was open, or every attempt failed.",
    "retried": "Writes tried again.",
}
_WRITER_GAUGES = {"queued": "Chunks that wait to be written.", "queued_bytes": "Bytes that wait to be written."}
_READER_COUNTERS = {
    "misses": "Chunks found in no tier.",
    "joined": "Reads that joined one under way.",
    "late": "Reads given up at their deadline.",
    "corrupt": "Reads that failed verification.",
    "failed": "Reads that failed.",
}
_GAUGES = {"slots": "Slots of the arena.", "slots_free": "Free slots of the arena.", "stuck": "Operations that hang."}


def exposition(answers: Mapping[Path, dict[str, Any] | Exception]) -> bytes:
    """The text format, of what each socket answered to `Statistics`; a cache that did not answer is down."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(answers))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, answers: Mapping[Path, dict[str, Any] | Exception]) -> None:
        self._answers = answers

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("tiercache_up", "Whether the cache behind a control socket answers.", labels=["socket"])
        found = []
        for path, answer in self._answers.items():
            up.add_metric([path.name], 0 if isinstance(answer, Exception) else 1)
            if not isinstance(answer, Exception):
                found.append((path.name, answer))
        yield up
        yield from _families(found)


Row = tuple[list[str], float]


def _families(found: list[tuple[str, dict[str, Any]]]) -> Iterator[Metric]:
    each = [(name, answer["statistics"]) for name, answer in found]
    yield from _by_label("tier", "tier", _TIER_COUNTERS, _TIER_GAUGES, [(name, s["tiers"]) for name, s in each])
    yield from _by_label("writer", "tier", _WRITER_COUNTERS, _WRITER_GAUGES, [(name, s["writers"]) for name, s in each])
    hits = [([name, tier], chunks) for name, s in each for tier, chunks in s["reader"]["hits"].items()]
    yield _counter("hits", "Chunks served, by the tier that had them.", ["socket", "tier"], hits)
    for key, text in _READER_COUNTERS.items():
        yield _counter(f"reader_{key}", text, ["socket"], [([name], s["reader"][key]) for name, s in each])
    for key, text in _GAUGES.items():
        yield _gauge(key, text, ["socket"], [([name], s[key]) for name, s in each])
    for key in ("pinned", "held"):
        yield _gauge(f"{key}_chunks", f"Chunks {key} hot.", ["socket"], [([name], answer[key]) for name, answer in found])
    breakers = [([name, tier, state], 1.0) for name, s in each for tier, state in s["breakers"].items()]
    yield _gauge("breaker", "1 for the state that a tier's breaker is in.", ["socket", "tier", "state"], breakers)
    prefetched = [
        ([name, predictor, outcome.removesuffix("_bytes")], amount)
        for name, s in each
        for predictor, account in s["prefetch"].items()
        for outcome, amount in account.items()
        if outcome != "fetched_bytes"  # it falls when a fetch fails, so it is no counter; the others make it up
    ]
    yield _counter(
        "prefetch_bytes",
        "Bytes by predictor: used, late, evicted or wasted, as soon as it is known which; cancelled were not fetched.",
        ["socket", "predictor", "outcome"],
        prefetched,
    )


def _by_label(
    kind: str, label: str, counters: dict[str, str], gauges: dict[str, str], found: list[tuple[str, dict[str, Any]]]
) -> Iterator[Metric]:
    def rows(key: str) -> Iterable[Row]:
        return [([name, part], values[key]) for name, parts in found for part, values in parts.items()]

    for key, text in counters.items():
        yield _counter(f"{kind}_{key}", text, ["socket", label], rows(key))
    for key, text in gauges.items():
        yield _gauge(f"{kind}_{key}", text, ["socket", label], rows(key))


def _counter(name: str, text: str, labels: list[str], rows: Iterable[Row]) -> Metric:
    family = CounterMetricFamily(f"tiercache_{name}", text, labels=labels)
    for values, amount in rows:
        family.add_metric(values, amount)
    return family


def _gauge(name: str, text: str, labels: list[str], rows: Iterable[Row]) -> Metric:
    family = GaugeMetricFamily(f"tiercache_{name}", text, labels=labels)
    for values, amount in rows:
        family.add_metric(values, amount)
    return family
