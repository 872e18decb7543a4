"""What vLLM's configuration says about the groups of a model's layers: whether we know them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tiercache.errors import LayoutError
from tiercache.integrations.vllm.planning import KvGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

STATE_TOKENS = 2
"""The window that a recurrent state is like."""


def find_groups(config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[KvGroup, ...]:
    """The groups whose KV is cached. Raises LayoutError for models with layers that were not verified."""
    _check_engine(config)
    found = kv_cache_config.kv_cache_groups
    for group in found:
        _check_state(group.kv_cache_spec)
    groups = tuple(_group(index, found[index]) for index in kv_cache_config.prefix_cacheable_group_ids)
    if not groups:
        raise LayoutError("expected layers whose KV can be found by the tokens before it, found none")
    return groups if len(found) > 1 else (replace(groups[0], layers=()),)


def what_they_keep(groups: tuple[KvGroup, ...]) -> str:
    """In words, for the log."""
    windows = [group.window_tokens for group in groups if group.window_tokens is not None and not group.recurrent]
    states = sum(group.recurrent for group in groups)
    sizes = ", ".join(map(str, sorted(set(windows))))
    said = f", {len(windows)} of which keep a window ({sizes} tokens)" if windows else ""
    said += f", {states} of which keep a recurrent state, so that chunks are single blocks" if states else ""
    return f"{said}: of a hit they load what it leaves them" if said else ""


def is_plain(groups: tuple[KvGroup, ...], kv_cache_config: KVCacheConfig) -> bool:
    """Whether all layers keep every token in blocks of one kind."""
    return len(kv_cache_config.kv_cache_groups) == 1 and groups[0].window_tokens is None


def block_sizes(config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """What hits are multiples of, and how many tokens each of a request's block hashes stands for."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    aligned, hashed = resolve_kv_cache_block_sizes(kv_cache_config, config)
    return aligned, getattr(kv_cache_config, "hash_block_size", None) or hashed  # vLLM 0.30 has no such field


def _group(index: int, group: Any) -> KvGroup:
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVQuantMode,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    spec = group.kv_cache_spec
    if type(spec) is MambaSpec:
        return KvGroup(index, spec.block_size, tuple(group.layer_names), STATE_TOKENS, spec, recurrent=True)
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        window_tokens = None
    elif type(spec) is SlidingWindowSpec:
        window_tokens = spec.sliding_window + spec.extra_retained_tokens
    else:
        raise LayoutError(
            f"expected layers with full attention, MLA, sliding windows or recurrent states, found {type(spec).__name__}; "
            "such a model was not verified with this connector (where vLLM can do without its hybrid KV cache manager, "
            "--disable-hybrid-kv-cache-manager may help: its layers are then all cached whole)"
        )
    packed = spec.state_content_bytes is not None or spec.num_head_slots is not None or spec.tokens_per_state != 1
    if packed or spec.kv_quant_mode not in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR):
        raise LayoutError(
            f"expected K and V of each token side by side, plain or in fp8 with one scale, found {spec.kv_quant_mode.name} "
            f"with {spec.num_heads} x {spec.state_content_size_bytes} bytes; packed KV was not verified with this connector"
        )
    return KvGroup(index, spec.block_size, tuple(group.layer_names), window_tokens, spec)


def _check_state(spec: Any) -> None:
    """A state is found again where the engine leaves it at the end of a block. Raises LayoutError where it does not."""
    from vllm.v1.core.sched import output
    from vllm.v1.kv_cache_interface import MambaSpec

    if not isinstance(spec, MambaSpec):
        return
    if spec.mamba_cache_mode != "align":
        raise LayoutError(
            f"expected recurrent states at the ends of blocks, found mamba_cache_mode {spec.mamba_cache_mode}: with "
            "--enable-prefix-caching, and no --mamba-cache-mode, vLLM keeps them there"
        )
    if spec.num_speculative_blocks:
        raise LayoutError(
            "expected recurrent states that are there when a step's forward pass ends, found speculative decoding, with "
            "which they come later; this was not verified with this connector"
        )
    state = getattr(output, "KVConnectorBlockState", None)
    if "boundary_state_offloads" not in getattr(state, "__annotations__", getattr(state, "_fields", ())):
        raise LayoutError("expected vLLM 0.32 or newer: older ones do not say where a model's recurrent states are")


def _check_engine(config: VllmConfig) -> None:
    context = config.parallel_config.decode_context_parallel_size
    if context > 1:
        raise LayoutError(f"expected no decode context parallelism, found {context} ranks: blocks are interleaved then")
    stages = config.parallel_config.pipeline_parallel_size
    if stages > 1:
        # vLLM 0.32 fails with 2 stages on CPU in its first step, without any connector too (KeyError in the scheduler).
        raise LayoutError(
            f"expected one pipeline stage, found {stages}: more could not be verified with this connector"
        )
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise LayoutError(
            "expected KV scales from the checkpoint, found calculate_kv_scales: the meaning of a byte would differ "
            "from one process to the next"
        )
