"""The identity of a model, and the layout that names its KV, from vLLM's configuration.

*The model.* Two directories have the same identity if the same files with the same bytes make the KV: all weights, the
indices that say which tensor lies where, and the files that say how weights and images are read. Names of commits, times,
paths, tokenizers and licences do not count, and neither does `config.json`: what vLLM makes of it is part of the layout,
with overrides.

*The settings.* Of each part of vLLM's configuration every field counts but those that are known to change nothing, so
that a field of a new version counts by itself. A field at its default does not count: versions with one field more share
KV with earlier ones. What vLLM derives from the other fields and from the model does not count either, since it may not
be derived yet.

*The code.* vLLM's version changes every two weeks, and the KV seldom does. In place of the version these count:

- The bytes that an attention backend makes of K and V: their order in a block, packing for an instruction set, rounding,
  scales. `byte_format` lets the backend write a known K and V, and reads the block.
- The model's own source text (`code_of_model`): its module, the modules of its base classes, and its rotary embeddings
  with their final parameters. Shared parts (matrix products, norms, attention kernels) are assumed to compute what they
  are named after, up to rounding, which differs between batches as well. Models within models (the language model of one
  that reads images) are made by name and not seen.

*Digests of weights* (`digests_of`) are kept beside the files, or in the user's cache if that directory is not writable. A
kept digest is valid for a file with the same size, modification time, change time and inode. The kernel sets the change
time whenever a file is written, and no program can set it back. A file that was changed within the resolution of the file
system's clock before it was read is not kept. Files of the Hugging Face cache are named by their SHA-256 and are not read.
Several processes may hash the same files. Each begins with another file, takes over what others have finished, and
publishes its results with a rename; the last process to end knows everything.

Engines that serve the same model side by side (data parallelism) have one configuration and one layout.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import inspect
import json
import logging
import os
import platform
import random
import re
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from enum import Enum
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.config import Config
from tiercache.control.server import socket_path
from tiercache.core.layout import Layout
from tiercache.integrations.vllm.blocks import DeviceKvBlocks, KvBlocks, replicas_of
from tiercache.integrations.vllm.planning import BlockGeometry, KvGroup, part_blocks

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

logger = logging.getLogger("tiercache.vllm")

_NULL_BLOCK = 0
"""vLLM's: no request's KV ever lies in it. vLLM itself lets padding write there."""
_MODELS = "vllm.model_executor.models."
_NOT_THE_MODELS_OWN = ("interfaces", "interfaces_base", "utils", "adapters")
"""How models are loaded, split, adapted and pooled."""


def byte_format(layers: Mapping[str, Any], tensors: Mapping[str, Any], computed_in: Any, parts: int = 1) -> str | None:
    """A digest of what the back ends write for known K and V; None where they cannot be asked. With `parts`, of what they
    write for each of so many parts of the heads, which has to be the same.

    `layers` are attention layers, `tensors` their KV by the same names, (kernel blocks, heads, tokens, K and V of a token).
    `computed_in` is torch's dtype of K and V before they are stored, which may be in fewer bits. The null block is written
    to, and is afterwards what it was before; no step may be under way.
    """
    formats: dict[str, str] = {}
    try:
        for name, layer in layers.items():
            implementation = layer.impl
            kind = f"{type(implementation).__qualname__} {getattr(implementation, 'kv_cache_dtype', '')}"
            if kind not in formats:
                formats[kind] = _written(layer, tensors[name], computed_in, parts)
    except Exception as error:
        logger.info(
            "a back end does not show its byte format, so KV is shared within this version of vLLM only: %r", error
        )
        return None
    return digest(sorted(formats.values())) if formats else None


def _written(layer: Any, tensor: Any, computed_in: Any, parts: int) -> str:
    """Return a digest of the bytes that one layer's back end writes for the K and V of one kernel block."""
    import torch

    tokens, heads, head_size = tensor.shape[2], layer.num_kv_heads // parts, layer.head_size
    numbers = torch.arange(2 * tokens * heads * head_size) * 7919 % 251 - 125
    # Whole numbers below 256 are exact in every type that KV is computed in.
    key, value = numbers.to(computed_in).reshape(2, tokens, heads, head_size).repeat(1, 1, parts, 1).to(tensor.device)
    block = tensor[_NULL_BLOCK : _NULL_BLOCK + 1]
    before = block.clone()
    try:
        slots = torch.arange(tokens, dtype=torch.int64, device=tensor.device)
        layer.impl.do_kv_cache_update(layer, key, value, tensor, slots)
        written = block.clone(memory_format=torch.contiguous_format).cpu()
    finally:
        block.copy_(before)
    if torch.equal(written.view(torch.uint8), before.contiguous().cpu().view(torch.uint8)):
        raise ValueError(f"{type(layer.impl).__qualname__} wrote nothing into the block")
    first, *others = written.view(torch.uint8).chunk(parts, dim=1)
    if not all(torch.equal(first, other) for other in others):
        raise ValueError(f"{type(layer.impl).__qualname__} does not write each head by itself")
    return hashlib.sha256(first.contiguous().numpy().tobytes()).hexdigest()


