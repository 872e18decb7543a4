"""Export the cache's figures in vLLM's `/metrics`, in addition to vLLM's own figures of every tier."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from tiercache.control.families import FAMILIES, Family
from tiercache.integrations.vllm.metrics import TierCacheStats, amounts


def definitions() -> dict[str, OffloadingMetricMetadata]:
    return {_name(family.name): _definition(family) for family in FAMILIES}


def as_offloading_stats(ours: TierCacheStats) -> OffloadingConnectorStats:
    stats = OffloadingConnectorStats()
    for name, counts in ours.data["counters"].items():
        if name in _KNOWN:
            for labels, amount in counts.items():
                stats.increase_counter(_name(name), amount, labels)
    for name, distributions in ours.data["distributions"].items():
        if name in _KNOWN:
            for labels, (counts, sums) in distributions.items():
                for amount in amounts(_KNOWN[name], counts, sums):
                    stats.observe_histogram(_name(name), amount, labels)
    for families in ours.data["gauges"].values():
        for name, values in families.items():
            if name in _KNOWN:
                for labels, value in values.items():
                    stats.set_gauge(_name(name), value, labels)
    return stats


_KNOWN = {family.name: family for family in FAMILIES}


def _name(family: str) -> str:
    """Add vLLM's prefix: before a second engine registers its names, vLLM unregisters only names with this prefix."""
    return f"vllm:{family}"


def _definition(family: Family) -> OffloadingMetricMetadata:
    match family.kind:
        case "counter":
            return OffloadingCounterMetadata(family.text, family.labels)
        case "gauge":
            return OffloadingGaugeMetadata(family.text, family.labels)
    return OffloadingHistogramMetadata(family.text, family.labels, family.bounds)
