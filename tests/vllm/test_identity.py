"""What makes two engines' KV the same: the layout's fingerprint, made from vLLM's own configuration and layers, and from
what the model's files hold: not where they lie, when they were written, nor from which commit they come."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from copy import copy
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from safetensors.numpy import save as safetensors
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.vllm.drive import CONNECTOR
from tests.vllm.models import untrained_llama
from tiercache.core.layout import Layout
from tiercache.integrations.vllm import identity
from tiercache.integrations.vllm.blocks import KvBlocks
from tiercache.integrations.vllm.identity import (
    KEPT,
    FileChanged,
    NothingToRead,
    code_of_model,
    effective_config,
    identity_of_adapter,
    identity_of_model,
    make_layout,
    place_of,
    settings_of,
)
from tiercache.integrations.vllm.planning import BlockGeometry, KvGroup


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where digests are kept when they cannot be kept beside the files. A file may be of any age: a test has no old ones.
    And no rotary embeddings of other tests."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", vllm.envs.VLLM_CACHE_ROOT)  # which knows what models are like
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
    monkeypatch.setattr(identity, "_GRAIN_NS", 0)
    return tmp_path / "home" / "tiercache" / "digests"


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

    def code(self) -> str | None:
        return code_of_model(self.config.model_config)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return untrained_llama(tmp_path / "llama")


def test_same_weights_at_two_paths_with_other_times_are_one_layout(llama: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(llama, tmp_path / "elsewhere")
    for path in copy.iterdir():
        os.utime(path, (1_600_000_000, 1_600_000_000))
    one, other = TinyEngine(llama).layout(), TinyEngine(copy).layout()
    assert one == other and one.fingerprint == other.fingerprint
    assert str(tmp_path) not in repr(one)
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"\x00")
    assert TinyEngine(copy).layout().fingerprint != one.fingerprint, "a byte in a tensor was changed"


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


def test_what_does_not_change_the_kv_is_the_same_layout(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among them guessing tokens from the prompt."""
    layout = TinyEngine(llama).layout()
    harmless: dict[str, Any] = {
        "max_model_len": 256,
        "seed": 7,
        "max_num_seqs": 3,
        "served_model_name": "other",
        "num_gpu_blocks_override": 9,
        "disable_cascade_attn": True,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
    }
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
    found = []
    for name, settings in (("one", {}), ("other", {"rms_norm_eps": 1e-5}), ("one again", {})):
        draft = untrained_llama(tmp_path / name, **settings)
        speculative = {"model": str(draft), "method": "draft_model", "num_speculative_tokens": 2}
        config = TinyEngine(llama, speculative_config=speculative).config
        found.append(settings_of(config, states_are_known=True)["draft"])
    assert found[0] != found[1]
    assert found[0] == found[2]


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


def codes_with(monkeypatch: pytest.MonkeyPatch, engine: TinyEngine, *embeddings: dict[str, Any]) -> list[str | None]:
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
    changed.write_text(Path(module.__file__).read_text() + "\nscale = 2\n")
    monkeypatch.setattr(module, "__file__", str(changed))
    assert engine.code() != before


def test_a_configuration_is_what_it_says_not_what_wrote_it(tmp_path: Path) -> None:
    harmless = {"transformers_version": "4.1.0", "torch_dtype": "float16", "use_cache": False, "attention_thing": None}
    plain, written, unlike = (
        effective_config(TinyEngine(untrained_llama(tmp_path / str(number), **config)).config.model_config)
        for number, config in enumerate([{}, harmless, {"rms_norm_eps": 1e-5}])
    )
    assert plain == written != unlike


# Which model it is


def test_a_name_of_the_hub_is_the_snapshot_that_was_loaded(llama: Path, tmp_path: Path) -> None:
    commit, cache = "a" * 40, tmp_path / "hub"
    repository = cache / "models--org--tiny"
    snapshot = repository / "snapshots" / commit
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(llama, snapshot)
    assert place_of("org/tiny", None, str(cache)) == snapshot
    assert place_of("org/tiny", commit, str(cache)) == snapshot
    assert place_of("org/other", None, str(cache)) is None
    assert place_of("s3://bucket/model", None, str(cache)) is None
    assert place_of(str(llama), None, str(cache)) == llama


