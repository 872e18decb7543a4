"""Tiny models with recurrent states beside attention, whose random weights are large enough for an answer to depend on every
byte of a state: short convolutions (LFM2) and gated delta nets (Qwen3-Next).

Mamba 2 (Granite 4) cannot be run here: vLLM 0.32's CPU kernel fails with prefix caching, without any connector as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 2048
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.25,
}
_KINDS: dict[str, dict[str, Any]] = {
    "lfm2": {
        "layer_types": ["conv", "full_attention"] * 2,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 16,
        "block_dim": 128,
        "conv_dim": 128,
        "norm_eps": 1e-5,
    },
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "tie_word_embeddings": False,
    },
}
DTYPES = {"lfm2": "float32", "qwen3_next": "bfloat16"}
"""vLLM's CPU kernel for delta nets knows bfloat16 only."""


def tiny_recurrent(directory: Path, kind: str) -> Path:
    """Make `directory` hold such a model; returns it."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # it starts a thread that stays
    torch.manual_seed(14)
    config = transformers.AutoConfig.for_model(kind, **(_COMMON | _KINDS[kind]))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    return directory
