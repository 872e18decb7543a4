"""What vLLM's settings change in the bytes of KV, for layouts.

Of each part of the configuration every field counts but those that are known to change nothing, so that what a new version
of vLLM brings counts by itself. A field at its default does not count: a version that has one more shares with those before.
Nor does what vLLM derives from the others and from the model, and may not have derived yet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from tiercache.integrations.vllm.engine_identity import digest
from tiercache.integrations.vllm.model_in_vllm import effective_config, model_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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
_OF_MODEL = frozenset({
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
    """By name, what belongs in the layout of any engine with this configuration. `states_are_known`: shapes and dtypes of
    recurrent states are in it as they are."""
    model, cache = config.model_config, config.cache_config
    return {
        "additional": digest(_plain(config.additional_config)) if config.additional_config else "",
        "attention_settings": _changed(config.attention_config, _OF_ATTENTION),
        "cache_dtype": str(cache.cache_dtype),
        "cache_settings": _changed(cache, _OF_CACHE | _OF_STATES if states_are_known else _OF_CACHE),
        "compute_dtype": str(model.dtype),
        "draft": _draft_of(config),
        "hash": str(cache.prefix_caching_hash_algo),
        "images": _changed(model.multimodal_config, _OF_IMAGES),
        "model_config": effective_config(model),
        "model_settings": _changed(model, _OF_MODEL),
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
    weights = model_of(config, draft, speculative.draft_load_config or config.load_config) if of_its_own else "the model's"
    settings = _changed(speculative, _OF_DRAFTS), _changed(draft, _OF_MODEL)
    return f"{weights} {digest((effective_config(draft), str(draft.dtype), _quantization_of(draft), settings))}"


def _quantization_of(model: Any) -> str:
    return f"{model.quantization} {digest(getattr(model, 'quantization_config', None))}"


def _changed(part: Any, harmless: Collection[str]) -> str:
    """A digest of the fields that are not at their defaults and not `harmless`; empty where there are none."""
    if part is None:
        return ""
    given = {field.name: field for field in fields(part) if field.init and field.name not in harmless}
    changed = [
        (name, _plain(getattr(part, name)))
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


def _plain(value: Any) -> Any:
    """What has the same `repr` in every process: sets in order, and no addresses."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return value