def code_of_model(model_config: Any) -> str | None:
    """A digest of the source text of what is the model's own, and of the rotary embeddings that this process has made.
    None where there is no source, or another one than was expected.
    """
    try:
        return _code_of_model(model_config)
    except Exception as error:
        logger.info("a model does not show its code, so KV is shared within this version of vLLM only: %r", error)
        return None


def _code_of_model(model_config: Any) -> str:
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import get_model_cls

    model_class = get_model_cls(model_config)
    embeddings = list(rotary_embedding._ROPE_DICT.values())
    sources = _modules_of(sys.modules[model_class.__module__]) | {
        name: inspect.getsource(base)
        for embedding in embeddings
        for base in type(embedding).__mro__
        if (name := f"{base.__module__}.{base.__qualname__}").startswith(f"{rotary_embedding.__name__}.")
    }
    parts: list[Any] = [model_class.__qualname__, sorted(sources.items()), sorted(map(_parameters, embeddings))]
    if any("max_model_len" in source for source in sources.values()):
        # Some models choose a scaling by the longest prompt that they may get.
        parts.append(model_config.max_model_len)
    if any(name.startswith(f"{_MODELS}transformers") for name in sources):
        import transformers

        parts.append(transformers.__version__)
    return digest(parts)


def _modules_of(module: Any) -> dict[str, str]:
    """The source text of the module and of those that its classes are derived from, by name."""
    sources = {module.__name__: _source(module)}
    for _, found in inspect.getmembers(module, inspect.isclass):
        if found.__module__ != module.__name__:
            continue
        for base in found.__mro__:
            name = base.__module__
            if (
                name.startswith(_MODELS)
                and name.removeprefix(_MODELS) not in _NOT_THE_MODELS_OWN
                and name not in sources
            ):
                sources |= _modules_of(sys.modules[name])
    return sources


def _source(module: Any) -> str:
    return Path(inspect.getfile(module)).read_text()


def _parameters(embedding: Any) -> str:
    """The plain numbers and words of a rotary embedding: base, dimension, scaling, style."""
    plain = {name: value for name, value in vars(embedding).items() if isinstance(value, (int, float, str))}
    return f"{type(embedding).__qualname__} {json.dumps(plain, sort_keys=True)}"


def digest(values: Any) -> str:
    """24 hex digits for what has a `repr` that says all of it."""
    return hashlib.blake2b(repr(values).encode(), digest_size=12).hexdigest()


KEPT = ".tiercache-digests.json"
_KEPT_FORMAT = 1
_PART_BYTES = 1 << 20
_MOST_THREADS = 16
_STALL_S = 30.0
"""The time without a byte after which the files' mount is taken to hang."""
_GRAIN_NS = 2_000_000_000
"""The coarsest clock of a file system that is still met: two seconds."""
_SHA256 = re.compile(r"[0-9a-f]{64}")

Stamp = tuple[int, int, int, int]
"""Size in bytes, modification and change time in ns, inode."""


class FileChanged(OSError):
    """A file was written to while it was read, so there is no digest of it."""


def digests_of(files: Mapping[str, Path], directory: Path) -> dict[str, str]:
    """SHA-256 of each of `files`, as hex. Reads what is not known already, once, in threads.

    `files` lie below `directory` and are known there by their names in the mapping. Raises OSError: a file cannot be read,
    changes while it is (FileChanged), or does not come for 30 s (TimeoutError).
    """
    return _Digests(files, directory).all()


