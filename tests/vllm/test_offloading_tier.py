"""Our tier below vLLM's own offloading, driven as vLLM's scheduler drives it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.vllm.offloaded import ROW_BYTES, ROWS, Offloaded, content_of, engine_of, name_of
from tests.vllm.slow_server import QUESTIONS
from tests.vllm.tiny_llama import save_tiny
from tiercache.core.breaker import BreakerState
from tiercache.errors import ConfigError

NAMES = [name_of(number) for number in range(ROWS)]
Make = Callable[..., Offloaded]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Iterator[Make]:
    """Engines on one directory."""
    made: list[Offloaded] = []

    def make(engine: dict[str, Any] | None = None, **settings: Any) -> Offloaded:
        made.append(Offloaded(engine_of(model, **(engine or {})), tmp_path / "kv", **settings))
        return made[-1]

    yield make
    for one in made:
        if hasattr(one, "rows"):
            one.close()


def chunk_files(directory: Path) -> list[Path]:
    return sorted(path for path in (directory / "kv").glob("??/*") if path.is_file())


def stored(engine: Offloaded) -> None:
    engine.store(NAMES, engine.request("first"))
    engine.finish("first")
    engine.forget_memory()


def assert_right(engine: Offloaded, names: list[bytes], context: Any) -> None:
    for name, found in zip(names, engine.content(names, context), strict=True):
        assert np.array_equal(found, content_of(name))


def test_what_left_memory_comes_back_from_disk(make: Make) -> None:
    engine = make()
    stored(engine)
    context = engine.request("second")
    assert engine.find([*NAMES, name_of(9)], context) == len(NAMES)
    assert_right(engine, NAMES, context)


def test_what_is_known_is_promoted_in_the_step_that_asks(make: Make) -> None:
    from vllm.v1.kv_offload.base import LookupResult

    engine = make()
    stored(engine)
    assert engine.manager.lookup(NAMES[0], engine.request("second")) is LookupResult.HIT_PENDING


def test_another_engine_finds_it_after_a_restart(make: Make) -> None:
    first = make()
    stored(first)
    first.close()
    second = make()
    context = second.request("second")
    assert second.find(NAMES, context) == len(NAMES)
    assert_right(second, NAMES, context)


def test_two_engines_on_one_directory_share(make: Make) -> None:
    one, other = make(), make()
    stored(one)
    context = other.request("second")
    assert other.find(NAMES, context) == len(NAMES)
    assert_right(other, NAMES, context)


@pytest.mark.parametrize(
    "engine", [{"dtype": "bfloat16"}, {"hf_overrides": {"rope_theta": 5000.0}}, {"enable_lora": True}]
)
def test_another_engine_that_computes_otherwise_finds_nothing(make: Make, engine: dict[str, Any]) -> None:
    stored(make())
    other = make(engine)
    assert other.find(NAMES, other.request("second")) == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"kv_cache_dtype_skip_layers": ["0"]}, {"kv_cache_dtype_skip_layers": ["1"]}),
        ({"mamba_cache_dtype": "float16"}, {"mamba_cache_dtype": "bfloat16"}),
        ({"model_impl": "vllm"}, {"model_impl": "transformers"}),
    ],
    ids=str,
)
def test_settings_that_decide_on_the_bytes_of_a_row_count(
    make: Make, one: dict[str, Any], other: dict[str, Any]
) -> None:
    """vLLM tells its offloading nothing of them."""
    stored(make(one))
    reader = make(other)
    assert reader.find(NAMES, reader.request("second")) == 0


def test_another_size_of_the_cpu_tier_finds_it(make: Make) -> None:
    stored(make())
    other = make(rows=2 * ROWS)
    assert other.find(NAMES, other.request("second")) == len(NAMES)


def test_nothing_is_shared_where_vllms_configuration_is_not_to_be_found(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiercache.integrations.vllm_offloading import tier

    monkeypatch.setattr(tier, "engine_config", lambda engine_id: None)
    stored(make())
    other = make()
    assert other.find(NAMES, other.request("second")) == 0


def test_hashes_that_may_collide_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="--prefix-caching-hash-algo sha256"):
        make({"prefix_caching_hash_algo": "xxhash"})


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_damaged_chunk_is_a_miss_and_the_others_are_loaded(make: Make, tmp_path: Path, damage: str) -> None:
    engine = make()
    stored(engine)
    content = {content_of(name).tobytes(): name for name in NAMES}
    victim = chunk_files(tmp_path)[0]
    name = content[victim.read_bytes()[4096 : 4096 + ROW_BYTES]]
    if damage == "flip":
        raw = bytearray(victim.read_bytes())
        raw[5000] ^= 1
        victim.write_bytes(raw)
    else:
        victim.write_bytes(victim.read_bytes()[:6000])
    context = engine.request("second")
    before = NAMES.index(name)
    assert engine.find(NAMES, context) == before
    whole = [one for one in NAMES if one != name]
    assert [engine.manager.primary_tier.lookup(one, context).name for one in whole] == ["HIT"] * len(whole)
    assert_right(engine, whole, context)


def test_the_cap_holds(make: Make, tmp_path: Path) -> None:
    cap_bytes = 10 * (ROW_BYTES + 4096) + (64 << 10)
    engine = make(max_local_disk_size=cap_bytes / 2**30)
    for number in range(10):
        names = [name_of(10 * number + place) for place in range(ROWS)]
        engine.store(names, engine.request(str(number)))
        engine.finish(str(number))
    files = chunk_files(tmp_path)
    assert 0 < sum(path.stat().st_blocks * 512 for path in files) <= cap_bytes
    assert len(files) < 10 * ROWS


def test_after_a_reset_nothing_is_found_that_was_stored_before(make: Make) -> None:
    """vLLM resets its caches when weights are replaced, and does not say whether they were."""
    engine = make()
    stored(engine)
    running = engine.request("running")
    engine.manager.reset_cache()
    assert engine.find(NAMES, engine.request("second")) == 0
    # What it has computed may be from before the reset.
    engine.store(NAMES, running)
    engine.step()
    engine.forget_memory()
    assert engine.find(NAMES, engine.request("third")) == 0


def test_what_is_stored_after_a_reset_is_found(make: Make) -> None:
    engine = make()
    engine.manager.reset_cache()
    stored(engine)
    assert engine.find(NAMES, engine.request("second")) == len(NAMES)


def test_routers_are_told_what_comes_and_goes(make: Make) -> None:
    from vllm.v1.kv_offload.base import Medium

    engine = make(events=True, local_cpu=False)
    stored(engine)
    events = [event for event in engine.manager.take_events() if event.medium is Medium.STORAGE]
    assert [(event.removed, set(event.keys)) for event in events] == [(False, set(NAMES))]
    tier = engine.tier
    tier.thread.submit(tier.thread.cache.forget(tier._keys(NAMES[:1]))).result(10)
    assert engine.manager.has_pending_work()
    events = [event for event in engine.manager.take_events() if event.medium is Medium.STORAGE]
    assert [(event.removed, event.keys) for event in events] == [(True, NAMES[:1])]


def test_routers_are_told_of_a_reset(make: Make) -> None:
    from vllm.v1.kv_offload.base import Medium

    engine = make(events=True)
    stored(engine)
    list(engine.manager.take_events())
    engine.manager.reset_cache()
    engine.step()
    events = [event for event in engine.manager.take_events() if event.medium is Medium.STORAGE]
    assert [(event.removed, set(event.keys)) for event in events] == [(True, set(NAMES))]


def test_a_tier_that_is_not_well_is_not_promised(make: Make) -> None:
    """Room in vLLM's memory would be made for what is not read, again and again."""
    from vllm.v1.kv_offload.base import LookupResult

    engine = make()
    stored(engine)
    cache = engine.tier.thread.cache

    async def fails() -> None:
        (reader,) = cache.parts.reader.tiers
        while reader.breaker.state is BreakerState.CLOSED:
            reader.breaker.failed(asyncio.get_running_loop().time())

    engine.tier.thread.submit(fails()).result(10)
    assert engine.manager.lookup(NAMES[0], engine.request("second")) is LookupResult.RETRY
    assert engine.find(NAMES, engine.request("third")) == 0


