"""A tiny Llama's directory, and the layout that the connector makes for it: vLLM's configuration and attention layers,
without an engine. The weights are not loaded, so they are any bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiercache.core.layout import Layout

BLOCK_TOKENS = 32
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def save_tiny(directory: Path, **config: Any) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(_CONFIG | config))
    (directory / "model.safetensors").write_bytes(safetensors(bytes(range(256)) * 64))
    return directory


def safetensors(numbers: bytes) -> bytes:
    """A file with one tensor of `numbers`."""
    header = json.dumps({"layer": {"dtype": "U8", "shape": [len(numbers)], "data_offsets": [0, len(numbers)]}}).encode()
    return len(header).to_bytes(8, "little") + header + numbers


class TinyEngine:
    """What the connector meets in a worker. Nothing of it is shared with another one."""

    def __init__(self, model: str, **engine: Any) -> None:
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.layers.attention import Attention
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        settings: dict[str, Any] = {"skip_tokenizer_init": True, "block_size": BLOCK_TOKENS, "enforce_eager": True}
        self.config = EngineArgs(
            model=model, kv_transfer_config=_CONNECTOR, **(settings | {"dtype": "float32"} | engine)
        ).create_engine_config()
        names = [f"model.layers.{number}.self_attn.attn" for number in range(2)]
        with set_current_vllm_config(self.config):
            self.layers = [
                Attention(2, 32, 1.0, num_kv_heads=1, cache_config=self.config.cache_config, prefix=name)
                for name in names
            ]
        for layer in self.layers:
            layer.isa = "vec"
        self.kv = torch.zeros(2, 4, 1, BLOCK_TOKENS, 64, dtype=self.config.model_config.dtype)
        self.tensors = dict(zip(names, self.kv, strict=True))
        self.spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=self.kv.dtype)

    def layout(self, model_id: str | None = None) -> Layout:
        from tiercache.integrations.vllm.blocks import KvBlocks
        from tiercache.integrations.vllm.identity import make_layout
        from tiercache.integrations.vllm.planning import BlockGeometry, KvGroup

        content_bytes = 64 * self.kv.element_size()
        blocks = KvBlocks(self.tensors, blocks=4, heads=1, block_tokens=BLOCK_TOKENS, content_bytes=content_bytes)
        geometry = BlockGeometry.for_chunk_size(64, BLOCK_TOKENS, save_tails=True)
        group = KvGroup(0, self.spec.block_size, (), None, self.spec)
        return make_layout(self.config, [group], [blocks], geometry, self.tensors, model_id)


_CONNECTOR = {
    "kv_connector": "TierCacheConnector",
    "kv_connector_module_path": "tiercache.integrations.vllm",
    "kv_role": "kv_both",
}
