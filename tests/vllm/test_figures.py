"""What the two halves of the connector say is new, against what a real cache counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tiercache.bridge import CacheThread
from tiercache.config import Config
from tiercache.control.families import Labels, figures_of
from tiercache.core.estimate import Distribution
from tiercache.core.layout import Layout
from tiercache.integrations.vllm.metrics import SAMPLED, SchedulerFigures, TierCacheStats, WorkerFigures
from tiercache.integrations.vllm.planning import Match

LAYOUT = Layout("m", chunk_tokens=16, bytes_per_token=32 << 10)
SLOTS, CHUNKS = 4, 6


class Engine:
    """Its steps, each of which asks for what is new, and a cache with four slots above a disk."""

    def __init__(self, directory: Path) -> None:
        config = Config(
            max_local_cpu_size=SLOTS * LAYOUT.chunk_bytes / 2**30, local_disk=str(directory), max_local_disk_size=0.1
        )
        self.thread = CacheThread(config, LAYOUT)
        self.figures = WorkerFigures(self.thread, "cache", every_s=0.0)
        self.total = TierCacheStats()
        self.keys = self.thread.cache.keys(list(range(CHUNKS * LAYOUT.chunk_tokens)))

    def step(self) -> TierCacheStats | None:
        new = self.figures.take()
        self.thread.submit(self._nothing()).result(10)  # the cache's loop has done what it was asked for
        if new is not None:
            self.total.aggregate(new)
        return new

    def stores_and_loads(self) -> None:
        async def both() -> None:
            cache = self.thread.cache
            for key in self.keys:
                await cache.put(key, np.ones(LAYOUT.chunk_bytes, np.uint8))
                await cache.flush(10)
            cache.clear_hot()
            for key in (*self.keys, self.keys[-1], cache.keys([7] * LAYOUT.chunk_tokens)[0]):
                async with cache.get(key) as lease:
                    assert (lease is None) == (key not in self.keys)

        self.thread.submit(both()).result(30)

    async def _nothing(self) -> None: ...

    def counted(self) -> dict[str, dict[Labels, float]]:
        """What the cache says itself, in the names under which vLLM exports it."""

        async def look() -> dict[str, dict[Labels, float]]:
            figures = figures_of(self.thread.cache)
            return {
                family.name: {
                    labels: value.count if isinstance(value, Distribution) else value
                    for labels, value in family.rows(figures)
                }
                for family in SAMPLED
            }

        return self.thread.submit(look()).result(10)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.thread.close()


def settle(engine: Engine) -> None:
    """Steps until two in a row have nothing new: one that asked before something happened may bring it later."""
    silent = 0
    for _ in range(100):
        silent = 0 if engine.step() else silent + 1
        if silent == 2:
            return
    raise AssertionError(engine.total.data)


def test_what_steps_bring_adds_up_to_what_the_cache_counts(engine: Engine) -> None:
    settle(engine)
    engine.stores_and_loads()
    settle(engine)
    engine.stores_and_loads()
    settle(engine)
    data = engine.total.data
    expected = engine.counted()
    assert expected["tiercache_hits"][("disk",)] == 2 * CHUNKS
    assert expected["tiercache_tier_evicted"][("cpu",)] > 0
    assert expected["tiercache_reader_misses"][()] == 2
    for family in SAMPLED:
        known = {labels: value for labels, value in expected[family.name].items() if value}
        if family.kind == "counter":
            assert data["counters"].get(family.name, {}) == pytest.approx(known), family.name
        elif family.kind == "histogram":
            found = {labels: sum(counts) for labels, (counts, _) in data["distributions"].get(family.name, {}).items()}
            assert found == known, family.name
        else:
            assert data["gauges"]["cache"][family.name] == expected[family.name], family.name


def test_step_without_news_says_nothing(engine: Engine) -> None:
    settle(engine)
    assert engine.figures.take() is None


def test_cache_is_looked_at_once_an_interval(engine: Engine) -> None:
    figures = WorkerFigures(engine.thread, "other", every_s=3600.0)
    engine.figures = figures
    settle(engine)
    assert engine.total.data["gauges"]["other"]["tiercache_slots"] == {(): SLOTS}
    engine.stores_and_loads()
    for _ in range(5):
        assert engine.step() is None


def test_transfers_are_told_with_the_next_step(engine: Engine) -> None:
    settle(engine)
    engine.figures.loaded(3000, 0.5, "part")
    engine.figures.loaded(0, 9.0, "failed")
    engine.figures.stored(2_000_000, 0.25)
    engine.figures.stored(0, 9.0)
    new = engine.step()
    assert new is not None
    assert new.data["counters"] == {
        "tiercache_loads": {("part",): 1, ("failed",): 1},
        "vllm:kv_offload_load_bytes": {(): 3000},
        "vllm:kv_offload_load_time": {(): 0.5},
        "vllm:kv_offload_store_bytes": {(): 2_000_000},
        "vllm:kv_offload_store_time": {(): 0.25},
    }
    ((counts, sums),) = new.data["distributions"]["vllm:kv_offload_store_size"].values()
    assert (counts[1], sums[1]) == (1, 2_000_000)


def test_closed_cache_is_no_error(engine: Engine) -> None:
    settle(engine)
    engine.thread.close()
    assert engine.figures.take() is None


# The scheduler's half


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
