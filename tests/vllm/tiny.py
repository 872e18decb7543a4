"""Tiny models of any shape, whose random weights are large enough for an answer to depend on every byte of its KV.

vLLM's `load_format: dummy` has weights that are so small that answers stay what they are when the KV is garbage.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 256
LAYERS = 2
_CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
_Shapes = dict[str, tuple[int, ...]]


def tiny_llama(directory: Path, kv_heads: int) -> Path:
    """Make `directory` hold a model with 4 query heads and `kv_heads` KV heads; returns it."""
    config = _CONFIG | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": kv_heads,
        "head_dim": 32,
    }
    query, kv, hidden = 4 * 32, kv_heads * 32, config["hidden_size"]
    attention = {
        "q_proj": (query, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, query),
    }
    return _write(directory, config, _shapes(config, attention))


def tiny_mla(directory: Path) -> Path:
    """Make `directory` hold a DeepSeek V2 without experts, with the latent of 512 + 64 that vLLM's CPU kernel is made
    for; returns it."""
    latent, rope, nope, value, hidden = 512, 64, 32, 32, _CONFIG["hidden_size"]
    config = _CONFIG | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": latent,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope,
        "v_head_dim": value,
        "n_routed_experts": 2,
        "first_k_dense_replace": LAYERS,
        "hidden_act": "silu",
    }
    attention = {
        "q_proj": (4 * (nope + rope), hidden),
        "kv_a_proj_with_mqa": (latent + rope, hidden),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (4 * (nope + value), latent),
        "o_proj": (hidden, 4 * value),
    }
    return _write(directory, config, _shapes(config, attention))


def _shapes(config: dict[str, Any], attention: _Shapes) -> _Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: _Shapes = {
        "model.embed_tokens.weight": (VOCABULARY, hidden),
        "lm_head.weight": (VOCABULARY, hidden),
        "model.norm.weight": (hidden,),
    }
    inside = {f"self_attn.{name}": shape for name, shape in attention.items()} | {
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in inside.items()}
    return shapes


def _write(directory: Path, config: dict[str, Any], shapes: _Shapes) -> Path:
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    random = torch.Generator().manual_seed(14)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=random) * (2.0 / shape[1] ** 0.5)
        for name, shape in shapes.items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory
