"""What vLLM's configuration says about the KV: whether we know it, and the layout that names its bytes."""

from __future__ import annotations

import hashlib
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.core.layout import Layout
from tiercache.errors import LayoutError
from tiercache.integrations.vllm.device_blocks import DeviceKvBlocks
from tiercache.integrations.vllm.kv_blocks import KvBlocks
from tiercache.integrations.vllm.planning import BlockGeometry
from tiercache.integrations.vllm.replicas import replicas_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt")


def attention_spec(config: VllmConfig, kv_cache_config: KVCacheConfig) -> Any:
    """The specification that all layers share. Raises LayoutError for models whose layers do not all keep the KV of every
    token in blocks of one kind."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MLAAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) not in (FullAttentionSpec, MLAAttentionSpec):
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        raise LayoutError(
            f"expected one group of full-attention or MLA layers, found {len(groups)} ({kinds}); models with sliding "
            "windows alone or Mamba layers were not verified with this connector"
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
    config: VllmConfig, spec: Any, kv: KvBlocks | DeviceKvBlocks, geometry: BlockGeometry, layer_names: list[str]
) -> Layout:
    """Everything that changes the bytes. LoRA, multimodal inputs and cache salts are in the names of the blocks.

    The number of tensor-parallel ranks is there as the number of shards: ranks that hold the same bytes share them, and
    with one rank that holds them alone (which computed them in another order: they differ in the last digits, as they do
    when a prefill is split in another way).
    """
    import vllm

    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    weights = f"dummy, seed {model.seed}" if config.load_config.load_format == "dummy" else _weights(str(model.model))
    # How the CPU kernels order a block depends on the instruction set that vLLM chose (AMX tiles, AVX-512, NEON, ...).
    layers = [config.compilation_config.static_forward_context.get(name) for name in layer_names]
    backends = sorted({f"{_backend(layer)} {getattr(layer, 'isa', '')}" for layer in layers})
    return Layout(
        model=str(model.model),
        revision=f"{model.revision or ''} {getattr(model.hf_config, '_commit_hash', None) or ''} {weights}",
        chunk_tokens=geometry.chunk_tokens,
        bytes_per_token=kv.bytes_per_block // geometry.block_tokens,
        kv_dtype=kv.dtype,
        layers=kv.layers,
        kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        block_tokens=geometry.block_tokens,
        byte_format=kv.describe(),
        engine=f"vllm {vllm.__version__}",
        rank=parallel.rank,
        world_size=parallel.world_size,
        extra=(
            ("attention", ", ".join(backends)),
            ("cache_dtype", str(cache.cache_dtype)),
            ("compute_dtype", str(model.dtype)),
            (
                "kv_scales",
                _digest([(getattr(x, "_k_scale_float", 1), getattr(x, "_v_scale_float", 1)) for x in layers]),
            ),
            ("layers", _digest(layer_names)),
            ("machine", platform.machine()),
            # Names come from pickled objects (vLLM's sha256), whose bytes belong to a version of Python.
            ("hash", f"{cache.prefix_caching_hash_algo} python {sys.version_info[0]}.{sys.version_info[1]}"),
            ("model_config", _model_config(model.hf_config)),
            ("parallel", f"pp {parallel.pipeline_parallel_size}"),
            ("quantization", str(model.quantization)),
        ),
        replicas=replicas_of(config, [spec]),
    )


def _backend(layer: Any) -> str:
    backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else None
    return str(backend.get_name()) if backend is not None else "unknown"


def _model_config(hf_config: Any) -> str:
    """The model's own configuration with overrides (RoPE scaling and the like), less what is about files and versions."""
    values = hf_config.to_dict()
    volatile = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
    return _digest(sorted((key, repr(value)) for key, value in values.items() if key not in volatile))


def _weights(model: str) -> str:
    """For a local directory: names, sizes and times of the weights, since other weights may come to lie under one path."""
    directory = Path(model)
    if not directory.is_dir():
        return ""
    files = sorted(path for path in directory.iterdir() if path.suffix in _WEIGHTS or path.name == "config.json")
    return _digest([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])


def _digest(values: Any) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=12).hexdigest()
