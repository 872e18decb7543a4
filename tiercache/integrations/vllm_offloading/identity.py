"""The layout that identifies the bytes of vLLM's offloaded chunks.

A chunk is a row of vLLM's CPU tier: the parts of all ranks, concatenated. The scheduler's process has neither the
weights nor the attention layers that the connector reads, so the layout uses the version of vLLM and the kind of
machine instead: other versions and other kinds of machines find nothing.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
from typing import TYPE_CHECKING

from tiercache.core.layout import Layout
from tiercache.integrations.vllm.identity import digest, model_of, settings_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

logger = logging.getLogger("tiercache.vllm")


def engine_config(engine_id: str) -> VllmConfig | None:
    """Return the configuration of the engine under construction from the calling frames, or None if no frame has it.

    vLLM passes its offloading only some of the settings that determine the bytes: no revision, load format, overrides
    or quantization. The code that makes the tier has the whole configuration.
    """
    from vllm.config import VllmConfig

    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        found = frame.f_locals.get("vllm_config")
        if isinstance(found, VllmConfig) and getattr(found.kv_transfer_config, "engine_id", None) == engine_id:
            return found
    return None


def make_layout(
    offloading: OffloadingConfig, row_bytes: int, engine: VllmConfig | None, model_id: str | None
) -> Layout:
    """Return the layout of chunks of `row_bytes`. `model_id` stands for the model's content.

    If the inputs that determine the bytes are unknown, the layout is private to this engine, so that nothing is shared,
    not even with its next start, and a warning says so.
    """
    import vllm

    parallel, cache = offloading.parallel, offloading.cache
    chunk_tokens = max(group.tokens_per_block for group in offloading.groups) * cache.blocks_per_chunk
    extra = {
        "canonical": str(offloading.canonical_layout),
        "groups": digest([(group.group_id, group.tokens_per_block, group.layer_names) for group in offloading.groups]),
        "machine": _machine(),
        "order": f"{offloading.kv_cache_layout}",
        "parallel": f"tp {parallel.tp_size} pp {parallel.pp_size} pcp {parallel.pcp_size} dcp {parallel.dcp_size} "
        f"of {parallel.world_size}",
        "replicated": str(offloading.replicated_layout),
        "row": f"{row_bytes} bytes, {cache.blocks_per_chunk} blocks, a hash each {cache.tokens_per_hash} tokens",
    }
    reason = _why_unknown(engine)
    if engine is None or reason is not None:
        logger.warning("nothing is shared with other engines, also not with the next start: %s", reason)
        model = f"unknown, of {os.urandom(16).hex()}"
    else:
        model = f"id {model_id}" if model_id else model_of(engine, engine.model_config, engine.load_config)
        extra |= _of_engine(engine)
    return Layout(
        model=model,
        chunk_tokens=chunk_tokens,
        bytes_per_token=-(-row_bytes // chunk_tokens),
        kv_dtype=offloading.model.dtype,
        byte_format="rows of vllm's offloading",
        engine=f"vllm {vllm.__version__}",
        extra=tuple(sorted(extra.items())),
    )


def _why_unknown(engine: VllmConfig | None) -> str | None:
    if engine is None:
        return "vLLM's configuration was not found where the tier was made"
    if engine.lora_config is not None:
        return "blocks of LoRA adapters are named by the adapter's path, and what lies there may change (enable_lora)"
    if getattr(engine.cache_config, "calculate_kv_scales", False):
        return "scales of the KV are found while the engine runs (calculate_kv_scales)"
    return None


def _of_engine(engine: VllmConfig) -> dict[str, str]:
    interleaved = [
        getattr(engine.parallel_config, name, None)
        for name in ("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size")
    ]
    # The layers and back ends are unknown here, so include every setting that may choose them.
    return settings_of(engine, states_are_known=False) | {
        "attention": digest(engine.attention_config),
        "interleaved": digest(interleaved),
        "longest": str(engine.model_config.max_model_len),
    }


def _machine() -> str:
    """Return the properties that choose attention back ends, which determine the order of the bytes in a block."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import torch

        instructions = f"{torch.backends.cpu.get_cpu_capability()} amx {torch.cpu._is_amx_tile_supported()}"
        return f"{platform.machine()} {instructions}"
    return f"{current_platform.get_device_name()} {current_platform.get_device_capability()}"
