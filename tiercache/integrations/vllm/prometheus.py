"""The cache's figures in the `/metrics` of vLLM's server."""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from tiercache.control.families import Family, Labels
from tiercache.integrations.vllm.exported import EXPORTED
from tiercache.integrations.vllm.logs import survives

logger = logging.getLogger("tiercache.vllm")

_registered: list[Any] = []
"""Under names of ours. vLLM takes its own out of the registry before it makes a new server's."""


class TierCachePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One metric for each family, with vLLM's labels (model, engine) before the family's.

    Made when the first figure comes, not at once: another connector of the same server (MultiConnector) may register the
    same name, and would fail if it came second. Then the name is that connector's, and the family goes without.
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
        """Of each engine, of each of its caches: the latest of each gauge."""
        while _registered:
            with contextlib.suppress(KeyError):  # not there, or not there any more
                REGISTRY.unregister(_registered.pop())

    @survives(lambda: None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Takes the `data` of a TierCacheStats."""
        for name, counts in transfer_stats_data["counters"].items():
            for labels, amount in counts.items():
                if (metric := self._metric(name, engine_idx, labels)) is not None:
                    metric.inc(amount)
        for name, distributions in transfer_stats_data["distributions"].items():
            for labels, (amounts, sums) in distributions.items():
                if (metric := self._metric(name, engine_idx, labels)) is not None:
                    _observe_all(metric, EXPORTED[name].bounds, amounts, sums)
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
        """With its labels; None where the name is somebody else's."""
        if name not in self._metrics:
            self._metrics[name] = self._make(EXPORTED[name])
        metric = self._metrics[name]
        return None if metric is None else metric.labels(*self.per_engine_labelvalues[engine_idx], *labels)

    def _make(self, family: Family) -> Any:
        named: dict[str, Any] = {
            "name": family.name,
            "documentation": family.text,
            "labelnames": [*self._labelnames, *family.labels],
        }
        try:
            match family.kind:
                case "counter":
                    metric = self._counter_cls(**named)
                case "gauge":
                    metric = self._gauge_cls(**named, multiprocess_mode="mostrecent")
                case "histogram":
                    metric = self._histogram_cls(**named, buckets=family.bounds)
        except ValueError as error:
            logger.warning("%s is not exported: another connector exports it (%s)", family.name, error)
            return None
        if isinstance(metric, Counter | Gauge | Histogram) and not family.name.startswith("vllm:"):
            _registered.append(metric)
        return metric


def _observe_all(metric: Any, bounds: tuple[float, ...], counts: list[int], sums: list[float]) -> None:
    """A metric takes one amount at a time. The mean of a bucket lies in it, and so often the mean is the bucket's sum."""
    for bound, count, total in zip((*bounds, math.inf), counts, sums, strict=True):
        for _ in range(count):
            metric.observe(min(total / count, bound))  # rounding may put it above