class _Digests:
    def __init__(self, files: Mapping[str, Path], directory: Path) -> None:
        self._files = files
        self._places = list(_places(directory))
        self._found: dict[str, str] = {}
        self._stamps: dict[str, Stamp] = {}
        """The stamps of files whose digests may be kept."""
        self._lock = threading.Lock()
        self._left: list[str] = []
        self._failed: OSError | None = None
        self._bytes_read = 0
        """All threads add to it. It stands still while a mount hangs."""

    def all(self) -> dict[str, str]:
        for name, path in self._files.items():
            if (digest := _name_of_blob(path)) is not None:
                self._found[name] = digest
        self._take_kept()
        unknown = self._files.keys() - self._found.keys()
        if unknown:
            self._left = random.sample(sorted(unknown), len(unknown))
            self._read_all()
        kept = self._kept()
        if any(kept.get(name) != (stamp, self._found[name]) for name, stamp in self._stamps.items()):
            # Another process has published without what we had added meanwhile.
            self._keep()
        return self._found

    def _read_all(self) -> None:
        began_s = time.monotonic()
        count = min(len(self._left), len(os.sched_getaffinity(0)), _MOST_THREADS)
        # Daemons: a mount that hangs must not hang the engine's exit.
        threads = [threading.Thread(target=self._read, name="tiercache-digest", daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        seen_bytes, moved_s = -1, time.monotonic()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)
                if self._bytes_read != seen_bytes:
                    seen_bytes, moved_s = self._bytes_read, time.monotonic()
                elif time.monotonic() - moved_s > _STALL_S:
                    raise TimeoutError(f"not a byte of {', '.join(sorted(self._files))} came for {_STALL_S:.0f} s")
        if self._failed is not None:
            raise self._failed
        took_s = time.monotonic() - began_s
        logger.info("read %.2f GB of weights for their identity in %.1f s", self._bytes_read / 1e9, took_s)

    def _read(self) -> None:
        """Read one file after the other, in a thread, as long as there are any and none has failed."""
        while True:
            with self._lock:
                if self._failed is not None or not self._left:
                    return
                name = self._left.pop()
                self._take_kept()
                if name in self._found:
                    continue
            try:
                digest, stamp, settled = self._sha256(self._files[name])
            except OSError as error:
                with self._lock:
                    self._failed = self._failed or error
                return
            with self._lock:
                self._found[name] = digest
                if settled:
                    self._stamps[name] = stamp
                    self._keep()

    def _sha256(self, path: Path) -> tuple[str, Stamp, bool]:
        """Digest and stamp of the file, and whether no change of it can be hidden from the stamp."""
        part = memoryview(bytearray(_PART_BYTES))
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            before = stamp_of(os.fstat(file.fileno()))
            settled = time.time_ns() - max(before[1:3]) >= _GRAIN_NS
            while read := file.readinto(part):
                digest.update(part[:read])
                self._bytes_read += read
            if stamp_of(os.fstat(file.fileno())) != before:
                raise FileChanged(f"{path} was written to while it was read for the model's identity")
        return digest.hexdigest(), before, settled

    def _take_kept(self) -> None:
        for name, (stamp, digest) in self._kept().items():
            if name in self._files and name not in self._found and stamp_of(self._files[name].stat()) == stamp:
                self._found[name], self._stamps[name] = digest, stamp

    def _kept(self) -> dict[str, tuple[Stamp, str]]:
        """Return the digests that are kept in all places, the first of which counts."""
        kept: dict[str, tuple[Stamp, str]] = {}
        for place in reversed(self._places):
            kept |= _read_kept(place)
        return kept

    def _keep(self) -> None:
        """Add what is known to the first place that can be written to."""
        for place in self._places:
            known = _read_kept(place)
            ours = {name: (stamp, self._found[name]) for name, stamp in self._stamps.items()}
            try:
                _write_kept(place, known | ours)
            except OSError as error:
                logger.debug("digests cannot be kept as %s: %s", place, error)
            else:
                return
        logger.info("digests of the model's files can be kept nowhere: each start reads them; model_id spares that")


def _places(directory: Path) -> Iterator[Path]:
    yield directory / KEPT
    with contextlib.suppress(RuntimeError):  # no home directory
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        name = hashlib.sha256(os.fsencode(os.path.realpath(directory))).hexdigest()[:32]
        yield Path(cache) / "tiercache" / "digests" / f"{name}.json"


def _read_kept(place: Path) -> dict[str, tuple[Stamp, str]]:
    """Empty where there is nothing, or something else than `_write_kept` wrote."""
    try:
        kept = json.loads(place.read_bytes())
        files = kept["files"]
        if kept["format"] != _KEPT_FORMAT or kept["check"] != _check(files):
            return {}
        return {name: (tuple(stamp), digest) for name, (stamp, digest) in files.items() if _SHA256.fullmatch(digest)}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}


