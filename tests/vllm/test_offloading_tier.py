"""Our tier below vLLM's own offloading: vLLM's tiering manager above it, driven as vLLM's scheduler drives it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_offload import config as offloading
from vllm.v1.kv_offload.base import LookupResult, Medium, ReqContext, ScheduleEndContext, make_offload_key

from tests.vllm.cpu_spec import CpuTieringSpec
from tests.vllm.drive import chunk_files
from tests.vllm.engines import offloading_settings
from tests.vllm.halves import Cached
from tests.vllm.models import untrained_llama
from tiercache.core.breaker import BreakerState
from tiercache.core.keys import ChunkKey
from tiercache.errors import ConfigError
from tiercache.integrations.vllm_offloading import tier
from tiercache.tiers.remote.base import RemoteTier

ROW_BYTES = 8192
ROWS = 4
"""Rows of vLLM's CPU tier."""


def engine_of(model: Path, **engine: Any) -> Any:
    """vLLM's configuration of an engine that offloads."""
    settings = {"skip_tokenizer_init": True, "block_size": 32, "enforce_eager": True, "dtype": "float32"} | engine
    transfer: Any = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return EngineArgs(model=str(model), kv_transfer_config=transfer, **settings).create_engine_config()


def name_of(number: int, group: int = 0) -> bytes:
    """vLLM's, of a chunk."""
    return bytes(make_offload_key(bytes([number]) * 32, group))


NAMES = [name_of(number) for number in range(ROWS)]


def content_of(name: bytes) -> np.ndarray:
    random = np.random.default_rng(int.from_bytes(name[:4] + name[-4:], "big"))
    return random.integers(0, 256, ROW_BYTES, dtype=np.uint8)


class Offloaded(Cached):
    """A scheduler's half of vLLM's offloading, with one tier of ours below `ROWS` rows of memory."""

    def __init__(self, vllm_config: Any, directory: Path, rows: int = ROWS, *, events: bool, **settings: Any) -> None:
        """`settings` are those of the tier. The tier finds `vllm_config` here, as it finds it in vLLM's connector."""
        said = offloading_settings(directory, **{"max_local_cpu_size": 0.01, "device": "none"} | settings)
        config = offloading.OffloadingConfig(
            groups=(offloading.OffloadingGroupConfig(32, ("layer",), 0),),
            worker_kv_bytes_per_block=ROW_BYTES,
            enable_kv_cache_events=events,
            extra_config=said["kv_connector_extra_config"] | {"cpu_bytes_to_use": rows * ROW_BYTES},
            engine_id=vllm_config.kv_transfer_config.engine_id,
            model=offloading.OffloadingModelConfig("model", "float32"),
            cache=offloading.OffloadingCacheConfig(32, 1),
            parallel=offloading.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
            kv_cache_layout="LBHNC",
        )
        self.manager: Any = CpuTieringSpec(config).get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self.thread = self.tier.thread
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self._contexts: dict[str, Any] = {}

    def request(self, request_id: str, **said: Any) -> Any:
        """A new one, which says so in its `kv_transfer_params`."""
        context = ReqContext(request_id, {f"tiercache.{name}": value for name, value in said.items()} or None)
        self._contexts[request_id] = context
        self.manager.on_new_request(context)
        return context

    def finish(self, request_id: str) -> None:
        self.manager.on_request_finished(self._contexts.pop(request_id))
        self.step()

    def place(self, names: Sequence[bytes], context: Any) -> None:
        for number, name in enumerate(names):
            context.set_offload_key_position(name, 32 * (number + 1))

    def store(self, names: Sequence[bytes], context: Any) -> None:
        """The engine has computed these, and its worker has copied them into vLLM's CPU tier."""
        self.place(names, context)
        output = self.manager.prepare_store(names, context)
        assert output is not None
        for name, row in zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True):
            self.rows[row] = content_of(name)
        self.manager.complete_store(set(output.keys_to_store), context)

    def find(self, names: Sequence[bytes], context: Any, steps: int = 20) -> int:
        """As vLLM asks for a prefix: how many of `names` are in its CPU tier at last."""
        self.place(names, context)
        for _ in range(steps):
            hits, waits = 0, False
            for name in names:
                result = self.manager.lookup(name, context)
                if result is LookupResult.MISS:
                    break
                waits = waits or result is not LookupResult.HIT
                hits += result in (LookupResult.HIT, LookupResult.HIT_PENDING)
            if not waits:
                return hits
            self.step()
        raise AssertionError("the scheduler asks again and again")

    def content(self, names: Sequence[bytes], context: Any) -> list[np.ndarray]:
        """What the engine would load from vLLM's CPU tier."""
        spec = self.manager.prepare_load(names, context)
        found = [self.rows[row].copy() for row in spec.block_ids.tolist()]
        self.manager.complete_load(names, context)
        return found

    def step(self) -> None:
        """The end of a scheduler's step; then all that it has begun ends, and the next step sees it."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        self.settle()
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        """Until questions are answered, transfers have ended, and every chunk is in its tiers."""
        assert not concurrent.futures.wait([*self.tier._lookups, *self.tier._jobs], 30).not_done
        assert self.ask(self.thread.cache.flush(30)).complete

    def forget_memory(self) -> None:
        """vLLM's CPU tier and our hot cache are empty, as after a long time with other requests."""
        self.step()
        self.manager.primary_tier.reset_cache()
        self.rows[:] = 0
        self.on_loop(self.thread.cache.clear_hot)

    def told(self) -> list[tuple[bool, set[bytes]]]:
        """Return what routers hear of our tier: removed or not, and which chunks."""
        events = [event for event in self.manager.take_events() if event.medium is Medium.STORAGE]
        return [(event.removed, set(event.keys)) for event in events]

    def until_hot(self, chunks: int) -> None:
        """Wait until that many of `NAMES` are hot."""
        keys = self.tier._keys(NAMES)
        self.until(lambda: self.on_loop(lambda: self.thread.cache.lookup_hot(keys)) >= chunks)

    def close(self) -> None:
        """May be called again."""
        if hasattr(self, "rows"):
            del self.rows
            self.manager.shutdown()


