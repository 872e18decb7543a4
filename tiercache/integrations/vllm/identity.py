"""The layout that names the KV, from vLLM's configuration and layers, and the content of the model's files.

*The model.* Its files are known by their content (`model_files.py`), except for `config.json`: the configuration that vLLM
makes of it, with overrides, is part of the layout.

*The settings.* Every field of the relevant parts of vLLM's configuration counts, except those known to change nothing,
so fields of new versions count by default. A field at its default does not count, so a version with an additional field
shares KV with earlier ones. Fields that vLLM derives from other fields and from the model do not count either, since
they may not be derived yet.

*The code.* vLLM's version changes every two weeks, and the KV seldom does. These count instead of the version:

- The bytes that an attention backend makes of K and V: their order in a block, packing for an instruction set, rounding,
  scales. `byte_format` lets the backend write a known K and V, and reads the block.
- The model's own source text (`code_of_model`): its module, the modules of its base classes, and its rotary embeddings
  with their final parameters. Shared parts (matrix products, norms, attention kernels) are assumed to compute what they
  are named after, up to rounding, which differs between batches as well. Nested models (such as the language model of
  one that reads images) are created by name, and are not covered.

Engines that serve the same model in parallel (data parallelism) have one configuration and one layout.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import platform
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.config import Config
from tiercache.core.layout import Layout
from tiercache.integrations.model_files import NothingToRead, identity_of_model, place_of
from tiercache.integrations.settings import for_process
from tiercache.integrations.vllm.blocks import DeviceKvBlocks, KvBlocks, replicas_of
from tiercache.integrations.vllm.planning import NULL_BLOCK, BlockGeometry, KvGroup, part_blocks

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

logger = logging.getLogger("tiercache.vllm")

_MODELS = "vllm.model_executor.models."
_NOT_THE_MODELS_OWN = ("interfaces", "interfaces_base", "utils", "adapters")
"""Modules that load, split, adapt and pool models."""


def byte_format(layers: Mapping[str, Any], tensors: Mapping[str, Any], computed_in: Any, parts: int = 1) -> str:
    """Return a digest of the bytes that the back ends write for known K and V.

    Raises any error of a back end, and AttributeError for recurrent states, which have none.

    `layers` are attention layers, `tensors` their KV by the same names, (kernel blocks, heads, tokens, K and V of a
    token). `computed_in` is torch's dtype of K and V before they are stored, which may take fewer bits. With `parts`
    the digest covers one part of the heads, and all parts must get the same bytes. Writes to the null block and
    restores it; no step may be in flight.
    """
    kinds = {(type(layer.impl), getattr(layer.impl, "kv_cache_dtype", "")): name for name, layer in layers.items()}
    return digest(sorted(_written(layers[name], tensors[name], computed_in, parts) for name in kinds.values()))


def _written(layer: Any, tensor: Any, computed_in: Any, parts: int) -> str:
    """Return a digest of the bytes that one layer's back end writes for the K and V of one kernel block."""
    import torch

    tokens, heads, head_size = tensor.shape[2], layer.num_kv_heads // parts, layer.head_size
    numbers = torch.arange(2 * tokens * heads * head_size) * 7919 % 251 - 125
    # Integers below 256 are exact in every dtype that KV is computed in.
    key, value = numbers.to(computed_in).reshape(2, tokens, heads, head_size).repeat(1, 1, parts, 1).to(tensor.device)
    block = tensor[NULL_BLOCK : NULL_BLOCK + 1]
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


def code_of_model(model_config: Any) -> str:
    """Return a digest of the model's own source text, and of the rotary embeddings that this process has made.

    Raises any error if the source is missing or has an unexpected form.
    """
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
        # Some models choose a scaling by the length of the longest prompt allowed.
        parts.append(model_config.max_model_len)
    if any(name.startswith(f"{_MODELS}transformers") for name in sources):
        import transformers

        parts.append(transformers.__version__)
    return digest(parts)


def _modules_of(module: Any) -> dict[str, str]:
    """Return the source text of the module and of the modules of its classes' base classes, by module name."""
    sources = {module.__name__: Path(inspect.getfile(module)).read_text()}
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


def _parameters(embedding: Any) -> str:
    """Return the plain attributes of a rotary embedding: base, dimension, scaling, style."""
    plain = {name: value for name, value in vars(embedding).items() if isinstance(value, (int, float, str))}
    return f"{type(embedding).__qualname__} {json.dumps(plain, sort_keys=True)}"


def digest(values: Any) -> str:
    """Return 24 hex digits for values whose `repr` identifies them completely."""
    return hashlib.blake2b(repr(values).encode(), digest_size=12).hexdigest()


