"""The cache's figures on their way through vLLM: added up, serialised, logged, exported."""

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
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingHistogramMetadata
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tiercache.core.estimate import Distribution
from tiercache.integrations.vllm import TierCacheConnector
from tiercache.integrations.vllm.metrics import EXPORTED, LOAD_SIZE, TierCachePromMetrics, TierCacheStats

LABELS = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}


def sizes(*amounts: float) -> Distribution:
    found = Distribution.of(LOAD_SIZE.bounds)
    for amount in amounts:
        found.add(amount)
    return found


def one_rank(cache: str, *, hits: int = 0, queued: float = 0, breaker: str = "closed") -> TierCacheStats:
    stats = TierCacheStats()
    stats.count("tiercache_hits", hits, ("disk",))
    stats.distribute(LOAD_SIZE.name, sizes(*[3e6] * hits))
    states = {("disk", state): float(state == breaker) for state in ("closed", "open", "half-open")}
    stats.show(cache, {"tiercache_writer_queued": {("disk",): queued}, "tiercache_breaker": states})
    return stats


def test_ranks_add_up_and_a_later_gauge_replaces_an_earlier_one() -> None:
    stats = one_rank("a", hits=3, queued=5).aggregate(one_rank("b", hits=4, queued=7)).aggregate(one_rank("a", hits=1))
    assert stats.data["counters"] == {"tiercache_hits": {("disk",): 8}}
    ((counts, sums),) = stats.data["distributions"][LOAD_SIZE.name].values()
    assert (sum(counts), sum(sums)) == (8, 24e6)
    assert stats.reduce()["Queued chunks"] == 7


def test_nothing_is_empty_and_so_is_a_count_of_nothing() -> None:
    stats = TierCacheStats()
    stats.count("tiercache_hits", 0, ("disk",))
    stats.distribute(LOAD_SIZE.name, sizes())
    assert stats.is_empty()
    assert not one_rank("a").is_empty()


def test_figures_survive_the_way_between_processes() -> None:
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


def test_several_connectors_beside_each_other_find_ours() -> None:
    together = MultiConnector.build_kv_connector_stats({"TierCacheConnector": one_rank("a", hits=2).to_dict()})
    assert together["TierCacheConnector"].data["counters"] == {"tiercache_hits": {("disk",): 2}}


def test_log_line_says_what_an_operator_wants_to_know() -> None:
    stats = one_rank("a", queued=2, breaker="open")
    for name, amount, labels in (
        ("tiercache_queried_tokens", 900, ("cpu",)),
        ("tiercache_queried_tokens", 400, ("disk",)),
        ("tiercache_hit_tokens", 500, ("cpu",)),
        ("tiercache_hit_tokens", 300, ("disk",)),
        ("vllm:kv_offload_load_bytes", 8_000_000, ()),
        ("vllm:kv_offload_load_time", 0.004, ()),
        ("vllm:kv_offload_tiering_write_bytes", 2_500_000, ("disk",)),
        ("tiercache_tier_evicted", 4, ("cpu",)),
        ("tiercache_writer_dropped", 1, ("disk",)),
        ("tiercache_loads", 2, ("whole",)),
        ("tiercache_loads", 1, ("part",)),
    ):
        stats.count(name, amount, labels)
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


@pytest.fixture
def made() -> Iterator[list[Any]]:
    """What a test has registered; at its end the registry is as it was."""
    before = set(REGISTRY._collector_to_names)
    yield []
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def metrics_of(engines: dict[int, list[object]] = ENGINES) -> TierCachePromMetrics:
    config = SimpleNamespace(kv_transfer_config=None)
    kinds = {kind: kind for kind in (Counter, Gauge, Histogram)}
    return TierCacheConnector.build_prom_metrics(config, kinds, LABELS, engines)


def value(name: str, engine: str = "0", **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "m", "engine": engine, **labels})