def test_a_model_on_a_mount_that_hangs_is_not_waited_for_and_shares_nothing(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [TinyEngine(llama) for _ in range(2)]
    monkeypatch.setattr("tiercache.integrations.vllm.identity._STALL_S", 0.1)
    (llama / "model.safetensors").unlink()
    os.mkfifo(llama / "model.safetensors")
    one, other = (engine.layout() for engine in engines)
    end_reads(llama / "model.safetensors")
    assert one.fingerprint != other.fingerprint
    assert "cannot be identified, and nothing is shared" in caplog.text
    assert "not a byte of model.safetensors came for" in caplog.text


# What a model is

LONG_AGO_NS = 1_600_000_000 * 10**9


def shard(number: int) -> bytes:
    return safetensors({"layer": np.arange(number, number + 5000).astype(np.uint8)})


def save(directory: Path, shards: int = 2) -> Path:
    directory.mkdir(parents=True)
    names = [f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]
    for number, name in enumerate(names):
        (directory / name).write_bytes(shard(number))
    index = {"weight_map": {f"layer.{number}": name for number, name in enumerate(names)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(tmp_path / "model")


def first_shard(model: Path) -> Path:
    return model / "model-00001-of-00002.safetensors"


def change_byte(path: Path, position: int) -> None:
    """Size and modification time stay what they are."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of the file system has not moved on
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns and path.stat().st_size == before.st_size


@pytest.mark.parametrize("position", [8, 300, 2500, -1])
def test_one_changed_byte_is_another_model(model: Path, position: int) -> None:
    """In the header or in the tensor, though a digest is kept and nothing else of the file seems to have changed."""
    before = identity_of_model(model)
    assert (model / KEPT).exists()
    change_byte(first_shard(model), position)
    assert identity_of_model(model) != before
    change_byte(first_shard(model), position)
    assert identity_of_model(model) == before


def add(name: str, content: bytes = b"{}") -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_bytes(content)

    return change


def test_what_does_not_make_the_kv_is_no_part_of_a_model(model: Path) -> None:
    before = identity_of_model(model)
    for name, content in {
        "README.md": b"about it",
        "tokenizer.json": b'{"other": 1}',
        "generation_config.json": b"{}",
        "pytorch_model.bin": b"weights",
        "pytorch_model.bin.index.json": b"{}",
        "original/consolidated.00.pth": b"weights",
        "adapter_model.safetensors": b"weights",
        "french/adapter_model.safetensors": b"weights",
        "training_args.bin": b"arguments",
        "checkpoint-500/model.safetensors": b"weights",
        ".cache/model.safetensors": b"weights",
        "modeling_own.py": b"scale = 2",
        "config.json": b'{"layers": 7}',
    }.items():
        add(name, content)(model)
        assert identity_of_model(model) == before, name


@pytest.mark.parametrize(
    "change",
    [
        add("more.safetensors"),
        add("speech_tokenizer/model.safetensors"),
        add("model.safetensors.index.json"),
        add("preprocessor_config.json"),
        add("hf_quant_config.json"),
        lambda model: first_shard(model).unlink(),
        lambda model: first_shard(model).rename(model / "renamed.safetensors"),
    ],
    ids=["weights", "weights of a part", "index", "images", "quantisation", "gone", "renamed"],
)
def test_what_makes_the_kv_is_a_part_of_a_model(model: Path, change: Callable[[Path], None]) -> None:
    before = identity_of_model(model)
    change(model)
    assert identity_of_model(model) != before


def test_code_counts_where_it_is_run_and_all_weights_for_a_load_format_that_may_read_anything(model: Path) -> None:
    with_code, any_weights = identity_of_model(model, with_code=True), identity_of_model(model, "sharded_state")
    add("modeling_own.py")(model)
    assert identity_of_model(model, with_code=True) != with_code
    add("pytorch_model.bin")(model)
    assert identity_of_model(model, "sharded_state") != any_weights


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf"])
def test_other_formats_are_models_as_well(tmp_path: Path, name: str) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for place in (one, other):
        (place / "1_Dense").mkdir(parents=True)
        (place / "1_Dense" / "model.safetensors").write_bytes(shard(0))
        (place / name).write_bytes(b"weights" * 1000)
    assert identity_of_model(one) == identity_of_model(other)
    change_byte(other / name, 3000)
    assert identity_of_model(one) != identity_of_model(other)


def test_a_file_is_a_model_with_its_other_parts_whatever_its_name(tmp_path: Path) -> None:
    def split(name: str) -> Path:
        (tmp_path / name).mkdir()
        for number in (1, 2):
            (tmp_path / name / f"{name}-0000{number}-of-00002.gguf").write_bytes(bytes([number]) * 1000)
        return tmp_path / name / f"{name}-00001-of-00002.gguf"

    one, other = split("one"), split("other")
    assert identity_of_model(one) == identity_of_model(other)
    (one.parent / "another-model.gguf").write_bytes(b"what lies beside")
    assert identity_of_model(one) == identity_of_model(other)
    (one.parent / "mmproj-F16.gguf").write_bytes(b"for images")
    assert identity_of_model(one) != identity_of_model(other)
    (one.parent / "mmproj-F16.gguf").unlink()
    change_byte(other.with_name("other-00002-of-00002.gguf"), 5)
    assert identity_of_model(one) != identity_of_model(other)


def test_a_directory_without_weights_has_no_identity(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NothingToRead, match="no weights in"):
        identity_of_model(tmp_path)


# The cache of the Hugging Face hub


def snapshot(cache: Path, model: Path, commit: str) -> Path:
    """`model` as the hub's cache has it: large files under the names of their SHA-256, small ones under shorter names."""
    place = cache / "models--org--name" / "snapshots" / commit
    blobs = cache / "models--org--name" / "blobs"
    place.mkdir(parents=True)
    blobs.mkdir(exist_ok=True)
    for path in model.iterdir():
        content = path.read_bytes()
        digest = hashlib.sha256(content) if path.suffix == ".safetensors" else hashlib.sha1(content)
        name = digest.hexdigest()
        if not (blobs / name).exists():
            (blobs / name).write_bytes(content)
        (place / path.name).symlink_to(f"../../blobs/{name}")
    return place


def test_commits_with_the_same_weights_are_one_model_and_so_is_a_copy(model: Path, tmp_path: Path) -> None:
    one, other = (snapshot(tmp_path / "hub", model, commit) for commit in ("a" * 40, "b" * 40))
    (other / "README.md").write_text("new")
    assert identity_of_model(one) == identity_of_model(other) == identity_of_model(model)


def test_a_blob_is_read_only_if_it_was_written_to_since_for_its_name_says_it(model: Path, tmp_path: Path) -> None:
    place = snapshot(tmp_path / "hub", model, "a" * 40)
    before = identity_of_model(place)
    blob = first_shard(place).resolve()
    change_byte(blob, 2000)
    later = time.time_ns() + 3 * 10**9
    os.utime(blob, ns=(later, later))
    assert identity_of_model(place) != before
    os.truncate(blob, 1 << 43)  # holes: to read it would take hours
    os.utime(blob, ns=(LONG_AGO_NS, LONG_AGO_NS))
    assert identity_of_model(place) == before


def test_the_hash_that_names_a_shared_blob_is_another_one(model: Path, tmp_path: Path) -> None:
    """The cache of newer versions of the hub's client: a blob links to a file that several repositories have."""
    place = snapshot(tmp_path / "hub", model, "a" * 40)
    blob = first_shard(place).resolve()
    shared = tmp_path / "hub" / "shared" / "blobs" / ("c" * 64)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(shared)
    assert identity_of_model(place) == identity_of_model(model)


# Kept digests


def kept(place: Path) -> dict[str, list[object]]:
    files: dict[str, list[object]] = json.loads(place.read_text())["files"]
    return files


def write_made_up(place: Path, model: Path, digit: str) -> None:
    """A record of digests that are not those of the files."""
    stamps = {path.name: identity.stamp_of(path.stat()) for path in model.glob("*.safetensors")}
    identity._write_kept(place, {name: (stamp, digit * 64) for name, stamp in stamps.items()})


def test_the_first_start_keeps_digests_beside_the_files_and_the_next_reads_none(model: Path, home: Path) -> None:
    identity_of_model(model)
    found = {name: digest for name, (_, digest) in kept(model / KEPT).items()}
    assert found == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in model.glob("*.safetensors")}
    assert not home.exists()
    assert [path.name for path in model.iterdir() if path.name.startswith(".")] == [KEPT]
    os.truncate(first_shard(model), 1 << 43)  # holes: to read it would take hours
    identities = []
    for digit in "ab":
        write_made_up(model / KEPT, model, digit)
        identities.append(identity_of_model(model))
    assert identities[0] != identities[1], "what is kept is what counts"


def test_digests_of_files_that_were_just_written_are_not_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next write may leave the same times, where a file system's clock is coarse."""
    monkeypatch.setattr(identity, "_GRAIN_NS", 3600 * 10**9)
    assert identity_of_model(model)
    assert not (model / KEPT).exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: b"\x00\xff garbage",
        lambda content: b"[" * 100_000,
        lambda content: b"[1, 2]",
        lambda content: b'{"format": 1, "files": {"a": 1}, "check": 0}',
        lambda content: content.replace(b'"format": 1', b'"format": 2'),
        lambda content: re.sub(rb'"[0-9a-f]{63}[0-9a-f]"', b'"' + 64 * b"d" + b'"', content, count=1),
    ],
    ids=["half", "empty", "garbage", "deep", "list", "other shape", "other format", "other digits"],
)
def test_a_damaged_record_is_ignored_and_mended(model: Path, damage: Callable[[bytes], bytes]) -> None:
    before = identity_of_model(model)
    whole = (model / KEPT).read_bytes()
    damaged = damage(whole)
    assert damaged != whole
    (model / KEPT).write_bytes(damaged)
    assert identity_of_model(model) == before
    assert (model / KEPT).read_bytes() == whole