class SlowServer(RemoteTier):
    """A remote tier that answers no question, and counts them."""

    QUESTIONS: list[int] = []  # noqa: RUF012
    """How many chunks each was about."""

    async def _nothing(self, *_: Any) -> None:
        pass

    _connect = _disconnect = _get = _put = _delete = _nothing  # type: ignore[assignment]

    async def _exist(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self.QUESTIONS.append(len(keys))
        await asyncio.sleep(3600)
        return [False] * len(keys)


Make = Callable[..., Offloaded]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained_llama(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def make(opened: Callable[..., Any], model: Path, tmp_path: Path) -> Make:
    """Engines on one directory."""

    def make(engine: dict[str, Any] | None = None, events: bool = False, **settings: Any) -> Any:
        return opened(Offloaded, engine_of(model, **(engine or {})), tmp_path / "kv", events=events, **settings)

    return make


def stored(engine: Offloaded) -> None:
    engine.store(NAMES, engine.request("first"))
    engine.finish("first")
    engine.forget_memory()


@pytest.fixture
def engine(make: Make) -> Offloaded:
    """One that has stored `NAMES`, which have left its memory."""
    engine = make()
    stored(engine)
    return engine


def assert_found(engine: Offloaded, request_id: str = "second") -> None:
    context = engine.request(request_id)
    assert engine.find([*NAMES, name_of(9)], context) == len(NAMES)
    for name, found in zip(NAMES, engine.content(NAMES, context), strict=True):
        assert np.array_equal(found, content_of(name))


def assert_lost(engine: Offloaded, request_id: str = "second") -> None:
    assert engine.find(NAMES, engine.request(request_id)) == 0


# What is found


def test_what_left_memory_comes_back_from_disk_in_the_step_that_asks(engine: Offloaded) -> None:
    assert engine.manager.lookup(NAMES[0], engine.request("asks")) is LookupResult.HIT_PENDING
    assert_found(engine)


def test_engines_on_one_directory_share_at_the_same_time_and_after_a_restart(make: Make) -> None:
    """Whatever the size of their CPU tiers."""
    one, other = make(), make(rows=2 * ROWS)
    stored(one)
    assert_found(other)
    one.close()
    other.close()
    assert_found(make())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"dtype": "bfloat16"}),
        ({}, {"enable_lora": True}),
        # vLLM tells its offloading nothing of these.
        ({"kv_cache_dtype_skip_layers": ["0"]}, {"kv_cache_dtype_skip_layers": ["1"]}),
        ({"mamba_cache_dtype": "float16"}, {"mamba_cache_dtype": "bfloat16"}),
        ({"model_impl": "vllm"}, {"model_impl": "transformers"}),
    ],
    ids=str,
)
def test_engines_that_compute_otherwise_share_nothing(make: Make, one: dict[str, Any], other: dict[str, Any]) -> None:
    stored(make(one))
    assert_lost(make(other))


