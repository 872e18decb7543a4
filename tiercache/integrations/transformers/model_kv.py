"""What the KV of a transformers model looks like, and what it depends on.

The fingerprint has the weights themselves, as they lie in memory (a model that was fine-tuned, merged or quantised is
another one, wherever its files lie), the numbers of its modules, the configuration, the data type, the implementations of
attention and experts and the version of transformers. How many heads and numbers there are in which layer, the model is
asked: it computes a few tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

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
from tiercache.integrations.transformers.probing import probe

_FORMAT = "parts of layers; of each layer keys, then values; head, token, number"
_CHANGING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings of which the same token gets another key when the text has become longer."""


class ModelKv:
    """Reads all weights once (about a second a GB and core) and computes a few dozen tokens: not for an event loop.

    Raises LayoutError for a model whose KV is not that of its token ids alone, depends on how a prompt is divided, or is
    kept in another way than by layers of plain attention, with or without a window; and for one with hooks or packed
    weights, which could change it without a trace. A deep copy of it is itself.
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
        """Itself: a copy of a cache belongs to the same model."""
        return self

    @property
    def chunk_tokens(self) -> int:
        return self.layout.chunk_tokens

    def check_unchanged(self) -> None:
        """Raises LayoutError where weights were written to, exchanged or put into training since, got a hook, or a
        configuration or a public number of a module is another one. About 20 microseconds a weight.

        Writes that torch does not count (through `.data` or numpy, or to tensors of inference mode) are seen in a sample of
        about 256 numbers a weight. Not seen are such writes to other numbers, such as a few rows of an embedding,
        and those that are taken back before anybody looks: make another ModelKv after them.
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
