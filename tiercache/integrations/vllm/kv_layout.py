"""The layout that names the KV's bytes, from vLLM's configuration."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tiercache.core.layout import Layout
from tiercache.integrations.vllm.device_blocks import DeviceKvBlocks
from tiercache.integrations.vllm.engine_identity import byte_format, code_of_model, digest
from tiercache.integrations.vllm.grouped import part_blocks
from tiercache.integrations.vllm.kv_blocks import KvBlocks
from tiercache.integrations.vllm.model_in_vllm import model_of
from tiercache.integrations.vllm.planning import BlockGeometry, KvGroup
from tiercache.integrations.vllm.replicas import replicas_of
from tiercache.integrations.vllm.settings_identity import settings_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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
        engine=f"vllm {written or _version()}",
        rank=parallel.rank,
        world_size=parallel.world_size,
        extra=(
            ("attention", ", ".join(backends)),
            ("code", code or _version()),
            ("kv_scales", digest(scales)),
            ("layers", digest(list(tensors))),
            ("parallel", f"pp {parallel.pipeline_parallel_size}"),
            *settings_of(config, states_are_known=True).items(),
            *_groups(kvs, geometry),
        ),
        replicas=replicas_of(config, [group.spec for group in groups]) if parts is None else 1,
        parts=parts.all if parts is not None else 0,
    )


def _version() -> str:
    """For what nobody can tell otherwise."""
    import vllm

    return f"{vllm.__version__} {platform.machine()}"


def _groups(kvs: Sequence[KvBlocks | DeviceKvBlocks], geometry: BlockGeometry) -> list[tuple[str, str]]:
    """Which layers' KV a chunk of which group holds, and how much of it."""
    if not geometry.groups:
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