def test_nothing_is_shared_without_vllms_configuration(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "engine_config", lambda engine_id: None)
    stored(make())
    assert_lost(make())


def test_hashes_that_may_collide_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="--prefix-caching-hash-algo sha256"):
        make({"prefix_caching_hash_algo": "xxhash"})


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_damaged_chunk_is_a_miss_and_the_others_are_loaded(engine: Offloaded, tmp_path: Path, damage: str) -> None:
    content = {content_of(name).tobytes(): name for name in NAMES}
    victim = chunk_files(str(tmp_path / "kv"))[0]
    raw = bytearray(victim.read_bytes())
    name = content[bytes(raw[4096 : 4096 + ROW_BYTES])]
    raw[5000] ^= 1
    victim.write_bytes(raw if damage == "flip" else raw[:6000])
    context = engine.request("second")
    assert engine.find(NAMES, context) == NAMES.index(name)
    whole = [one for one in NAMES if one != name]
    assert [engine.manager.primary_tier.lookup(one, context).name for one in whole] == ["HIT"] * len(whole)
    for one, found in zip(whole, engine.content(whole, context), strict=True):
        assert np.array_equal(found, content_of(one))


def test_after_a_reset_nothing_is_found_that_was_stored_before(engine: Offloaded) -> None:
    """vLLM resets its caches when weights are replaced, and does not say whether they were."""
    running = engine.request("running")
    engine.manager.reset_cache()
    assert_lost(engine)
    # What it has computed may be from before the reset.
    engine.store(NAMES, running)
    engine.step()
    engine.forget_memory()
    assert_lost(engine, "third")
    stored(engine)
    assert_found(engine, "fourth")


# Bounds


def test_a_tier_that_is_not_well_is_not_promised(engine: Offloaded) -> None:
    """Room in vLLM's memory would be made for what is not read, again and again."""
    (reader,) = engine.thread.cache.parts.reader.tiers

    def fails() -> None:
        while reader.breaker.state is BreakerState.CLOSED:
            reader.breaker.failed(asyncio.get_running_loop().time())

    engine.on_loop(fails)
    assert engine.manager.lookup(NAMES[0], engine.request("second")) is LookupResult.RETRY
    assert_lost(engine, "third")


def test_a_hundred_chunks_of_windows_are_one_question_with_one_deadline(make: Make) -> None:
    named = {"module_path": __name__, "class_name": "SlowServer"}
    slow = {f"remote_storage_plugin.slow.a.{name}": value for name, value in named.items()}
    engine = make(lookup_timeout_ms=50, remote_storage_plugins=["slow.a"], **slow)
    context, names = engine.request("first"), [name_of(number) for number in range(100)]
    engine.place(names, context)
    SlowServer.QUESTIONS.clear()
    assert {engine.manager.lookup(name, context) for name in reversed(names)} == {LookupResult.RETRY}
    engine.step()
    assert {engine.manager.lookup(name, context) for name in reversed(names)} == {LookupResult.MISS}
    assert SlowServer.QUESTIONS == [100]
    # The request has waited as long as it may.
    engine.manager.lookup(name_of(200), context)
    engine.step()
    assert engine.manager.lookup(name_of(200), context) is LookupResult.MISS
    assert SlowServer.QUESTIONS == [100]


