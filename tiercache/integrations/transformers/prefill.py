"""A prompt is computed a piece at a time, as transformers' own `generate` computes it in one."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def accepts(model: Any, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


def positions(model: Any, tokens: int) -> dict[str, torch.Tensor]:
    """What `generate` is to be told so that the first token has position 0, and each the next one.

    Left to itself a model may take others: Qwen2-VL goes on behind a cache with what it remembers of somebody's image.
    """
    return {"position_ids": torch.arange(tokens, device=model.device)[None]} if accepts(model, "position_ids") else {}


def prefill(model: Any, past: Any, prompt: torch.Tensor, end: int) -> None:
    """Compute the tokens of `prompt` behind those that `past` holds, up to `end`: as `generate` would if all before `end`
    were its prompt. Only the last token's logits are asked for, where a model can do that."""
    ids = prompt[:, :end]
    known = {**positions(model, end), **({"logits_to_keep": 1} if accepts(model, "logits_to_keep") else {})}
    if not accepts(model, "attention_mask"):
        known["attention_mask"] = torch.ones_like(ids)  # `generate` leaves out one that hides nothing, but not here
    new_tokens = end - past.get_seq_length()
    with torch.no_grad():
        inputs = model.prepare_inputs_for_generation(
            ids, next_sequence_length=new_tokens, past_key_values=past, use_cache=True, is_first_iteration=True, **known
        )
        model(**inputs, return_dict=True)