def _write_kept(place: Path, kept: Mapping[str, tuple[Stamp, str]]) -> None:
    files = {name: [list(stamp), digest] for name, (stamp, digest) in sorted(kept.items())}
    place.parent.mkdir(parents=True, exist_ok=True)
    making = place.with_name(f"{place.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        making.write_text(json.dumps({"format": _KEPT_FORMAT, "files": files, "check": _check(files)}, indent=1))
        making.replace(place)
    except BaseException:
        with contextlib.suppress(OSError):
            making.unlink()
        raise


def _check(files: object) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def stamp_of(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _name_of_blob(path: Path) -> str | None:
    """The SHA-256 in the name of a file of the Hugging Face cache: snapshots/COMMIT/NAME links to blobs/SHA256.

    One link and no further: a blob may itself be a link, to a file that is named by another hash.
    """
    try:
        blob = path.parent / os.readlink(path)
        # The link was made when the blob was whole. One that is newer was written to since, and its name is of no worth.
        newer = path.stat().st_mtime_ns - path.lstat().st_mtime_ns > _GRAIN_NS
    except OSError:
        return None
    if newer or blob.parent.name != "blobs" or not _SHA256.fullmatch(blob.name):
        return None
    return blob.name


_SAFETENSORS = "*.safetensors"
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.gguf", "*.tensors")
_NO_WEIGHTS = ("adapter_model.*", "training_args.bin", "optimizer.*", "scheduler.pt", "scaler.pt")
"""Files of a LoRA that lies beside, and of training. vLLM leaves the latter out by name, too."""
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

    Reads all weights that no digest is known of, at the speed of the disk or of SHA-256 (see `digests_of`). Raises
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
    """Return the files of a LoRA, by name. Raises OSError."""
    files = {path.name: path for path in directory.iterdir()}
    return {name: files[name] for name in _matching(files, _OF_ADAPTER)}


def _identity_of_file(model: Path) -> str:
    """Return the identity of one file, of any name, with its further parts and its images' file as llama.cpp names them."""
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


_FROM_DISK = (
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt", "runai_streamer",
    "runai_streamer_sharded", "sharded_state",
)  # fmt: skip
"""Load formats whose weights come from the model's directory and nowhere else."""
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Fields that say where and by what a configuration was written, and the dtype, which the layout has by itself."""


def model_of(config: VllmConfig, model: ModelConfig, load: LoadConfig) -> str:
    """Return the words that stand for the model's weights in a layout: their content, or what is known of it."""
    load_format = str(load.load_format)
    if load_format == "dummy":
        import vllm

        # Random numbers are vLLM's and torch's affair.
        return f"dummy, seed {model.seed}, vllm {vllm.__version__}"
    name = f"{model.model} {model.revision or ''} {getattr(model.hf_config, '_commit_hash', None) or ''}"
    place = place_of(model.model, model.revision, load.download_dir)
    if place is None or model.model_weights:
        logger.warning("the weights of %s are not files here, so its name stands for them; see model_id", model.model)
        return f"name {name}"
    try:
        content = f"content {identity_of_model(place, load_format, with_code=model.trust_remote_code)}"
    except NothingToRead:
        return f"name {name}"
    except OSError as error:
        logger.warning("the model cannot be identified, and nothing is shared, also not with the next start: %s", error)
        return f"unknown, of {config.kv_transfer_config.engine_id} {config.instance_id}"
    if load_format not in _FROM_DISK and place.is_dir():
        content += f" with {load_format} {digest(load.model_loader_extra_config)} {name}"
    logger.info("the model's identity is %s", content)
    return content


def place_of(model: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """The file or directory, or the snapshot in the Hugging Face cache where `model` is a name. Asks no server."""
    from vllm import envs

    place = Path(model).expanduser()
    if place.exists():
        return place
    if envs.VLLM_USE_MODELSCOPE:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError, ValueError):
        return None


def effective_config(model: ModelConfig) -> str:
    """A digest of the model's configuration as it is in effect: what config.json says, what was overridden, and what vLLM
    changed. What is None may as well be absent, which it was before a version of transformers came to know of it.
    """
    return digest(json.dumps(_without_names(model.hf_config.to_dict(), f"{model.model}--"), sort_keys=True))


def _without_names(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        kept = {str(key): item for key, item in value.items() if item is not None and key not in _NOT_OF_THE_MODEL}
        return {key: _without_names(item, name) for key, item in kept.items()}
    if isinstance(value, (list, tuple)):
        return [_without_names(item, name) for item in value]
    if isinstance(value, str):
        # Where classes come from a repository's own code, their names begin with the repository's.
        return value.removeprefix(name)
    return value if isinstance(value, (bool, int, float)) else repr(value)


_OF_CACHE = frozenset({
    # How much there is of it, and how much of the machine it takes.
    "cpu_kvcache_space_bytes", "cpu_offload_gb", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "kv_offloading_backend", "kv_offloading_size", "num_gpu_blocks_override", "swap_space", "swap_space_bytes",
    # What is found and how long it stays.
    "enable_prefix_caching", "prefix_cache_retention_interval",
    # In the layout by themselves, or in the names of blocks.
    "block_size", "cache_dtype", "prefix_caching_hash_algo",
})  # fmt: skip
_OF_STATES = frozenset(
    {"mamba_block_size", "mamba_cache_dtype", "mamba_cache_mode", "mamba_page_size_padded", "mamba_ssm_cache_dtype"}
)
"""vLLM changes them for models without any, one version in another way than the next."""
_OF_MODEL_SETTINGS = frozenset({
    # In the layout by themselves: weights, configuration, type, quantization, images.
    "config_format", "dtype", "hf_config_path", "hf_overrides", "model", "model_weights", "multimodal_config",
    "quantization", "quantization_config", "revision", "seed", "trust_remote_code",
    # Before the tokens or behind the KV.
    "allowed_local_media_path", "allowed_media_domains", "enable_prompt_embeds", "generation_config",
    "io_processor_plugin", "logits_processors", "logprobs_mode", "max_logprobs", "override_generation_config",
    "pooler_config", "renderer_num_workers", "return_sampling_mask", "served_model_name", "skip_tokenizer_init",
    "tokenizer", "tokenizer_mode", "tokenizer_revision", "use_fp64_gumbel",
    # How it runs, to rounding. Where embeddings scale by the longest prompt it is in the layout.
    "allow_deprecated_quantization", "disable_cascade_attn", "enable_cumem_allocator", "enable_nccl_comm_suspend",
    "enable_sleep_mode", "enable_trace_replay", "enforce_eager", "hf_token", "max_model_len",
    "sleep_mode_backend", "sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names", "spec_target_max_model_len",
})  # fmt: skip
_OF_IMAGES = frozenset({
    "allow_missing_mm_embeddings", "enable_mm_embeds", "interleave_mm_strings", "limit_per_prompt",
    "mm_encoder_attn_backend", "mm_encoder_fp8_scale_save_margin", "mm_encoder_fp8_scale_save_path", "mm_encoder_only",
    "mm_encoder_tp_mode", "mm_hasher_algorithm", "mm_ipc_gpu_memory_gb", "mm_processor_cache_gb",
    "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb", "mm_tensor_ipc", "skip_mm_profiling",
})  # fmt: skip
_OF_ATTENTION = frozenset({
    # The back ends that were chosen are in the layout, or what chose them is.
    "backend", "backend_per_kind", "flash_attn_version", "mla_prefill_backend", "use_trtllm_attention",
    "minimax_m3_msa_decode_backend",
    # Splits and sizes: rounding.
    "flash_attn_max_num_splits_for_cuda_graph", "flex_attn_block_m", "flex_attn_block_n", "flex_attn_kv_block_size",
    "flex_attn_q_block_size", "sparse_mla_force_mqa", "sparse_mla_prefill_workspace_factor",
    "tokenspeed_mla_min_split_kv", "tq_max_kv_splits_for_cuda_graph",
})  # fmt: skip
_OF_RECURRENCE = frozenset({"backend", "ssu_algorithm"})
_OF_DRAFTS = frozenset({
    # In the layout by themselves.
    "draft_load_config", "draft_model_config", "model", "quantization", "revision", "target_model_config",
    # How it runs, to rounding.
    "disable_padded_drafter_batch", "draft_parallel_config", "draft_tensor_parallel_size", "enforce_eager",
    "max_model_len", "moe_backend", "target_parallel_config", "tensor_parallel_size", "use_local_argmax_reduction",
    # Which of the drafted tokens stay.
    "draft_sample_method", "enable_adaptive_verification", "rejection_sample_method", "synthetic_acceptance_length",
    "synthetic_acceptance_rates",
})  # fmt: skip


def settings_of(config: VllmConfig, *, states_are_known: bool) -> dict[str, str]:
    """Return by name what belongs in the layout of an engine with this configuration. `states_are_known`: shapes and
    dtypes of recurrent states are in it as they are.
    """
    model, cache = config.model_config, config.cache_config
    return {
        "additional": digest(_comparable(config.additional_config)) if config.additional_config else "",
        "attention_settings": _changed(config.attention_config, _OF_ATTENTION),
        "cache_dtype": str(cache.cache_dtype),
        "cache_settings": _changed(cache, _OF_CACHE | _OF_STATES if states_are_known else _OF_CACHE),
        "compute_dtype": str(model.dtype),
        "draft": _draft_of(config),
        "hash": str(cache.prefix_caching_hash_algo),
        "images": _changed(model.multimodal_config, _OF_IMAGES),
        "model_config": effective_config(model),
        "model_settings": _changed(model, _OF_MODEL_SETTINGS),
        "quantization": _quantization_of(model),
        "recurrence": _changed(getattr(config, "mamba_config", None), _OF_RECURRENCE),
    }


def _draft_of(config: VllmConfig) -> str:
    """A speculative decoder's own model, or layers: their KV lies in the same blocks. Of those that have none, nothing."""
    speculative = config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or draft is speculative.target_model_config:
        return ""
    of_its_own = draft.model != config.model_config.model
    weights = (
        model_of(config, draft, speculative.draft_load_config or config.load_config) if of_its_own else "the model's"
    )
    settings = _changed(speculative, _OF_DRAFTS), _changed(draft, _OF_MODEL_SETTINGS)
    return f"{weights} {digest((effective_config(draft), str(draft.dtype), _quantization_of(draft), settings))}"


def _quantization_of(model: Any) -> str:
    return f"{model.quantization} {digest(getattr(model, 'quantization_config', None))}"


def _changed(part: Any, harmless: Collection[str]) -> str:
    """A digest of the fields that are not at their defaults and not `harmless`; empty where there are none."""
    if part is None:
        return ""
    given = {field.name: field for field in fields(part) if field.init and field.name not in harmless}
    changed = [
        (name, _comparable(getattr(part, name)))
        for name, field in sorted(given.items())
        if getattr(part, name) != _default_of(field)
    ]
    return digest(changed) if changed else ""


def _default_of(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    # pydantic's description of a field stands where its default would.
    described = getattr(field.default, "get_default", None)
    return described(call_default_factory=True) if described is not None else field.default


def _comparable(value: Any) -> Any:
    """Return a value that has the same `repr` in every process: sets in order, and no addresses."""
    if isinstance(value, Mapping):
        return {str(name): _comparable(one) for name, one in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, (list, tuple)):
        return [_comparable(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _comparable(getattr(value, field.name)) for field in fields(value)}
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return value


def make_layout(
    config: VllmConfig,
    groups: Sequence[KvGroup],
    kvs: Sequence[KvBlocks | DeviceKvBlocks],
    geometry: BlockGeometry,
    tensors: Mapping[str, Any],
    model_id: str | None = None,
) -> Layout:
    """Everything that changes the bytes, and nothing else. LoRA, multimodal inputs and cache salts are in the names of the
    blocks, which say by which algorithm they were made and cannot mean two things.

    The number of tensor-parallel ranks is there as the number of shards: ranks that hold the same bytes share them, and
    with one rank that holds them alone (which computed them in another order: they differ in the last digits, as they do
    when a prefill is split in another way).

    `kvs` has one entry a group; `bytes_per_token` is that of the largest, which slots are made for. `tensors` are the
    layers' KV by name, with nothing of a request in it. `model_id` stands for the model's content.
    """
    parts = geometry.parts
    spec = next((group.spec for group in groups if not group.recurrent), None)
    kv = max(kvs, key=lambda one: one.bytes_per_token)
    model, parallel = config.model_config, config.parallel_config
    layers = {name: config.compilation_config.static_forward_context.get(name) for name in tensors}
    # How the CPU kernels order a block depends on the instruction set that vLLM chose (AMX tiles, AVX-512, NEON, ...).
    backends = sorted({f"{_backend(layer)} {getattr(layer, 'isa', '')}" for layer in layers.values()})
    states = {name for group in groups if group.recurrent for name in group.layers}
    # What kernels make of a state they cannot be asked.
    here = parts.here if parts is not None else 1
    written = byte_format(layers, tensors, model.dtype, here) if not states else None
    code = code_of_model(model)
    scales = [(getattr(layer, "_k_scale_float", 1), getattr(layer, "_v_scale_float", 1)) for layer in layers.values()]
    return Layout(
        model=f"id {model_id}" if model_id else model_of(config, model, config.load_config),
        chunk_tokens=geometry.chunk_tokens,
        bytes_per_token=kv.bytes_per_token,
        kv_dtype=kv.dtype,
        layers=kv.layers,
        kv_heads=spec.num_kv_heads // here if spec is not None else 1,
        head_size=spec.head_size if spec is not None else 1,
        block_tokens=geometry.block_tokens,
        byte_format=kv.describe(),
        engine=f"vllm {written or _vllm_version()}",
        rank=parallel.rank,
        world_size=parallel.world_size,
        extra=(
            ("attention", ", ".join(backends)),
            ("code", code or _vllm_version()),
            ("kv_scales", digest(scales)),
            ("layers", digest(list(tensors))),
            ("parallel", f"pp {parallel.pipeline_parallel_size}"),
            *settings_of(config, states_are_known=True).items(),
            *_described_groups(kvs, geometry),
        ),
        replicas=replicas_of(config, [group.spec for group in groups]) if parts is None else 1,
        parts=parts.all if parts is not None else 0,
    )


def _vllm_version() -> str:
    """Return the version, for back ends and models that cannot be asked."""
    import vllm

    return f"{vllm.__version__} {platform.machine()}"


def _described_groups(kvs: Sequence[KvBlocks | DeviceKvBlocks], geometry: BlockGeometry) -> list[tuple[str, str]]:
    """Return the layers whose KV a chunk of each group holds, and how much of it."""
    if geometry.plain:
        return []
    described = [
        (group.block_tokens, part_blocks(group, geometry), group.layers, kv.layers, kv.bytes_per_block, kv.describe())
        + ((group.spec.shapes, group.spec.dtypes, group.spec.mamba_type) if group.recurrent else ())
        for group, kv in zip(geometry.groups, kvs, strict=True)
        if group.part == 0  # of the others the same is true, and how many a rank has does not matter
    ]
    return [("groups", digest(described))]


def _backend(layer: Any) -> str:
    backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else None
    return str(backend.get_name()) if backend is not None else "unknown"


def beside_others(config: Config, index: int, engines: int) -> Config:
    """`config` with names of its own for the engine of that index, where an engine cannot share them.

    Of a dense model each engine is told that it is the only one (0 of 1), but for its index.
    """
    engine = (index, max(engines, index + 1))
    if config.control_socket is not None:
        config = replace(config, control_socket=str(socket_path(config.control_socket, engine)))
    if config.shm_name is not None:
        config = replace(config, shm_name=str(socket_path(config.shm_name, engine)))
    return config
