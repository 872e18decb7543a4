"""What vLLM's configuration says about the KV: whether we know it, and the layout that names its bytes."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tiercache.core.layout import Layout
from tiercache.errors import LayoutError
from tiercache.integrations.vllm.device_blocks import DeviceKvBlocks
from tiercache.integrations.vllm.engine_identity import byte_format, code_of_model, digest
from tiercache.integrations.vllm.kv_blocks import KvBlocks
from tiercache.integrations.vllm.model_in_vllm import effective_config, model_of
from tiercache.integrations.vllm.planning import BlockGeometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_IMAGE_OPTIONS = (
    "language_model_only", "video_pruning_rate", "video_pruning_method", "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path", "mm_device_do_normalize",
)  # fmt: skip


def attention_spec(config: VllmConfig, kv_cache_config: KVCacheConfig) -> Any:
    """The specification that all layers share. Raises LayoutError for models whose layers do not all keep the KV of every
    token in blocks of one kind."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        raise LayoutError(
            f"expected one group of full-attention layers, found {len(groups)} ({kinds}); models with sliding windows "
            "alone, Mamba layers or MLA were not verified with this connector"
        )
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
    spec = groups[0].kv_cache_spec
    packed = spec.state_content_bytes is not None or spec.num_head_slots is not None or spec.tokens_per_state != 1
    if packed or spec.kv_quant_mode not in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR):
        raise LayoutError(
            f"expected K and V of each token side by side, plain or in fp8 with one scale, found {spec.kv_quant_mode.name} "
            f"with {spec.num_heads} x {spec.state_content_size_bytes} bytes; packed KV was not verified with this connector"
        )
    return spec


def make_layout(
    config: VllmConfig,
    spec: Any,
    kv: KvBlocks | DeviceKvBlocks,
    geometry: BlockGeometry,
    tensors: Mapping[str, Any],
    model_id: str | None = None,
) -> Layout:
    """Everything that changes the bytes, and nothing else. LoRA, multimodal inputs and cache salts are in the names of the
    blocks, which say by which algorithm they were made and cannot mean two things.

    `tensors` are the layers' KV by name, with nothing of a request in it. `model_id` stands for the model's content.
    """
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    layers = {name: config.compilation_config.static_forward_context.get(name) for name in tensors}
    # How the CPU kernels order a block depends on the instruction set that vLLM chose (AMX tiles, AVX-512, NEON, ...).
    backends = sorted({f"{_backend(layer)} {getattr(layer, 'isa', '')}" for layer in layers.values()})
    written, code = byte_format(layers, tensors, model.dtype), code_of_model(model)
    scales = [(getattr(layer, "_k_scale_float", 1), getattr(layer, "_v_scale_float", 1)) for layer in layers.values()]
    return Layout(
        model=f"id {model_id}" if model_id else model_of(config, model, config.load_config),
        chunk_tokens=geometry.chunk_tokens,
        bytes_per_token=kv.bytes_per_block // geometry.block_tokens,
        kv_dtype=kv.dtype,
        layers=kv.layers,
        kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        block_tokens=geometry.block_tokens,
        byte_format=kv.describe(),
        engine=f"vllm {written or _version()}",
        rank=parallel.rank,
        world_size=parallel.world_size,
        extra=(
            ("attention", ", ".join(backends)),
            ("cache_dtype", str(cache.cache_dtype)),
            ("code", code or _version()),
            ("compute_dtype", str(model.dtype)),
            ("draft", _draft(config)),
            ("hash", str(cache.prefix_caching_hash_algo)),
            ("images", _images(model)),
            ("kv_scales", digest(scales)),
            ("layers", digest(list(tensors))),
            ("model_config", effective_config(model)),
            ("parallel", f"tp {parallel.tensor_parallel_size} pp {parallel.pipeline_parallel_size}"),
            ("quantization", f"{model.quantization} {digest(getattr(model, 'quantization_config', None))}"),
        ),
    )


def _version() -> str:
    """For what nobody can tell otherwise."""
    import vllm

    return f"{vllm.__version__} {platform.machine()}"


def _backend(layer: Any) -> str:
    backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else None
    return str(backend.get_name()) if backend is not None else "unknown"


def _draft(config: VllmConfig) -> str:
    """A speculative decoder's own model: its layers' KV lies in the same blocks."""
    speculative = config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or draft.model == config.model_config.model:
        return ""
    return model_of(config, draft, speculative.draft_load_config or config.load_config)


def _images(model: Any) -> str:
    """What the engine makes of images besides what is in the names of blocks."""
    multimodal = model.multimodal_config
    return digest([getattr(multimodal, option, None) for option in _IMAGE_OPTIONS]) if multimodal is not None else ""
