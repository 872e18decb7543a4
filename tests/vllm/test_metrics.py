"""The cache's figures on their way through vLLM: counted by the two halves, added up, serialised, logged and exported."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import get_connector_metric_definitions
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_offload import base as offloading
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.control.test_dashboard import names_in, panels
from tiercache.core.estimate import Distribution
from tiercache.integrations.vllm import TierCacheConnector
from tiercache.integrations.vllm.metrics import (
    EXPORTED,
    LOAD_SIZE,
    SchedulerFigures,
    TierCachePromMetrics,
    TierCacheStats,
)
from tiercache.integrations.vllm.planning import Match

# What the two halves count


def test_tier_is_asked_for_what_those_above_it_lack() -> None:
    figures = SchedulerFigures(chunk_tokens=64)
    figures.looked_up(Match(6, {"cpu": 128, "disk": 80}), 300, None, skipped=False)
    new = figures.take()
    assert new is not None
    assert new.data["counters"] == {
        "tiercache_queried_tokens": {("cpu",): 300, ("disk",): 172},
        "tiercache_hit_tokens": {("cpu",): 128, ("disk",): 80},
        "vllm:kv_offload_tiering_chunk_queries": {("cpu",): 5, ("disk",): 3},
        "vllm:kv_offload_tiering_chunk_hits": {("cpu",): 2, ("disk",): 2},
    }
    assert figures.take() is None


def test_lookup_without_an_answer_is_a_miss_in_every_tier() -> None:
    figures = SchedulerFigures(chunk_tokens=64)
    figures.looked_up(Match(0, {"cpu": 0, "disk": 0}), 100, None, skipped=False)
    figures.looked_up(Match(failed=True), 100, 0.2, skipped=True)
    new = figures.take()
    assert new is not None
    counters = new.data["counters"]
    assert counters["tiercache_queried_tokens"] == {("cpu",): 200, ("disk",): 200}
    assert (counters["tiercache_lookups_failed"], counters["tiercache_loads_skipped"]) == ({(): 1}, {(): 1})
    ((counts, sums),) = new.data["distributions"]["vllm:kv_offload_lookup_async_delay_seconds"].values()
    assert (sum(counts), sum(sums)) == (1, 0.2)


# Added up and sent


def distribution(bounds: Any, *amounts: float) -> Distribution:
    found = Distribution.of(bounds)
    for amount in amounts:
        found.add(amount)
    return found


def one_rank(cache: str, *, hits: int = 0, queued: float = 0, breaker: str = "closed") -> TierCacheStats:
    stats = TierCacheStats()
    stats.count("tiercache_hits", hits, ("disk",))
    stats.distribute(LOAD_SIZE.name, distribution(LOAD_SIZE.bounds, *[3e6] * hits))
    states = {("disk", state): float(state == breaker) for state in ("closed", "open", "half-open")}
    stats.show(cache, {"tiercache_writer_queued": {("disk",): queued}, "tiercache_breaker": states})
    return stats


def test_ranks_add_up_and_a_later_gauge_replaces_an_earlier_one() -> None:
    stats = one_rank("a", hits=3, queued=5).aggregate(one_rank("b", hits=4, queued=7)).aggregate(one_rank("a", hits=1))
    assert stats.data["counters"] == {"tiercache_hits": {("disk",): 8}}
    ((counts, sums),) = stats.data["distributions"][LOAD_SIZE.name].values()
    assert (sum(counts), sum(sums)) == (8, 24e6)
    assert stats.reduce()["Queued chunks"] == 7
    nothing = TierCacheStats()
    nothing.count("tiercache_hits", 0, ("disk",))
    nothing.distribute(LOAD_SIZE.name, distribution(LOAD_SIZE.bounds))
    assert nothing.is_empty() and not one_rank("a").is_empty()


def test_figures_survive_the_way_between_processes_and_beside_other_connectors() -> None:
    """From worker to scheduler by pickle, from there to the server by vLLM's msgpack."""
    stats = pickle.loads(pickle.dumps(one_rank("a", hits=3, queued=2)))
    sent = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats=stats.to_dict()))
    came = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
    found = TierCacheConnector.build_kv_connector_stats(came.scheduler_stats.kv_connector_stats)
    # A tuple has become a list; adding goes on as before.
    assert found.aggregate(TierCacheStats()).reduce() == stats.reduce()
    both = found.aggregate(one_rank("b", hits=1))
    assert both.data["counters"] == {"tiercache_hits": {("disk",): 4}}
    assert both.data["gauges"].keys() == {"a", "b"}
    together = MultiConnector.build_kv_connector_stats({"TierCacheConnector": one_rank("a", hits=2).to_dict()})
    assert together["TierCacheConnector"].data["counters"] == {"tiercache_hits": {("disk",): 2}}


def test_log_line_says_what_an_operator_wants_to_know() -> None:
    stats = one_rank("a", queued=2, breaker="open")
    stats.data["counters"] = {
        "tiercache_queried_tokens": {("cpu",): 900, ("disk",): 400},
        "tiercache_hit_tokens": {("cpu",): 500, ("disk",): 300},
        "vllm:kv_offload_load_bytes": {(): 8_000_000},
        "vllm:kv_offload_load_time": {(): 0.004},
        "vllm:kv_offload_tiering_write_bytes": {("disk",): 2_500_000},
        "tiercache_tier_evicted": {("cpu",): 4},
        "tiercache_writer_dropped": {("disk",): 1},
        "tiercache_loads": {("whole",): 2, ("part",): 1},
    }
    assert stats.reduce() == {
        "Queried tokens": 900,
        "Hit tokens (cpu)": 500,
        "Hit tokens (disk)": 300,
        "Loaded MB": 8.0,
        "Loaded MB/s": 2000.0,
        "Stored MB": 0.0,
        "Written MB (disk)": 2.5,
        "Evicted chunks (cpu)": 4,
        "Queued chunks": 2,
        "Incomplete loads": 1,
        "Chunks not written": 1,
        "Breakers not closed": 1,
    }


