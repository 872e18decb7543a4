"""The layout that names the KV's bytes, from vLLM's configuration."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.core.layout import Layout
from tiercache.integrations.vllm.device_blocks import DeviceKvBlocks
from tiercache.integrations.vllm.grouped import part_blocks
from tiercache.integrations.vllm.kv_blocks import KvBlocks
from tiercache.integrations.vllm.planning import BlockGeometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt")


def make_layout(
    config: VllmConfig,
    spec: Any,
    kvs: Sequence[KvBlocks | DeviceKvBlocks],
    geometry: BlockGeometry,
    layer_names: list[str],
) -> Layout:
    """Everything that changes the bytes. LoRA, multimodal inputs and cache salts are in the names of the blocks.

    `kvs` has one entry a group; `bytes_per_token` is that of the largest, which slots are made for.
    """
    import vllm

    kv = max(kvs, key=lambda one: one.bytes_per_token)
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    weights = f"dummy, seed {model.seed}" if config.load_config.load_format == "dummy" else _weights(str(model.model))
    # How the CPU kernels order a block depends on the instruction set that vLLM chose (AMX tiles, AVX-512, NEON, ...).
    layers = [config.compilation_config.static_forward_context.get(name) for name in layer_names]
    backends = sorted({f"{_backend(layer)} {getattr(layer, 'isa', '')}" for layer in layers})
    return Layout(
        model=str(model.model),
        revision=f"{model.revision or ''} {getattr(model.hf_config, '_commit_hash', None) or ''} {weights}",
        chunk_tokens=geometry.chunk_tokens,
        bytes_per_token=kv.bytes_per_token,
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
            ("parallel", f"tp {parallel.tensor_parallel_size} pp {parallel.pipeline_parallel_size}"),
            ("quantization", str(model.quantization)),
            *_groups(kvs, geometry),
        ),
    )


def _groups(kvs: Sequence[KvBlocks | DeviceKvBlocks], geometry: BlockGeometry) -> list[tuple[str, str]]:
    """Which layers' KV a chunk of which group holds, and how much of it."""
    if not geometry.groups:
        return []
    described = [
        (group.block_tokens, part_blocks(group, geometry), group.layers, kv.layers, kv.bytes_per_block, kv.describe())
        for group, kv in zip(geometry.groups, kvs, strict=True)
    ]
    return [("groups", _digest(described))]


def wasted_part(slot_bytes: int, kvs: Sequence[KvBlocks | DeviceKvBlocks], geometry: BlockGeometry) -> float:
    """What part of the hot cache stays empty when as many chunks of each group are in it."""
    stored = [part_blocks(group, geometry) * kv.bytes_per_block for group, kv in zip(geometry.groups, kvs, strict=False)]
    return 1 - sum(stored) / (slot_bytes * len(stored)) if stored else 0.0


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
