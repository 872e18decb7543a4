"""What makes two engines' KV the same: the layout's fingerprint, made from vLLM's own configuration and layers."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
from collections.abc import Callable
from copy import copy
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from tests.vllm.drive import CONNECTOR
from tests.vllm.models import untrained_llama
from tiercache.core.layout import Layout
from tiercache.errors import ConfigError
from tiercache.integrations import model_files
from tiercache.integrations.vllm import TierCacheConnector
from tiercache.integrations.vllm.blocks import KvBlocks
from tiercache.integrations.vllm.identity import code_of_model, effective_config, make_layout, settings_of
from tiercache.integrations.vllm.planning import BlockGeometry, KvGroup


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No digests and rotary embeddings of other tests."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", vllm.envs.VLLM_CACHE_ROOT)  # which knows what models are like
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})


def end_reads(pipe: Path) -> None:
    """The threads that read a pipe, which is in the place of a file on a mount that hangs, come to its end.

    Those that are about to open it as well: once for all that read at this moment, never waiting for a reader, since the
    one before may have let both go.
    """
    for thread in threading.enumerate():
        while thread.name == "tiercache-digest" and thread.is_alive():
            with contextlib.suppress(OSError):  # nobody reads yet
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
            thread.join(0.01)


BLOCK_TOKENS = 32


class TinyEngine:
    """What the connector meets in a worker, without an engine. Nothing of it is shared with another one."""

    def __init__(self, model: Path, **engine: Any) -> None:
        settings: dict[str, Any] = {"skip_tokenizer_init": True, "block_size": BLOCK_TOKENS, "enforce_eager": True}
        settings |= {"dtype": "float32", "kv_transfer_config": CONNECTOR}
        self.config = EngineArgs(model=str(model), **(settings | engine)).create_engine_config()
        names = [f"model.layers.{number}.self_attn.attn" for number in range(2)]
        with set_current_vllm_config(self.config):
            cache = self.config.cache_config
            self.layers = [Attention(2, 32, 1.0, num_kv_heads=1, cache_config=cache, prefix=name) for name in names]
        for layer in self.layers:
            layer.isa = "vec"
        self.kv = torch.zeros(2, 4, 1, BLOCK_TOKENS, 64, dtype=self.config.model_config.dtype)
        self.tensors = dict(zip(names, self.kv, strict=True))

    def layout(self, model_id: str | None = None) -> Layout:
        content_bytes = 64 * self.kv.element_size()
        blocks = KvBlocks(self.tensors, blocks=4, heads=1, block_tokens=BLOCK_TOKENS, content_bytes=content_bytes)
        geometry = BlockGeometry.for_chunk_size(64, BLOCK_TOKENS, save_tails=True)
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=self.kv.dtype)
        group = KvGroup(0, BLOCK_TOKENS, (), None, spec)
        return make_layout(self.config, [group], [blocks], geometry, self.tensors, model_id)

    def code(self) -> str:
        return code_of_model(self.config.model_config)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return untrained_llama(tmp_path / "llama")


def test_a_name_stands_for_the_content(llama: Path, tmp_path: Path) -> None:
    other = untrained_llama(tmp_path / "other", weights=10)
    one = TinyEngine(llama).layout("llama, tuned in May")
    assert one.fingerprint == TinyEngine(other).layout("llama, tuned in May").fingerprint
    assert one.fingerprint != TinyEngine(llama).layout("llama, tuned in June").fingerprint
    engine = TinyEngine(llama)
    (llama / "model.safetensors").unlink()
    os.mkfifo(llama / "model.safetensors")  # a read of it would hang
    assert engine.layout("llama, tuned in May") == one


def test_settings_that_change_the_kv_are_another_layout(llama: Path) -> None:
    engines: list[dict[str, Any]] = [
        {},
        {"dtype": "bfloat16"},
        {"hf_overrides": {"rope_theta": 5000.0}},
        {"hf_overrides": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"load_format": "dummy"},
        {"load_format": "dummy", "seed": 3},
        {"kv_cache_dtype_skip_layers": ["0"]},
        {"kv_cache_dtype_skip_layers": ["1"]},
    ]
    assert len({TinyEngine(llama, **engine).layout().fingerprint for engine in engines}) == len(engines)


def test_hashes_that_may_collide_are_refused(llama: Path) -> None:
    config = TinyEngine(llama, prefix_caching_hash_algo="xxhash").config
    with pytest.raises(ConfigError, match="--prefix-caching-hash-algo sha256"):
        TierCacheConnector(config, KVConnectorRole.SCHEDULER, KVCacheConfig(4, [], []))


def test_all_that_a_layout_is_made_of_counts(llama: Path) -> None:
    """Set after the configuration was made, as only some models and machines have it."""
    changes: list[Callable[[TinyEngine], None]] = [
        lambda engine: None,
        lambda engine: setattr(engine.config, "additional_config", {"its own": 1}),
        lambda engine: setattr(engine.config.cache_config, "cache_dtype", "fp8"),
        lambda engine: setattr(engine.config.model_config, "quantization", "awq"),
        lambda engine: setattr(engine.config.parallel_config, "pipeline_parallel_size", 2),
        lambda engine: setattr(engine.config.parallel_config, "world_size", 2),
        lambda engine: setattr(engine.layers[0], "_k_scale_float", 0.5),
        lambda engine: setattr(engine.layers[0], "isa", "amx"),
        lambda engine: setattr(engine, "tensors", dict(reversed(engine.tensors.items()))),
    ]
    engines = [TinyEngine(llama) for _ in changes]
    for engine, change in zip(engines, changes, strict=True):
        change(engine)
    assert len({engine.layout("llama").fingerprint for engine in engines}) == len(changes)


def test_what_does_not_change_the_kv_is_the_same_layout(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among them guessing tokens from the prompt."""
    layout = TinyEngine(llama).layout()
    harmless: dict[str, Any] = {"max_model_len": 256, "seed": 7, "max_num_seqs": 3, "served_model_name": "other"}
    harmless |= {"num_gpu_blocks_override": 9, "disable_cascade_attn": True}
    harmless["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    assert TinyEngine(llama, **harmless).layout() == layout
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    assert TinyEngine(llama).layout() == layout
    assert layout.engine.startswith("vllm ") and "." not in layout.engine


@pytest.mark.parametrize("part", ["cache_config", "model_config", "attention_config"])
def test_a_setting_that_a_new_version_of_vllm_brings_counts_unless_it_is_at_its_default(llama: Path, part: str) -> None:
    engine = TinyEngine(llama)
    before = settings_of(engine.config, states_are_known=True)

    def with_new(value: bool) -> dict[str, str]:
        grown = copy(engine.config)
        of_now = getattr(engine.config, part)
        values = {field.name: getattr(of_now, field.name) for field in fields(of_now)}
        of_then = make_dataclass(type(of_now).__name__, [("rotates_keys", bool, False)], bases=(type(of_now),))
        changed = object.__new__(of_then)
        vars(changed).update(vars(of_now) | values | {"rotates_keys": value})
        object.__setattr__(grown, part, changed)
        return settings_of(grown, states_are_known=True)

    assert with_new(False) == before
    assert with_new(True) != before


def test_a_draft_model_is_known_by_its_configuration_too(llama: Path, tmp_path: Path) -> None:
    """Its weights are the same, and it makes other KV of them."""

    def known_of(name: str, **settings: Any) -> str:
        draft = untrained_llama(tmp_path / name, **settings)
        speculative = {"model": str(draft), "method": "draft_model", "num_speculative_tokens": 2}
        config = TinyEngine(llama, speculative_config=speculative).config
        return settings_of(config, states_are_known=True)["draft"]

    assert known_of("one") == known_of("one again") != known_of("other", rms_norm_eps=1e-5)


# What an engine writes


def test_another_order_of_bytes_in_a_block_is_another_engine(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V before K, in a block of the same shape. What is written for this is not left in the engine's memory."""
    engine = TinyEngine(llama)
    engine.kv[:] = 7.0
    before, implementation = engine.layout(), type(engine.layers[0].impl)
    assert bool((engine.kv == 7.0).all())
    write = implementation.do_kv_cache_update

    def exchanged(self: Any, layer: Any, key: Any, value: Any, kv: Any, slots: Any) -> None:
        write(self, layer, value, key, kv, slots)

    monkeypatch.setattr(implementation, "do_kv_cache_update", exchanged)
    after = engine.layout()
    assert after.engine != before.engine
    assert after.byte_format == before.byte_format


def test_a_back_end_that_hides_its_bytes_is_known_by_its_version(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or that writes elsewhere."""
    engine, version = TinyEngine(llama), f"vllm {vllm.__version__} {platform.machine()}"
    implementation = type(engine.layers[0].impl)
    monkeypatch.setattr(implementation, "do_kv_cache_update", lambda *arguments: None)
    assert engine.layout().engine == version
    monkeypatch.delattr(implementation, "do_kv_cache_update")
    assert engine.layout().engine == version


# What an engine computes


def codes_with(monkeypatch: pytest.MonkeyPatch, engine: TinyEngine, *embeddings: dict[str, Any]) -> list[str]:
    """Return the digest of the code with each of these embeddings, which layers make while the model is made."""
    found = []
    for parameters in embeddings:
        monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
        with set_current_vllm_config(engine.config):
            plain = {"rope_theta": 10000.0, "rope_type": "default"}
            rotary_embedding.get_rope(32, 512, rope_parameters=plain | parameters)
        found.append(engine.code())
    return found


def test_rotary_embeddings_are_known_by_their_parameters(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is a mended bug that gives them other ones from the same configuration. The longest prompt counts for
    one that scales by it."""
    unlike = {"rope_theta": 500000.0}, {"rope_type": "linear", "factor": 2.0}
    assert len(set(codes_with(monkeypatch, TinyEngine(llama), {}, *unlike))) == 3
    long = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [1.0] * 16}
    long |= {"original_max_position_embeddings": 256}
    engines = [TinyEngine(llama, max_model_len=longest) for longest in (256, 512)]
    (plain, scaled), (other_plain, other_scaled) = (codes_with(monkeypatch, engine, {}, long) for engine in engines)
    assert plain == other_plain
    assert scaled != other_scaled


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_code_counts_also_of_a_base_model(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"model_type": kind, "architectures": [f"{kind.title()}ForCausalLM"]}
    engine = TinyEngine(untrained_llama(tmp_path / "model", **named))
    before, module = engine.code(), sys.modules["vllm.model_executor.models.llama"]
    changed = tmp_path / "llama.py"
    assert module.__file__ is not None
    text = Path(module.__file__).read_text()
    changed.write_text(text + "\nscale = 2\n")
    monkeypatch.setattr(module, "__file__", str(changed))
    after = engine.code()
    assert after != before
    engine.config.model_config.max_model_len = 256
    assert engine.code() == after
    changed.write_text(text + "\nscale = max_model_len\n")
    by_length = engine.code()
    engine.config.model_config.max_model_len = 512
    assert engine.code() != by_length, "the longest prompt counts for code that reads it"


def test_a_configuration_is_what_it_says_not_what_wrote_it(tmp_path: Path) -> None:
    harmless = {"transformers_version": "4.1.0", "torch_dtype": "float16", "use_cache": False, "attention_thing": None}
    plain, written, unlike = (
        effective_config(TinyEngine(untrained_llama(tmp_path / str(number), **config)).config.model_config)
        for number, config in enumerate([{}, harmless, {"rms_norm_eps": 1e-5}])
    )
    assert plain == written != unlike


# Which model it is


def test_a_model_on_a_mount_that_hangs_shares_nothing(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And is not waited for."""
    engines = [TinyEngine(llama) for _ in range(2)]
    monkeypatch.setattr(model_files, "_STALL_S", 0.1)
    (llama / "model.safetensors").unlink()
    os.mkfifo(llama / "model.safetensors")
    one, other = (engine.layout() for engine in engines)
    end_reads(llama / "model.safetensors")
    assert one.fingerprint != other.fingerprint
    assert "cannot be identified, and nothing is shared" in caplog.text
    assert "not a byte of model.safetensors came for" in caplog.text
