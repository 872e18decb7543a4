"""What a model's KV is, asked of the model: it computes a few tokens in several ways, which must give the same."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from tiercache.errors import LayoutError
from tiercache.integrations.transformers.prefill import prefill

_TOKENS = 12
_PIECE_TOKENS = 4
_ROUNDING = 64
"""Of as many smallest steps of a type two KVs of a token may be apart, relative to their length, that were computed in
kernels of other shapes; but never by more than the root of such a step. (106 small models, in float32: 9 at most.)"""


def probe(model: Any) -> list[Any]:
    """The layers of a cache after one token. Leaves nothing in the model.

    Raises LayoutError where the model cannot be asked; where it keeps KV in another way than by layers of plain attention;
    and where KV depends on later tokens, on how a prompt is divided, or on whether the model is called or `generate` is.
    """
    try:
        layers = _layers(model, _computed(model, [0]))
        _check_same(model)
    except LayoutError:
        raise
    except Exception as error:  # whatever models raise that have no such cache, or want more than token ids
        raise LayoutError(
            f"{type(model).__name__} does not compute KV of token ids alone: {type(error).__name__}: {error}"
        ) from error
    return layers


def _computed(model: Any, ids: list[int], pieces: bool = False) -> DynamicCache:
    """By the model as it is when called, or in pieces as `generate` computes it."""
    past = DynamicCache(config=model.config)
    prompt = torch.tensor([ids], device=model.device)
    if pieces:
        for end in range(_PIECE_TOKENS, len(ids) + 1, _PIECE_TOKENS):
            prefill(model, past, prompt, end)
    else:
        with torch.no_grad():
            model(input_ids=prompt, past_key_values=past, use_cache=True)
    return past


def _layers(model: Any, past: DynamicCache) -> list[Any]:
    layers = list(past.layers)
    unlike = [type(one).__name__ for one in layers if type(one) not in (DynamicLayer, DynamicSlidingWindowLayer)]
    if unlike or not layers:
        raise LayoutError(f"expected layers of attention, full or with a sliding window, found {unlike or 'none'}")
    if not all(layer.is_initialized for layer in layers):
        raise LayoutError("some layers keep no KV in the cache that they are given")
    return layers


def _check_same(model: Any) -> None:
    words = model.get_input_embeddings().weight.shape[0]
    ids = [(10 + 7 * number) % words for number in range(_TOKENS)]
    whole = _computed(model, ids)
    if not _alike(whole, _computed(model, ids, pieces=True), _TOKENS):
        raise LayoutError(
            "the model computes other KV when it is called than in `generate`, which gives it a prompt in pieces with "
            "positions from 0 on: it cannot be cached"
        )
    other = _computed(model, [*ids[:-1], (ids[-1] + 1) % words])
    if not _alike(whole, other, _TOKENS - 1):
        raise LayoutError("KV of a token depends on the tokens behind it: the model looks ahead and cannot be cached")


def _alike(one: DynamicCache, other: DynamicCache, tokens: int) -> bool:
    """The first `tokens`, in each layer and piece. Most of a piece is enough: where experts are chosen, rounding may send a
    token to another one."""
    for mine, its in zip(one.layers, other.layers, strict=True):
        for states, others in ((mine.keys, its.keys), (mine.values, its.values)):
            seen = min(states.shape[2], others.shape[2])  # a window may have dropped some
            states, others = (one[:, :, one.shape[2] - seen :] for one in (states, others))
            apart = _apart(states, others)[: max(0, tokens - (_TOKENS - seen))]
            step = torch.finfo(states.dtype).eps
            if any(
                len(one) and not one.median() <= min(_ROUNDING * step, step**0.5) for one in apart.split(_PIECE_TOKENS)
            ):
                return False
    return True


def _apart(states: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """How far each token's are apart, relative to their length."""
    states, others = (one[0].transpose(0, 1).flatten(1).double() for one in (states, others))
    return (states - others).norm(dim=1) / states.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