# Prometheus

LABELS = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}


def metrics_of() -> TierCachePromMetrics:
    kinds = {kind: kind for kind in (Counter, Gauge, Histogram)}
    return TierCacheConnector.build_prom_metrics(SimpleNamespace(kv_transfer_config=None), kinds, LABELS, ENGINES)


@pytest.fixture
def metrics() -> Iterator[TierCachePromMetrics]:
    """At its end Prometheus's registry is as it was."""
    before = set(REGISTRY._collector_to_names)
    yield metrics_of()
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def value(name: str, engine: str = "0", **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "m", "engine": engine, **labels})


def test_each_engine_has_its_figures_with_vllms_labels(metrics: TierCachePromMetrics) -> None:
    for engine, hits in ((0, 3), (1, 5), (0, 2)):
        metrics.observe(one_rank("a", hits=hits, queued=hits).to_dict(), engine)
    assert value("tiercache_hits_total", tier="disk") == 5
    assert value("tiercache_hits_total", engine="1", tier="disk") == 5
    assert value("tiercache_writer_queued", tier="disk") == 2
    assert value("vllm:kv_offload_load_size_count") == 5
    assert value("vllm:kv_offload_load_size_bucket", le="5e+06") == 5
    assert value("vllm:kv_offload_load_size_bucket", le="1e+06") == 0
    assert value("vllm:kv_offload_load_size_sum") == 15e6


def test_gauges_are_sums_over_ranks_also_when_only_one_has_news(metrics: TierCachePromMetrics) -> None:
    metrics.observe(one_rank("a", queued=4).aggregate(one_rank("b", queued=3)).data)
    metrics.observe(one_rank("b", queued=1, breaker="open").data)
    assert value("tiercache_writer_queued", tier="disk") == 5
    assert [value("tiercache_breaker", tier="disk", state=state) for state in ("closed", "open")] == [1, 1]
    metrics.observe(one_rank("b", queued=1).data)
    assert [value("tiercache_breaker", tier="disk", state=state) for state in ("closed", "open")] == [2, 0]


def test_amounts_stay_in_their_buckets_whatever_is_rounded(metrics: TierCachePromMetrics) -> None:
    found = distribution(EXPORTED["tiercache_read_seconds"].bounds, 0.1, 0.1, 0.1)
    assert found.sum / 3 > 0.1, "the mean of three has to be rounded up here, or this proves nothing"
    stats = TierCacheStats()
    stats.distribute("tiercache_read_seconds", found, ("disk",))
    metrics.observe(stats.data)
    assert value("tiercache_read_seconds_bucket", tier="disk", le="0.1") == 3


def test_second_server_in_a_process_begins_anew(metrics: TierCachePromMetrics) -> None:
    metrics.observe(one_rank("a", hits=3).data)
    again = metrics_of()
    assert value("tiercache_hits_total", tier="disk") is None
    again.observe(one_rank("a", hits=1).data)
    assert value("tiercache_hits_total", tier="disk") == 1


def test_another_connectors_name_is_left_to_it(metrics: TierCachePromMetrics, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's OffloadingConnector may be beside ours, made before or after it, and fails where a name is taken."""
    theirs = Counter("vllm:kv_offload_load_bytes", "Theirs.", LABELS)
    stats = one_rank("a", hits=3)
    stats.count("vllm:kv_offload_load_bytes", 7)
    with caplog.at_level("WARNING", "tiercache.vllm"):
        for _ in range(2):
            metrics.observe(stats.data)
    assert caplog.text.count("vllm:kv_offload_load_bytes is not exported: another connector exports it") == 1
    assert value("tiercache_hits_total", tier="disk") == 6
    assert next(iter(theirs.collect())).samples == []


def test_every_name_can_be_registered_and_those_of_vllm_mean_what_they_mean_there() -> None:
    """The same kind, the same labels, the same buckets, and no name that vLLM's offloading does not have."""
    theirs = {**get_connector_metric_definitions(), **TieringOffloadingSpec.build_metric_definitions({})}
    kinds = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
    ours, registry = 0, CollectorRegistry()
    for name, family in EXPORTED.items():
        kind, known_as = kinds[family.kind], getattr(offloading, f"Offloading{family.kind.title()}Metadata")
        buckets = {"buckets": family.bounds} if family.kind == "histogram" else {}
        kind(name, family.text, [*LABELS, *family.labels], registry=registry, **buckets)
        if name.startswith("vllm:"):
            ours += 1
            assert (known_as, family.labels) == (type(theirs[name]), tuple(theirs[name].labelnames)), name
            assert family.kind != "histogram" or family.bounds == tuple(theirs[name].buckets), name
    assert ours > 10
    assert len(registry._collector_to_names) == len(EXPORTED)


def test_every_metric_of_a_panel_of_the_dashboard_is_exported() -> None:
    ends = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
    exported = {f"{name}{end}" for name, family in EXPORTED.items() for end in ends[family.kind]}
    for panel in panels():
        assert names_in(panel) <= exported, panel["title"]