def test_each_engine_has_its_figures_with_vllms_labels(made: list[Any]) -> None:
    metrics = metrics_of()
    for engine, hits in ((0, 3), (1, 5), (0, 2)):
        metrics.observe(one_rank("a", hits=hits, queued=hits).to_dict(), engine)
    assert value("tiercache_hits_total", tier="disk") == 5
    assert value("tiercache_hits_total", engine="1", tier="disk") == 5
    assert value("tiercache_writer_queued", tier="disk") == 2
    assert value("vllm:kv_offload_load_size_count") == 5
    assert value("vllm:kv_offload_load_size_bucket", le="5e+06") == 5
    assert value("vllm:kv_offload_load_size_bucket", le="1e+06") == 0
    assert value("vllm:kv_offload_load_size_sum") == 15e6


def test_gauges_are_sums_over_ranks_also_when_only_one_has_news(made: list[Any]) -> None:
    metrics = metrics_of()
    metrics.observe(one_rank("a", queued=4).aggregate(one_rank("b", queued=3)).data)
    metrics.observe(one_rank("b", queued=1, breaker="open").data)
    assert value("tiercache_writer_queued", tier="disk") == 5
    assert [value("tiercache_breaker", tier="disk", state=state) for state in ("closed", "open")] == [1, 1]
    metrics.observe(one_rank("b", queued=1).data)
    assert [value("tiercache_breaker", tier="disk", state=state) for state in ("closed", "open")] == [2, 0]


def test_amounts_stay_in_their_buckets_whatever_is_rounded(made: list[Any]) -> None:
    stats = TierCacheStats()
    found = Distribution.of(EXPORTED["tiercache_read_seconds"].bounds)
    for _ in range(3):
        found.add(0.1)
    assert found.sum / 3 > 0.1, "the mean of three has to be rounded up here, or this proves nothing"
    stats.distribute("tiercache_read_seconds", found, ("disk",))
    metrics_of().observe(stats.data)
    assert value("tiercache_read_seconds_bucket", tier="disk", le="0.1") == 3


def test_second_server_in_a_process_begins_anew(made: list[Any]) -> None:
    metrics_of().observe(one_rank("a", hits=3).data)
    again = metrics_of()
    assert value("tiercache_hits_total", tier="disk") is None
    again.observe(one_rank("a", hits=1).data)
    assert value("tiercache_hits_total", tier="disk") == 1


def test_name_of_another_connector_is_left_to_it(made: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's OffloadingConnector may be beside ours, made before or after it, and fails where a name is taken."""
    metrics = metrics_of()
    theirs = Counter("vllm:kv_offload_load_bytes", "Theirs.", LABELS)
    stats = one_rank("a", hits=3)
    stats.count("vllm:kv_offload_load_bytes", 7)
    with caplog.at_level("WARNING", "tiercache.vllm"):
        for _ in range(2):
            metrics.observe(stats.data)
    assert caplog.text.count("vllm:kv_offload_load_bytes is not exported: another connector exports it") == 1
    assert value("tiercache_hits_total", tier="disk") == 6
    assert next(iter(theirs.collect())).samples == []


def test_names_of_vllm_mean_what_they_mean_there() -> None:
    """The same kind, the same labels, the same buckets, and no name that vLLM's offloading does not have."""
    theirs = {**get_connector_metric_definitions(), **TieringOffloadingSpec.build_metric_definitions({})}
    kinds = {
        OffloadingCounterMetadata: "counter",
        OffloadingGaugeMetadata: "gauge",
        OffloadingHistogramMetadata: "histogram",
    }
    ours = {name: family for name, family in EXPORTED.items() if name.startswith("vllm:")}
    assert len(ours) > 15
    for name, family in ours.items():
        assert (family.kind, family.labels) == (kinds[type(theirs[name])], tuple(theirs[name].labelnames)), name
        if family.kind == "histogram":
            assert family.bounds == tuple(theirs[name].buckets), name


def test_every_name_can_be_registered() -> None:
    registry = CollectorRegistry()
    for family in EXPORTED.values():
        kind = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}[family.kind]
        more = {"buckets": family.bounds} if family.kind == "histogram" else {}
        kind(family.name, family.text, [*LABELS, *family.labels], registry=registry, **more)
    assert len(registry._collector_to_names) == len(EXPORTED)
