"""The identity of a model or of an adapter: what its files hold, wherever they lie and whenever they were written.

Two directories have the same identity when the same files with the same bytes make the KV: all weights, the indices that
say which tensor lies where, and what says how weights and images are read. Names of commits, times and paths, tokenizers
and licences do not count. `config.json` does not either: what vLLM makes of it is part of the layout, with overrides.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from tiercache.integrations.vllm.kept_digests import digests_of

_SAFETENSORS = "*.safetensors"
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.gguf", "*.tensors")
_NO_WEIGHTS = ("adapter_model.*", "training_args.bin", "optimizer.*", "scheduler.pt", "scaler.pt")
"""Of a LoRA that lies beside, and of training: vLLM leaves the latter out by name, too."""
_READ_BESIDE = ("*.safetensors.index.json", "*quant*config.json", "*processor_config.json", "tekken.json")
"""Which shard holds a tensor; how weights are quantised; how images and sound become embeddings."""
_OF_ADAPTER = ("adapter_model.*", "adapter_config.json", "*.safetensors", "*.bin", "*.pt", "*.tensors")
_CHECKPOINTS = ("checkpoint-*", "global_step*")
_SAFETENSORS_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "runai_streamer")
"""vLLM's load formats that read no other weights where there are safetensors."""


class NothingToRead(OSError):
    """There are no weights where they were looked for."""


def identity_of_model(model: Path, load_format: str = "auto", *, with_code: bool = False) -> str:
    """32 hex digits for the directory or the single file (GGUF) `model`. `with_code`: its Python modules count as well.

    Reads all weights that no digest is known of, at the speed of the disk or of SHA-256 (see `kept_digests`). Raises
    OSError where that cannot be done, NothingToRead where there are no weights.
    """
    if model.is_file():
        return _identity_of_file(model)
    files = dict(_below(model))
    candidates = files.keys() - _matching(files, _NO_WEIGHTS)
    weights = _matching(candidates, (_SAFETENSORS,))
    if load_format not in _SAFETENSORS_FORMATS or all("/" in name for name in weights):
        weights |= _matching(candidates, _OTHER_WEIGHTS)
    if not weights:
        raise NothingToRead(f"no weights in {model}")
    beside = _matching(files, (*_READ_BESIDE, *(("*.py",) if with_code else ()))) - weights
    return _identity(model, files, weights, beside)


def identity_of_adapter(directory: Path) -> str:
    """32 hex digits for a LoRA's directory. Raises as `identity_of_model` does."""
    files = adapter_files(directory)
    if not files:
        raise NothingToRead(f"no adapter in {directory}")
    beside = _matching(files, ("*.json",))
    return _identity(directory, files, files.keys() - beside, beside)


def adapter_files(directory: Path) -> dict[str, Path]:
    """What a LoRA consists of, by name. Raises OSError."""
    files = {path.name: path for path in directory.iterdir()}
    return {name: files[name] for name in _matching(files, _OF_ADAPTER)}


def _identity_of_file(model: Path) -> str:
    """Of one file, whatever its name; its further parts, and the one that images go through, as llama.cpp names them."""
    prefix, parts = model.name, {model.name: model}
    if split := re.fullmatch(r"(.+)-\d{5}(-of-\d{5}\.gguf)", model.name):
        prefix = split[1]
        parts = {path.name: path for path in model.parent.glob(f"{glob.escape(prefix)}-?????{split[2]}")}
    beside = {path.name: path for path in model.parent.glob("mmproj*.gguf")}
    digests = digests_of(beside | parts, model.parent)
    return _combined({name.removeprefix(prefix): digest for name, digest in digests.items()})


def _identity(directory: Path, files: dict[str, Path], large: Iterable[str], small: Iterable[str]) -> str:
    digests = digests_of({name: files[name] for name in large}, directory)
    # Read each time: it takes no longer than to find out whether they have changed.
    digests |= {name: hashlib.sha256(files[name].read_bytes()).hexdigest() for name in small}
    return _combined(digests)


def _combined(digests: dict[str, str]) -> str:
    return hashlib.blake2b(json.dumps(sorted(digests.items())).encode(), digest_size=16).hexdigest()


def _below(directory: Path) -> Iterator[tuple[str, Path]]:
    """Files by their names below `directory`, and below its directories: some models have parts in those."""
    for path in sorted(directory.iterdir()):
        if path.name.startswith("."):
            continue
        if not path.is_dir():
            yield path.name, path
        elif not any(fnmatch(path.name, pattern) for pattern in _CHECKPOINTS):
            yield from ((f"{path.name}/{file.name}", file) for file in sorted(path.iterdir()) if file.is_file())


def _matching(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    return {name for name in names for pattern in patterns if fnmatch(name.rpartition("/")[2], pattern)}
