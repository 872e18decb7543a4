"""The KV of a transformers model: its shape, and its fingerprint.

The fingerprint covers the weights as they lie in memory (a fine-tuned, merged or quantised model is a different model,
wherever its files are), the numbers of its modules, the configuration, the data type, the implementations of attention
and experts, and the version of transformers. The number and size of heads by layer come from the model itself, which
computes a few tokens.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from tiercache.core.layout import Layout
from tiercache.errors import LayoutError
from tiercache.integrations.transformers.model_state import (
    check_modules,
    check_weights,
    digest_of_config,
    digest_of_weights,
    implementations,
    state_of,
)
from tiercache.integrations.transformers.parts import SEES_EVERYTHING, LayerKv, parts_of

_FORMAT = "parts of layers; of each layer keys, then values; head, token, number"
_CHANGING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that change a token's key when the text becomes longer."""
_TOKENS = 12
_PIECE_TOKENS = 4
_ROUNDING = 64
"""Largest relative difference of a token's KV between kernels of different shapes, in epsilons of the type.

The square root of epsilon is a further limit.
"""


class ModelKv:
    """Shape and fingerprint of a model's KV.

    Reads all weights once (about a second per GB and core), so do not make it on an event loop. Raises LayoutError for
    a model whose KV depends on more than token ids, or on how a prompt is divided; that keeps KV in anything but layers
    of plain attention, with or without a window; or that has hooks or packed weights, which could change the KV without
    a trace. A deep copy returns the same object.
    """

    def __init__(self, model: Any, *, chunk_tokens: int = 256) -> None:
        _check(model)
        self.model = model
        layers = probe(model)
        self.dtype = layers[0].keys.dtype
        self.devices = [layer.keys.device for layer in layers]
        self.layers = [_layer_kv(layer, self.dtype) for layer in layers]
        self.parts = parts_of(self.layers, self.dtype.itemsize)
        self._state = state_of(model)
        self.layout = Layout(
            type(model).__qualname__,
            chunk_tokens=chunk_tokens,
            bytes_per_token=max(part.bytes_per_token for part in self.parts),
            kv_dtype=str(self.dtype).removeprefix("torch."),
            revision=digest_of_weights(model),
            layers=len(self.layers),
            kv_heads=max(layer.heads for layer in self.layers),
            head_size=max(layer.key_size for layer in self.layers),
            byte_format=f"{_FORMAT}: {self.layers}",
            engine=f"transformers {transformers.__version__}",
            extra=(("implementations", implementations(model)), ("config", digest_of_config(model))),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelKv:
        """Return itself, since a copy of a cache belongs to the same model."""
        return self

    @property
    def chunk_tokens(self) -> int:
        return self.layout.chunk_tokens

    def check_unchanged(self) -> None:
        """Raise LayoutError if the model has changed: weights, training mode, hooks, configurations, public numbers of
        modules.

        Takes about 20 microseconds per weight. Writes that torch does not count (through `.data` or numpy, or to
        tensors of inference mode) are detected in a sample of about 256 numbers per weight. Such writes to other
        numbers, such as a few rows of an embedding, and writes that are undone before the next check are not detected:
        make another ModelKv after them.
        """
        check_modules(self.model)
        if state_of(self.model) != self._state:
            raise LayoutError(
                "the model's weights have changed, or its attention, numbers or configuration: what is stored is not "
                "their KV; make another ModelKv"
            )


def _check(model: Any) -> None:
    text = model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {str(one.get("rope_type")) for one in (rope, *rope.values()) if isinstance(one, dict)}
    if model.config.is_encoder_decoder:
        raise LayoutError("an encoder's input is not in the token ids: only decoders are cached")
    if torch.is_autocast_enabled(model.device.type):
        raise LayoutError(
            "under autocast the model computes KV of another type than its own: leave it to make a ModelKv"
        )
    check_modules(model)
    check_weights(model)
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        raise LayoutError("adapters can be switched without a trace: merge them into the weights first")
    if changing := kinds.intersection(_CHANGING_ROPE):
        raise LayoutError(
            f"with rope_type {min(changing)!r} a prefix has other KV in a longer text: it cannot be cached"
        )


def _layer_kv(layer: Any, dtype: torch.dtype) -> LayerKv:
    keys, values = layer.keys, layer.values
    if keys.dtype != dtype or values.dtype != dtype or keys.shape[:-1] != (1, values.shape[1], 1):
        raise LayoutError(
            f"expected keys and values of one token in {dtype}, found {keys.dtype} {tuple(keys.shape)} and "
            f"{values.dtype} {tuple(values.shape)}"
        )
    return LayerKv(keys.shape[1], keys.shape[3], values.shape[3], getattr(layer, "sliding_window", SEES_EVERYTHING))


def probe(model: Any) -> list[Any]:
    """Return the layers of a cache after one token. Leaves nothing in the model.

    Raises LayoutError if the model cannot be called with token ids; if it keeps KV in anything but layers of plain
    attention; and if KV depends on later tokens, on how a prompt is divided, or on the use of `generate`.
    """
    try:
        layers = _layers(model, _computed(model, [0]))
        _check_same(model)
    except LayoutError:
        raise
    except Exception as error:  # errors of models without such a cache, or with other required inputs, have any type
        raise LayoutError(
            f"{type(model).__name__} does not compute KV of token ids alone: {type(error).__name__}: {error}"
        ) from error
    return layers


def _computed(model: Any, ids: list[int], pieces: bool = False) -> DynamicCache:
    """Compute with the called model, or in pieces as `generate` does."""
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
    """Return True if the KV of the first `tokens` tokens is equal in each layer and piece, except for rounding.

    The median of a piece decides, since rounding may change the choice of experts for a token.
    """
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
    """Return the difference of each token's states, relative to their length."""
    states, others = (one[0].transpose(0, 1).flatten(1).double() for one in (states, others))
    return (states - others).norm(dim=1) / states.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)


def _accepts(model: Any, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


def positions(model: Any, tokens: int) -> dict[str, torch.Tensor]:
    """Return the arguments of `generate` that give the first token position 0, and each following token the next
    position.

    A model may choose others by default: Qwen2-VL continues from the remembered positions of an earlier image.
    """
    return {"position_ids": torch.arange(tokens, device=model.device)[None]} if _accepts(model, "position_ids") else {}


def prefill(model: Any, past: Any, prompt: torch.Tensor, end: int) -> None:
    """Compute the tokens of `prompt` after those in `past`, up to `end`, as `generate` would for a prompt that ends
    there.

    Computes only the last token's logits if the model supports it.
    """
    ids = prompt[:, :end]
    known = {**positions(model, end), **({"logits_to_keep": 1} if _accepts(model, "logits_to_keep") else {})}
    if not _accepts(model, "attention_mask"):
        known["attention_mask"] = torch.ones_like(ids)  # `generate` drops a mask that hides nothing, but not here
    new_tokens = end - past.get_seq_length()
    with torch.no_grad():
        inputs = model.prepare_inputs_for_generation(
            ids, next_sequence_length=new_tokens, past_key_values=past, use_cache=True, is_first_iteration=True, **known
        )
        model(**inputs, return_dict=True)