def test_a_hundred_chunks_of_windows_are_one_question_with_one_deadline(make: Make) -> None:
    from vllm.v1.kv_offload.base import LookupResult

    engine = make(
        lookup_timeout_ms=50,
        remote_storage_plugins=["slow.a"],
        **{
            "remote_storage_plugin.slow.a.module_path": "tests.vllm.slow_server",
            "remote_storage_plugin.slow.a.class_name": "SlowServer",
        },
    )
    context, names = engine.request("first"), [name_of(number) for number in range(100)]
    engine.place(names, context)
    QUESTIONS.clear()
    assert {engine.manager.lookup(name, context) for name in reversed(names)} == {LookupResult.RETRY}
    engine.step()
    assert {engine.manager.lookup(name, context) for name in reversed(names)} == {LookupResult.MISS}
    assert QUESTIONS == [100]
    # The request has waited as long as it may.
    engine.manager.lookup(name_of(200), context)
    engine.step()
    assert engine.manager.lookup(name_of(200), context) is LookupResult.MISS
    assert QUESTIONS == [100]


def test_vllm_exports_the_figures_also_for_a_second_engine(make: Make, model: Path) -> None:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    engine = make()
    stored(engine)
    engine.tier.get_stats()
    engine.settle()
    stats = engine.tier.get_stats()
    config = engine_of(model)
    config.kv_transfer_config.kv_connector_extra_config = engine.tier._offloading_spec.extra_config | {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "tiercache.integrations.vllm_offloading",
    }
    kinds = {kind: kind for kind in (Counter, Gauge, Histogram)}
    for _ in range(2):
        unregister_vllm_metrics()
        OffloadPromMetrics(config, kinds, ["engine"], {0: ["0"]}).observe(stats.data)
    labels = {"engine": "0", "tier": "disk"}
    assert REGISTRY.get_sample_value("vllm:tiercache_tier_writes_total", labels) == len(NAMES)
    unregister_vllm_metrics()