_FROM_DISK = (
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt", "runai_streamer",
    "runai_streamer_sharded", "sharded_state",
)  # fmt: skip
"""Load formats whose weights come from the model's directory and nowhere else."""
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Fields that tell where and by which program a configuration was written, and the dtype, a separate layout entry."""


def model_of(config: VllmConfig, model: ModelConfig, load: LoadConfig) -> str:
    """Return the identity of the model's weights for a layout: by content if possible, otherwise by name or private."""
    load_format = str(load.load_format)
    if load_format == "dummy":
        import vllm

        # vLLM's version stands for the code that makes the random weights.
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


def effective_config(model: ModelConfig) -> str:
    """Return a digest of the model's configuration in effect: config.json with overrides and vLLM's changes.

    Fields that are None are left out, since they are absent in versions of transformers that do not know them.
    """
    return digest(json.dumps(_without_names(model.hf_config.to_dict(), f"{model.model}--"), sort_keys=True))


def _without_names(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        kept = {str(key): item for key, item in value.items() if item is not None and key not in _NOT_OF_THE_MODEL}
        return {key: _without_names(item, name) for key, item in kept.items()}
    if isinstance(value, (list, tuple)):
        return [_without_names(item, name) for item in value]
    if isinstance(value, str):
        # Names of classes in a repository's own code begin with the name of the repository.
        return value.removeprefix(name)
    return value if isinstance(value, (bool, int, float)) else repr(value)


_OF_CACHE = frozenset({
    # Sizes of the cache, and its share of the machine.
    "gpu_memory_utilization", "kv_cache_memory_bytes", "kv_offloading_backend", "kv_offloading_size",
    "num_gpu_blocks_override",
    # Hits of vLLM's own cache, and how long it keeps KV.
    "enable_prefix_caching", "prefix_cache_retention_interval",
    # Separate entries of the layout, or parts of the names of blocks.
    "block_size", "cache_dtype", "prefix_caching_hash_algo",
})  # fmt: skip
_OF_STATES = frozenset(
    {"mamba_block_size", "mamba_cache_dtype", "mamba_cache_mode", "mamba_page_size_padded", "mamba_ssm_cache_dtype"}
)
"""vLLM changes these even for models without recurrent states, and not in the same way in all versions."""
_OF_MODEL_SETTINGS = frozenset({
    # Separate entries of the layout: weights, configuration, dtype, quantization, images.
    "config_format", "dtype", "hf_config_path", "hf_overrides", "model", "model_weights", "multimodal_config",
    "quantization", "quantization_config", "revision", "seed", "trust_remote_code",
    # Effects before the tokens exist, or after the KV is computed.
    "allowed_local_media_path", "allowed_media_domains", "enable_prompt_embeds", "generation_config",
    "io_processor_plugin", "logits_processors", "logprobs_mode", "max_logprobs", "override_generation_config",
    "pooler_config", "renderer_num_workers", "return_sampling_mask", "served_model_name", "skip_tokenizer_init",
    "tokenizer", "tokenizer_mode", "tokenizer_revision", "use_fp64_gumbel",
    # Effects on rounding at most. If embeddings scale by the longest prompt, `code_of_model` adds its length.
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
    # The layout has the chosen back ends, or the settings that choose them.
    "backend", "backend_per_kind", "flash_attn_version", "mla_prefill_backend", "use_trtllm_attention",
    "minimax_m3_msa_decode_backend",
    # Splits and sizes, with an effect on rounding only.
    "flash_attn_max_num_splits_for_cuda_graph", "flex_attn_block_m", "flex_attn_block_n", "flex_attn_kv_block_size",
    "flex_attn_q_block_size", "sparse_mla_force_mqa", "sparse_mla_prefill_workspace_factor",
    "tokenspeed_mla_min_split_kv", "tq_max_kv_splits_for_cuda_graph",
})  # fmt: skip
_OF_RECURRENCE = frozenset({"backend", "ssu_algorithm"})
_OF_DRAFTS = frozenset({
    # Separate entries of the layout.
    "draft_load_config", "draft_model_config", "model", "quantization", "revision", "target_model_config",
    # Effects on rounding at most.
    "disable_padded_drafter_batch", "draft_parallel_config", "draft_tensor_parallel_size", "enforce_eager",
    "max_model_len", "moe_backend", "target_parallel_config", "tensor_parallel_size", "use_local_argmax_reduction",
    # Choice of the drafted tokens that stay.
    "draft_sample_method", "enable_adaptive_verification", "rejection_sample_method", "synthetic_acceptance_length",
    "synthetic_acceptance_rates",
})  # fmt: skip


def settings_of(config: VllmConfig, *, states_are_known: bool) -> dict[str, str]:
    """Return the entries, by name, that this configuration adds to a layout.

    With `states_are_known` the layout has the actual shapes and dtypes of recurrent states elsewhere.
    """
    model, cache = config.model_config, config.cache_config
    return {
        "additional": digest(_written_out(config.additional_config)) if config.additional_config else "",
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
    """Describe a speculative decoder's own model or layers, whose KV lies in the same blocks; empty if it has none."""
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
    """Return a digest of the fields that are neither at their defaults nor `harmless`; empty if there are none."""
    if part is None:
        return ""
    given = {field.name: field for field in fields(part) if field.init and field.name not in harmless}
    changed = [
        (name, _written_out(getattr(part, name)))
        for name, field in sorted(given.items())
        if getattr(part, name) != _default_of(field)
    ]
    return digest(changed) if changed else ""


def _default_of(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    # The default of a pydantic field is an object that describes the field.
    described = getattr(field.default, "get_default", None)
    return described(call_default_factory=True) if described is not None else field.default


def _written_out(value: Any) -> str:
    """Return a text of a setting that is the same in every process: sets in order, and no addresses."""
    return json.dumps(value, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else repr(value)


def make_layout(
    config: VllmConfig,
    groups: Sequence[KvGroup],
    kvs: Sequence[KvBlocks | DeviceKvBlocks],
    geometry: BlockGeometry,
    tensors: Mapping[str, Any],
    model_id: str | None = None,
) -> Layout:
    """Return the layout: everything that changes the bytes of the KV, and nothing else.

    LoRA, multimodal inputs and cache salts are in the names of the blocks instead. The layout names the algorithm of
    these hashes, so a name has one meaning.

    Tensor parallelism counts as the number of shards: ranks that hold the same bytes share them, also with a rank of
    another engine that holds them alone. Its bytes differ in the last digits, since they are computed in another order,
    as they do if a prefill is split differently.

    `kvs` has one entry per group; `bytes_per_token` is that of the largest, since slots must fit it. `tensors` are the
    layers' KV by name, before any request has used it. `model_id` stands for the model's content.
    """
    parts = geometry.parts
    spec = next((group.spec for group in groups if not group.recurrent), None)
    kv = max(kvs, key=lambda one: one.bytes_per_token)
    model, parallel = config.model_config, config.parallel_config
    layers = {name: config.compilation_config.static_forward_context.get(name) for name in tensors}
    # The order of a block in CPU kernels depends on the instruction set that vLLM chose (AMX, AVX-512, NEON, ...).
    backends = sorted({f"{_backend(layer)} {getattr(layer, 'isa', '')}" for layer in layers.values()})
    here = parts.here if parts is not None else 1
    written = _or_version("a back end", lambda: byte_format(layers, tensors, model.dtype, here))
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
        engine=f"vllm {written}",
        rank=parallel.rank,
        world_size=parallel.world_size,
        extra=(
            ("attention", ", ".join(backends)),
            ("code", _or_version("a model", lambda: code_of_model(model))),
            ("kv_scales", digest(scales)),
            ("layers", digest(list(tensors))),
            ("parallel", f"pp {parallel.pipeline_parallel_size}"),
            *settings_of(config, states_are_known=True).items(),
            *_described_groups(kvs, geometry),
        ),
        replicas=replicas_of(config, [group.spec for group in groups]) if parts is None else 1,
        parts=parts.all if parts is not None else 0,
    )


def _or_version(what: str, look: Callable[[], str]) -> str:
    """Return what `look` finds, or vLLM's version and the kind of machine if `what` cannot be inspected."""
    try:
        return look()
    except Exception as error:
        import vllm

        logger.info("%s cannot be inspected, so KV is shared within this version of vLLM only: %r", what, error)
        return f"{vllm.__version__} {platform.machine()}"


def _described_groups(kvs: Sequence[KvBlocks | DeviceKvBlocks], geometry: BlockGeometry) -> list[tuple[str, str]]:
    """Return an entry for the layout on the layers and sizes of each group's chunks; empty if the geometry is plain."""
    if geometry.plain:
        return []
    described = [
        (group.block_tokens, part_blocks(group, geometry), group.layers, kv.layers, kv.bytes_per_block, kv.describe())
        + ((group.spec.shapes, group.spec.dtypes, group.spec.mamba_type) if group.recurrent else ())
        for group, kv in zip(geometry.groups, kvs, strict=True)
        if group.part == 0  # other parts are alike, and their number on a rank does not matter
    ]
    return [("groups", digest(described))]


def _backend(layer: Any) -> str:
    backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else None
    return str(backend.get_name()) if backend is not None else "unknown"


def beside_others(config: Config, parallel: Any) -> Config:
    """Return `config` for one of several engines side by side. `parallel` is vLLM's or its offloading's.

    vLLM tells each engine of a dense model that it is the only one, so the index alone may differ.
    """
    index = parallel.data_parallel_index
    return for_process(config, (index, max(parallel.data_parallel_size, index + 1)))
