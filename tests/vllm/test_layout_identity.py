"""What makes two engines' KV the same: the layout's fingerprint, made from vLLM's own configuration and layers."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
from copy import copy
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding

from tests.vllm.pipes import end_reads
from tests.vllm.tiny_llama import TinyEngine, safetensors, save_tiny
from tiercache.integrations.vllm.identity import _modules_of, code_of_model, effective_config, place_of, settings_of


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No digests and no rotary embeddings of other tests."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", vllm.envs.VLLM_CACHE_ROOT)  # which knows what models are like
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


def test_same_weights_at_two_paths_with_other_times_are_one_layout(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    for path in copy.iterdir():
        os.utime(path, (1_600_000_000, 1_600_000_000))
    one, other = TinyEngine(str(model)).layout(), TinyEngine(str(copy)).layout()
    assert one == other and one.fingerprint == other.fingerprint
    assert str(tmp_path) not in repr(one)
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"\x00")
    assert TinyEngine(str(copy)).layout().fingerprint != one.fingerprint, "a byte in a tensor was changed"


def test_a_name_stands_for_the_content(model: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other")
    (other / "model.safetensors").write_bytes(safetensors(b"unlike"))
    one = TinyEngine(str(model)).layout("llama, tuned in May")
    assert one.fingerprint == TinyEngine(str(other)).layout("llama, tuned in May").fingerprint
    assert one.fingerprint != TinyEngine(str(model)).layout("llama, tuned in June").fingerprint
    engine = TinyEngine(str(model))
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")  # whoever wants to read it hangs
    assert engine.layout("llama, tuned in May") == one


def test_settings_that_change_the_kv_are_another_layout(model: Path) -> None:
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
    assert len({TinyEngine(str(model), **engine).layout().fingerprint for engine in engines}) == len(engines)


def test_settings_and_versions_that_do_not_change_the_kv_are_the_same_layout(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them guessing tokens from the prompt."""
    layout = TinyEngine(str(model)).layout()
    harmless: dict[str, Any] = {
        "max_model_len": 256,
        "seed": 7,
        "max_num_seqs": 3,
        "served_model_name": "other",
        "num_gpu_blocks_override": 9,
        "disable_cascade_attn": True,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
    }
    assert TinyEngine(str(model), **harmless).layout() == layout
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    assert TinyEngine(str(model)).layout() == layout
    assert layout.engine.startswith("vllm ") and "." not in layout.engine


@pytest.mark.parametrize("part", ["cache_config", "model_config", "attention_config"])
def test_a_setting_that_a_new_version_of_vllm_brings_counts_unless_it_is_at_its_default(model: Path, part: str) -> None:
    engine = TinyEngine(str(model))
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


def test_a_draft_model_is_known_by_its_configuration_too(model: Path, tmp_path: Path) -> None:
    """Its weights are the same, and it makes other KV of them."""
    found = []
    for name, settings in (("one", {}), ("other", {"rms_norm_eps": 1e-6}), ("one again", {})):
        draft = save_tiny(tmp_path / name, **settings)
        speculative = {"model": str(draft), "method": "draft_model", "num_speculative_tokens": 2}
        config = TinyEngine(str(model), speculative_config=speculative).config
        found.append(settings_of(config, states_are_known=True)["draft"])
    assert found[0] != found[1]
    assert found[0] == found[2]


# What an engine writes


def test_another_order_of_bytes_in_a_block_is_another_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V before K, in a block of the same shape. What is written for this is not left in the engine's memory."""
    engine = TinyEngine(str(model))
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


def test_a_back_end_that_does_not_show_its_bytes_is_known_by_its_version(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or that writes elsewhere."""
    engine, version = TinyEngine(str(model)), f"vllm {vllm.__version__} {platform.machine()}"
    implementation = type(engine.layers[0].impl)
    monkeypatch.setattr(implementation, "do_kv_cache_update", lambda *arguments: None)
    assert engine.layout().engine == version
    monkeypatch.delattr(implementation, "do_kv_cache_update")
    assert engine.layout().engine == version


# What an engine computes


def rope(engine: TinyEngine, **parameters: Any) -> None:
    """As the model's layers do while the model is made."""
    with set_current_vllm_config(engine.config):
        rotary_embedding.get_rope(32, 512, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"} | parameters)


def test_rotary_embeddings_are_known_by_the_parameters_that_they_got(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is a mended bug that gives them other ones from the same configuration."""
    engine, found = TinyEngine(str(model)), set()
    for parameters in ({}, {"rope_theta": 500000.0}, {"rope_type": "linear", "factor": 2.0}):
        monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
        rope(engine, **parameters)
        found.add(code_of_model(engine.config.model_config))
    assert len(found) == 3


def test_the_longest_prompt_counts_for_an_embedding_that_scales_by_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = [1.0] * 16
    long = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    long |= {"original_max_position_embeddings": 256}
    found = []
    for parameters in ({}, long):
        for longest in (256, 512):
            monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
            engine = TinyEngine(str(model), max_model_len=longest)
            rope(engine, **parameters)
            found.append(code_of_model(engine.config.model_config))
    assert found[0] == found[1]
    assert found[2] != found[3]


def test_the_models_own_code_counts(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TinyEngine(str(model))
    before = code_of_model(engine.config.model_config)
    llama = sys.modules["vllm.model_executor.models.llama"]
    changed = tmp_path / "llama.py"
    assert llama.__file__ is not None
    changed.write_text(Path(llama.__file__).read_text() + "\nscale = 2\n")
    monkeypatch.setattr(llama, "__file__", str(changed))
    assert code_of_model(engine.config.model_config) != before


def test_a_model_that_is_derived_from_another_has_the_others_code_too() -> None:
    mistral = importlib.import_module("vllm.model_executor.models.mistral")
    found = {name.rpartition(".")[2] for name in _modules_of(mistral)}
    assert found == {"mistral", "llama"}


def test_a_configuration_is_what_it_says_not_what_wrote_it(tmp_path: Path) -> None:
    plain = TinyEngine(str(save_tiny(tmp_path / "one"))).config.model_config
    unlike = {
        "transformers_version": "4.1.0",
        "torch_dtype": "float16",
        "use_cache": False,
        "attention_something": None,
    }
    written = save_tiny(tmp_path / "other", **unlike)
    assert effective_config(plain) == effective_config(TinyEngine(str(written)).config.model_config)
    other = save_tiny(tmp_path / "third", rms_norm_eps=1e-6)
    assert effective_config(plain) != effective_config(TinyEngine(str(other)).config.model_config)


# Which model it is


def test_a_name_of_the_hub_is_the_snapshot_that_was_loaded(model: Path, tmp_path: Path) -> None:
    commit, cache = "a" * 40, tmp_path / "hub"
    repository = cache / "models--org--tiny"
    snapshot = repository / "snapshots" / commit
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(model, snapshot)
    assert place_of("org/tiny", None, str(cache)) == snapshot
    assert place_of("org/tiny", commit, str(cache)) == snapshot
    assert place_of("org/other", None, str(cache)) is None
    assert place_of("s3://bucket/model", None, str(cache)) is None
    assert place_of(str(model), None, str(cache)) == model


def test_a_model_that_cannot_be_identified_shares_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [TinyEngine(str(model)) for _ in range(2)]
    monkeypatch.setattr("tiercache.integrations.vllm.identity._STALL_S", 0.1)
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    one, other = (engine.layout() for engine in engines)
    end_reads(model / "model.safetensors")
    assert one.fingerprint != other.fingerprint
    assert "cannot be identified, and nothing is shared" in caplog.text