def test_what_a_request_says_is_needed_again_is_in_memory_by_then(make: Make) -> None:
    engine = make()
    stored(engine)
    context = engine.request("second", session="chat", ended="user", next_in_s=0.0)
    engine.find(NAMES, context)
    engine.forget_memory()
    engine.finish("second")
    hot = hot_when(engine, len(NAMES))
    assert hot == len(NAMES)


def test_chunks_that_vllm_touches_come_into_the_hot_cache(make: Make) -> None:
    engine = make()
    stored(engine)
    engine.manager.touch(NAMES, engine.request("second"))
    assert hot_when(engine, len(NAMES)) == len(NAMES)


def test_a_request_can_have_forgotten_what_it_stored(make: Make) -> None:
    engine = make()
    engine.store(NAMES, engine.request("first", forget=True))
    engine.step()
    engine.finish("first")
    engine.forget_memory()
    assert engine.find(NAMES, engine.request("second")) == 0


def test_what_others_had_stored_stays(make: Make) -> None:
    engine = make()
    stored(engine)
    # vLLM's own memory has it, or it is computed anew: it is stored once more.
    engine.store([*NAMES[:3], name_of(9)], engine.request("second", forget=True))
    engine.step()
    engine.finish("second")
    engine.forget_memory()
    context = engine.request("third")
    assert engine.find([*NAMES, name_of(9)], context) == len(NAMES)


def test_what_is_to_be_forgotten_is_also_after_a_reset(make: Make) -> None:
    """Its names are others by the time the request ends. A restart would find them again."""
    engine = make()
    engine.store(NAMES, engine.request("first", forget=True))
    engine.step()
    engine.manager.reset_cache()
    engine.finish("first")
    engine.close()
    again = make()
    assert again.find(NAMES, again.request("second")) == 0


def hot_when(engine: Offloaded, chunks: int) -> int:
    """How many are hot, once that many are."""
    cache, keys = engine.tier.thread.cache, engine.tier._keys(NAMES)

    async def hot() -> int:
        try:
            async with asyncio.timeout(10):
                while cache.lookup_hot(keys) < chunks:
                    await asyncio.sleep(0)
        except TimeoutError:
            pass
        return cache.lookup_hot(keys)

    return int(engine.tier.thread.submit(hot()).result(20))


def test_vllms_memory_is_given_back_when_the_cache_cannot_be_opened(make: Make) -> None:
    before = set(Path("/dev/shm").glob("vllm_offload_*"))
    with pytest.raises(ConfigError):
        make(local_disk="/dev/null/kv")
    assert set(Path("/dev/shm").glob("vllm_offload_*")) <= before


def test_vllms_memory_is_given_back(make: Make) -> None:
    engine = make()
    stored(engine)
    view = engine.manager.primary_tier.get_kv_memoryview()
    engine.close()
    with pytest.raises(ValueError, match="released"):
        view.nbytes  # noqa: B018


def test_after_its_end_there_are_misses_and_no_errors(make: Make) -> None:
    from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext

    engine = make(events=True)
    stored(engine)
    context, tier = engine.request("second"), engine.tier
    engine.close()
    assert tier.lookup(NAMES[0], context) is LookupResult.MISS
    tier.touch(NAMES, context)
    tier.on_schedule_end(ScheduleEndContext((), ()))
    tier.on_request_finished(context)
    tier.get_stats()
    tier.drain_jobs()
    tier.shutdown()
    assert list(tier.get_finished_jobs()) == []


def test_settings_of_the_connector_that_nobody_reads_here_are_named_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(priority_limit=3, min_retrieve_tokens=64)
    for number in range(2):
        engine.request(str(number), expect_tokens=64)
    assert "accepted but not honoured: min_retrieve_tokens, priority_limit (up to vLLM's offloading)" in caplog.text
    assert caplog.text.count("tiercache.expect_tokens is not honoured") == 1
