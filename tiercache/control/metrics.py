"""Export statistics of caches in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tiercache.control.families import FAMILIES, TENANTS, Family, Figures
from tiercache.core.estimate import Distribution


def exposition(answers: Mapping[str, dict[str, Any] | Exception]) -> bytes:
    """Return the text format for the answers of sockets, by name, to `Statistics`; a cache without an answer is down."""
    return generate_latest(_Snapshot(answers))


class _Snapshot(Collector):
    def __init__(self, answers: Mapping[str, dict[str, Any] | Exception]) -> None:
        self._answers = answers

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("tiercache_up", "Whether the cache behind a control socket answers.", labels=["socket"])
        found: list[tuple[str, Figures]] = []
        for name, answer in self._answers.items():
            up.add_metric([name], 0 if isinstance(answer, Exception) else 1)
            if not isinstance(answer, Exception):
                found.append((name, answer))
        yield up
        for family in (*FAMILIES, *TENANTS):
            yield _metric(family, found)


def _metric(family: Family, found: list[tuple[str, Figures]]) -> Metric:
    labels = ["socket", *family.labels]
    rows = [([name, *values], figure) for name, figures in found for values, figure in family.rows(figures)]
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.text, labels=labels)
        for values, figure in rows:
            assert isinstance(figure, Distribution)
            bounds = [*map(str, figure.bounds), "+Inf"]
            histogram.add_metric(values, list(zip(bounds, accumulate(figure.counts), strict=True)), figure.sum)
        return histogram
    plain = (CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily)(
        family.name, family.text, labels=labels
    )
    for values, figure in rows:
        assert not isinstance(figure, Distribution)
        plain.add_metric(values, figure)
    return plain
