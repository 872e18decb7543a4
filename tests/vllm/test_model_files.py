"""What makes two models the same: what their files hold. Not where these lie, when they were written, nor from which commit
they come."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save as safetensors

from tiercache.integrations import model_files
from tiercache.integrations.model_files import KEPT, NothingToRead, identity_of_adapter, identity_of_model, place_of

LONG_AGO_NS = 1_600_000_000 * 10**9


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where digests are kept when they cannot be kept beside the files. A file may be of any age: a test has no old ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(model_files, "GRAIN_NS", 0)
    return tmp_path / "home" / "tiercache" / "digests"


# What a model is


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


def add(model: Path, name: str, content: bytes = b"{}") -> None:
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_bytes(content)


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
        add(model, name, content)
        assert identity_of_model(model) == before, name


def test_what_makes_the_kv_is_a_part_of_a_model(model: Path) -> None:
    """Weights, those of a part, an index, what is done with images, quantisation; and a shard that is renamed or gone."""
    renamed = model / "renamed.safetensors"
    names = ["more.safetensors", "speech_tokenizer/model.safetensors", "model.safetensors.index.json"]
    names += ["preprocessor_config.json", "hf_quant_config.json"]
    changes = [partial(add, model, name) for name in names]
    before = identity_of_model(model)
    for change in (*changes, partial(first_shard(model).rename, renamed), renamed.unlink):
        change()
        after = identity_of_model(model)
        assert after != before, change
        before = after


def test_code_counts_where_it_is_run_and_all_weights_for_a_load_format_that_may_read_anything(model: Path) -> None:
    with_code, any_weights = identity_of_model(model, with_code=True), identity_of_model(model, "sharded_state")
    add(model, "modeling_own.py")
    assert identity_of_model(model, with_code=True) != with_code
    add(model, "pytorch_model.bin")
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


def test_a_name_of_the_hub_is_a_snapshot(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another hub, the cache of Hugging Face's has nothing to do with it."""
    commit, cache = "a" * 40, tmp_path / "hub"
    place = snapshot(cache, model, commit)
    (place.parents[1] / "refs").mkdir()
    (place.parents[1] / "refs" / "main").write_text(commit)
    assert place_of("org/name", None, str(cache)) == place
    assert place_of("org/name", commit, str(cache)) == place
    assert place_of("org/other", None, str(cache)) is None
    assert place_of("s3://bucket/model", None, str(cache)) is None
    assert place_of(str(model), None, str(cache)) == model
    for variable in ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE"):
        with monkeypatch.context() as other_hub:
            other_hub.setenv(variable, "True")
            assert place_of("org/name", None, str(cache)) is None


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
    files: dict[str, list[object]] = json.loads(place.read_text())
    return files


def write_made_up(place: Path, model: Path, digit: str) -> None:
    """A record of digests that are not those of the files."""
    stamps = {path.name: model_files.stamp_of(path.stat()) for path in model.glob("*.safetensors")}
    place.write_text(json.dumps({name: (digit * 64, stamp) for name, stamp in stamps.items()}))


def test_the_first_start_keeps_digests_beside_the_files_and_the_next_reads_none(model: Path, home: Path) -> None:
    identity_of_model(model)
    found = {name: digest for name, (digest, _) in kept(model / KEPT).items()}
    assert found == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in model.glob("model*")}
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
    monkeypatch.setattr(model_files, "GRAIN_NS", 3600 * 10**9)
    assert identity_of_model(model)
    assert not (model / KEPT).exists()


@pytest.mark.parametrize(
    "damaged",
    [None, b"", b"\x00\xff garbage", b"[" * 100_000, b"[1, 2]", b'{"format": 1, "files": {"a": 1}, "check": 0}'],
    ids=["half", "empty", "garbage", "deep", "list", "an earlier form"],
)
def test_a_damaged_record_is_ignored_and_mended(model: Path, damaged: bytes | None) -> None:
    before = identity_of_model(model)
    whole = (model / KEPT).read_bytes()
    (model / KEPT).write_bytes(whole[: len(whole) // 2] if damaged is None else damaged)
    assert identity_of_model(model) == before
    assert (model / KEPT).read_bytes() == whole


def test_digests_are_kept_in_the_users_cache_where_the_directory_takes_none_or_nowhere(
    model: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (model / KEPT / "in the way").mkdir(parents=True)
    before = identity_of_model(model)
    (place,) = home.iterdir()
    assert kept(place).keys() == {path.name for path in model.glob("model*")}
    write_made_up(place, model, "c")
    assert identity_of_model(model) != before, "it was found there"
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    with caplog.at_level("INFO", "tiercache"):
        assert identity_of_model(model) == identity_of_model(model)
    assert "can be kept nowhere: each start reads them; model_id spares that" in caplog.text


RANK = """
import sys
from pathlib import Path
from tiercache.integrations import model_files
model_files.GRAIN_NS = 0
print("ready", flush=True)
sys.stdin.readline()
print(model_files.identity_of_model(Path(sys.argv[1])))
"""


def test_processes_that_begin_together_agree_and_leave_a_whole_record(tmp_path: Path) -> None:
    model = save(tmp_path / "raced", shards=12)
    expected = identity_of_model(shutil.copytree(model, tmp_path / "copy"))
    for _ in range(2):
        (model / KEPT).unlink(missing_ok=True)
        command, pipe = [sys.executable, "-c", RANK, str(model)], subprocess.PIPE
        ranks = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        for rank in ranks:
            print(file=rank.stdin, flush=True)
        assert [rank.communicate(timeout=60)[0].strip() for rank in ranks] == [expected] * 4
        assert len(kept(model / KEPT)) == 13, "with the index"
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
        with pytest.raises(OSError, match="was written to while it was read"):
            identity_of_model(model)
    finally:
        over.set()
        writer.join()


# Adapters


def test_an_adapter_is_its_weights_and_its_configuration(tmp_path: Path) -> None:
    def identity(name: str, weights: bytes = b"weights", config: str = "{}") -> str:
        adapter = tmp_path / name
        adapter.mkdir()
        (adapter / "adapter_model.safetensors").write_bytes(weights)
        (adapter / "adapter_config.json").write_text(config)
        (adapter / "README.md").write_text(name)
        return identity_of_adapter(adapter)

    found = [identity("one"), identity("same"), identity("trained", b"Weights"), identity("configured", config="[]")]
    assert found[0] == found[1] and len(set(found)) == 3
    with pytest.raises(NothingToRead):
        identity_of_adapter(tmp_path)
