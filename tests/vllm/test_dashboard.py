"""The Grafana dashboard names metrics that vLLM's server exports with the connector."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from tests.control.test_dashboard import names_in, panels
from tests.vllm.test_figures import Engine, settle
from tiercache.integrations.vllm import TierCacheConnector
from tiercache.integrations.vllm.metrics import SchedulerFigures
from tiercache.integrations.vllm.planning import Match


def test_every_metric_of_a_panel_is_exported_by_build_prom_metrics(tmp_path: Path) -> None:
    before = set(REGISTRY._collector_to_names)
    engine = Engine(tmp_path)
    try:
        settle(engine)
        engine.stores_and_loads()
        engine.figures.loaded(1000, 0.1, "part")
        engine.figures.stored(1000, 0.1)
        settle(engine)
    finally:
        engine.thread.close()
    scheduler = SchedulerFigures(chunk_tokens=16)
    scheduler.looked_up(Match(1, {"cpu": 16, "disk": 0}), 40, 0.1, skipped=True)
    scheduler.looked_up(Match(failed=True), 40, None, skipped=False)
    if (new := scheduler.take()) is not None:
        engine.total.aggregate(new)
    kinds = {kind: kind for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = TierCacheConnector.build_prom_metrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"]})
    metrics.observe(engine.total.data)
    try:
        exported = {sample.name for family in REGISTRY.collect() for sample in family.samples}
        # A counter that nothing has been added to has no value yet.
        quiet = {"tiercache_read_failures_total", "tiercache_writer_dropped_total", "tiercache_writer_skipped_total"}
        quiet |= {"tiercache_puts_skipped_total"}
        for panel in panels():
            assert names_in(panel) - quiet <= exported, panel["title"]
    finally:
        for collector in set(REGISTRY._collector_to_names) - before:
            REGISTRY.unregister(collector)
