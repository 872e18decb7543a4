"""Small models of random weights: one of full attention, one in which windows and full attention take turns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import torch
import transformers

from tiercache import TierCache
from tiercache.integrations.transformers import ModelKv

CHUNK_TOKENS = 16
WINDOW_TOKENS = 24
_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}

Open = Callable[[ModelKv], AbstractAsyncContextManager[TierCache]]


def make_model(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    if kind == "llama":
        config = transformers.LlamaConfig(**_SIZES, num_hidden_layers=3)
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    config = transformers.Gemma3TextConfig(
        **_SIZES,
        num_hidden_layers=6,
        sliding_window=WINDOW_TOKENS,
        layer_types=[*["sliding_attention"] * 2, "full_attention"] * 2,
        query_pre_attn_scalar=16,
    )
    return transformers.Gemma3ForCausalLM(config).eval()


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def compute(model: Any, past: Any, ids: list[int]) -> Any:
    """Go on behind `past` with `ids` in one step; the logits."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), past_key_values=past, use_cache=True).logits