def test_a_record_that_came_with_a_copy_is_of_other_files(model: Path, tmp_path: Path) -> None:
    before = identity_of_model(model)
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)  # with its times
    change_byte(first_shard(copy), 1000)
    assert kept(copy / KEPT) == kept(model / KEPT)
    assert identity_of_model(copy) != before


def test_digests_are_kept_in_the_users_cache_where_the_directory_takes_none(model: Path, home: Path) -> None:
    (model / KEPT / "in the way").mkdir(parents=True)
    before = identity_of_model(model)
    (place,) = home.iterdir()
    assert kept(place).keys() == {path.name for path in model.glob("*.safetensors")}
    write_made_up(place, model, "c")
    assert identity_of_model(model) != before, "it was found there"


def test_where_nothing_can_be_kept_it_is_read_each_time(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    (model / KEPT / "in the way").mkdir(parents=True)
    with caplog.at_level("INFO", "tiercache.vllm"):
        assert identity_of_model(model) == identity_of_model(model)
    assert "can be kept nowhere: each start reads them; model_id spares that" in caplog.text


RANK = """
import sys
from pathlib import Path
from tiercache.integrations.vllm import identity
identity._GRAIN_NS = 0
print("ready", flush=True)
sys.stdin.readline()
print(identity.identity_of_model(Path(sys.argv[1])))
"""


def test_processes_that_begin_together_agree_and_leave_a_whole_record(tmp_path: Path) -> None:
    model = save(tmp_path / "raced", shards=12)
    expected = identity_of_model(shutil.copytree(model, tmp_path / "copy"))
    for _ in range(2):
        (model / KEPT).unlink(missing_ok=True)
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(4)
        ]
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        for rank in ranks:
            print(file=rank.stdin, flush=True)
        assert [rank.communicate(timeout=60)[0].strip() for rank in ranks] == [expected] * 4
        assert len(identity._read_kept(model / KEPT)) == 12
        assert [path.name for path in model.iterdir() if path.name.startswith(".")] == [KEPT]


def test_a_file_that_is_written_to_meanwhile_has_no_digest(model: Path) -> None:
    path, over = first_shard(model), threading.Event()
    os.truncate(path, 50_000_000)

    def write() -> None:
        with path.open("ab", buffering=0) as file:
            while not over.is_set():
                file.write(b"x")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with pytest.raises(FileChanged, match="was written to while it was read"):
            identity_of_model(model)
    finally:
        over.set()
        writer.join()


# Adapters


def test_an_adapter_is_its_weights_and_its_configuration(tmp_path: Path) -> None:
    found = []
    for number, (weights, config) in enumerate(
        [(b"weights", "{}"), (b"weights", "{}"), (b"Weights", "{}"), (b"weights", "[]")]
    ):
        adapter = tmp_path / str(number)
        adapter.mkdir()
        (adapter / "adapter_model.safetensors").write_bytes(weights)
        (adapter / "adapter_config.json").write_text(config)
        (adapter / "README.md").write_text(f"number {number}")
        found.append(identity_of_adapter(adapter))
    assert found[0] == found[1] and len(set(found)) == 3
    with pytest.raises(NothingToRead):
        identity_of_adapter(tmp_path)