@pytest.mark.parametrize("can_open", [True, False])
def test_vllms_memory_is_given_back(make: Make, can_open: bool) -> None:
    """Where the cache cannot be opened, too."""
    before = set(Path("/dev/shm").glob("vllm_offload_*"))
    if can_open:
        engine = make()
        stored(engine)
        view = engine.manager.primary_tier.get_kv_memoryview()
        engine.close()
        with pytest.raises(ValueError, match="released"):
            view.nbytes  # noqa: B018
    else:
        with pytest.raises(ConfigError):
            make(local_disk="/dev/null/kv")
    assert set(Path("/dev/shm").glob("vllm_offload_*")) <= before


def test_after_its_end_there_are_misses_and_no_errors(make: Make) -> None:
    engine = make(events=True)
    stored(engine)
    context, below = engine.request("second"), engine.tier
    engine.close()
    assert below.lookup(NAMES[0], context) is LookupResult.MISS
    below.touch(NAMES, context)
    below.on_schedule_end(ScheduleEndContext((), ()))
    below.on_request_finished(context)
    below.get_stats()
    below.drain_jobs()
    below.shutdown()
    assert list(below.get_finished_jobs()) == []


# What requests want


def test_what_a_request_says_is_needed_again_and_what_vllm_touches_is_in_memory_by_then(engine: Offloaded) -> None:
    engine.find(NAMES, engine.request("second", session="chat", next_in_s=0.0))
    engine.forget_memory()
    engine.finish("second")
    engine.until_hot(len(NAMES))
    engine.forget_memory()
    engine.manager.touch(NAMES, engine.request("third"))
    engine.until_hot(len(NAMES))


def test_a_request_can_have_forgotten_what_it_stored_and_not_what_others_had(engine: Offloaded) -> None:
    # vLLM's own memory has it, or it is computed anew: it is stored once more.
    engine.store([*NAMES[:3], name_of(9)], engine.request("second", forget=True))
    engine.step()
    engine.finish("second")
    engine.forget_memory()
    assert engine.find([*NAMES, name_of(9)], engine.request("third")) == len(NAMES)


def test_what_is_to_be_forgotten_is_also_after_a_reset(make: Make) -> None:
    """Its names are others by the time the request ends. A restart would find them again."""
    engine = make()
    engine.store(NAMES, engine.request("first", forget=True))
    engine.step()
    engine.manager.reset_cache()
    engine.finish("first")
    engine.close()
    assert_lost(make())


def test_settings_that_are_not_honoured_are_named_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    make(priority_limit=3, min_retrieve_tokens=64)
    assert "accepted but not honoured: min_retrieve_tokens, priority_limit (up to vLLM's offloading)" in caplog.text


# What others are told


def test_routers_are_told_what_comes_and_goes_and_of_a_reset(make: Make) -> None:
    engine = make(events=True, local_cpu=False)
    stored(engine)
    assert engine.told() == [(False, set(NAMES))]
    engine.ask(engine.thread.cache.forget(engine.tier._keys(NAMES[:1])))
    assert engine.manager.has_pending_work()
    assert engine.told() == [(True, set(NAMES[:1]))]
    engine.manager.reset_cache()
    engine.step()
    assert engine.told() == [(True, set(NAMES[1:]))]


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
    config.kv_transfer_config.kv_connector_extra_config = engine.tier._offloading_spec.extra_config
    kinds = {kind: kind for kind in (Counter, Gauge, Histogram)}
    for _ in range(2):
        unregister_vllm_metrics()
        OffloadPromMetrics(config, kinds, ["engine"], {0: ["0"]}).observe(stats.data)
    labels = {"engine": "0", "tier": "disk"}
    assert REGISTRY.get_sample_value("vllm:tiercache_tier_writes_total", labels) == len(NAMES)
    unregister_vllm_metrics()
