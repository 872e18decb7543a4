"""What the KV of a transformers model looks like, and what it depends on.

The fingerprint has the weights themselves, as they lie in memory (a model that was fine-tuned, merged or quantised is
another one, wherever its files lie), the configuration, the data type, the attention implementation and the version of
transformers. How many heads and numbers there are in which layer, the model is asked: it computes one token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from tiercache.core.layout import Layout
from tiercache.errors import LayoutError
from tiercache.integrations.transformers.parts import SEES_EVERYTHING, LayerKv, parts_of

_FORMAT = "parts of layers; of each layer keys, then values; head, token, number"
_NOT_OF_THE_KV = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
"""Of a configuration: where it lies, and what is known better from the model."""
_CHANGING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings of which the same token gets another key when the text has become longer."""
_HASHING_THREADS = 4
_SAMPLE = 256
"""Numbers of each weight, about, that are looked at to see that it is what it was."""


class ModelKv:
    """Reads all weights once (about a second a GB and core) and computes one token: not for an event loop.

    Raises LayoutError for a model whose KV is not that of its token ids alone, or is kept in another way than by layers of
    plain attention, with or without a window.
    """

    def __init__(self, model: Any, *, chunk_tokens: int = 256) -> None:
        _check(model)
        self.model = model
        with torch.no_grad():
            layers = _layers_after_one_token(model)
        self.dtype = layers[0].keys.dtype
        self.devices = [layer.keys.device for layer in layers]
        self.layers = [_layer_kv(layer, self.dtype) for layer in layers]
        self.parts = parts_of(self.layers, self.dtype.itemsize)
        self._state = _state(model)
        self.layout = Layout(
            type(model).__qualname__,
            chunk_tokens=chunk_tokens,
            bytes_per_token=max(part.bytes_per_token for part in self.parts),
            kv_dtype=str(self.dtype).removeprefix("torch."),
            revision=_digest_of_weights(model),
            layers=len(self.layers),
            kv_heads=max(layer.heads for layer in self.layers),
            head_size=max(layer.key_size for layer in self.layers),
            byte_format=f"{_FORMAT}: {self.layers}",
            engine=f"transformers {transformers.__version__}",
            extra=(("attention", str(model.config._attn_implementation)), ("config", _digest_of_config(model.config))),
        )

    @property
    def chunk_tokens(self) -> int:
        return self.layout.chunk_tokens

    def check_unchanged(self) -> None:
        """Raises LayoutError where weights were written to, exchanged or put into training since, or attention is computed
        in another way. About 10 microseconds a weight.

        Writes that torch does not count (through `.data` or numpy, or to tensors of inference mode) are seen in a sample of
        about 256 numbers a weight. Not seen are such writes to other numbers, such as a few rows of an embedding,
        and those that are taken back before anybody looks: make another ModelKv after them.
        """
        if self.model.training or _state(self.model) != self._state:
            raise LayoutError(
                "the model's weights have changed, or its attention: what is stored is not their KV; make another ModelKv"
            )


def _check(model: Any) -> None:
    text = model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {str(one.get("rope_type")) for one in (rope, *rope.values()) if isinstance(one, dict)}
    if model.config.is_encoder_decoder:
        raise LayoutError("an encoder's input is not in the token ids: only decoders are cached")
    if model.training:
        raise LayoutError(
            "the model is in training, where dropout makes other KV of the same tokens: call model.eval()"
        )
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        raise LayoutError("adapters can be switched without a trace: merge them into the weights first")
    if changing := kinds.intersection(_CHANGING_ROPE):
        raise LayoutError(
            f"with rope_type {min(changing)!r} a prefix has other KV in a longer text: it cannot be cached"
        )


def _layers_after_one_token(model: Any) -> list[Any]:
    past = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model.base_model(input_ids=token, past_key_values=past, use_cache=True)
    layers = list(past.layers)
    unlike = [type(one).__name__ for one in layers if type(one) not in (DynamicLayer, DynamicSlidingWindowLayer)]
    if unlike or not layers:
        raise LayoutError(f"expected layers of attention, full or with a sliding window, found {unlike or 'none'}")
    if not all(layer.is_initialized for layer in layers):
        raise LayoutError("some layers keep no KV in the cache that they are given")
    return layers


def _layer_kv(layer: Any, dtype: torch.dtype) -> LayerKv:
    keys, values = layer.keys, layer.values
    if keys.dtype != dtype or values.dtype != dtype or keys.shape[:-1] != (1, values.shape[1], 1):
        raise LayoutError(
            f"expected keys and values of one token in {dtype}, found {keys.dtype} {tuple(keys.shape)} and "
            f"{values.dtype} {tuple(values.shape)}"
        )
    return LayerKv(keys.shape[1], keys.shape[3], values.shape[3], getattr(layer, "sliding_window", SEES_EVERYTHING))


def _weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and buffers also where they are not saved: the frequencies of rotary embeddings are such."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _state(model: Any) -> int:
    """Another number when a weight was written to, or lies elsewhere, or attention is computed in another way.

    Writes through `.data` or numpy, and to tensors of inference mode, count no version: hence the samples.
    """
    written = []
    samples: dict[tuple[Any, Any], list[torch.Tensor]] = {}
    with torch.no_grad():
        for _, weight in _weights(model):
            written.append((weight.data_ptr(), 0 if weight.is_inference() else weight._version))
            if not weight.is_meta:
                samples.setdefault((weight.dtype, weight.device), []).append(_sample(weight))
        numbers = [torch.cat(alike).view(torch.uint8).cpu().numpy().tobytes() for alike in samples.values()]
    return hash((*written, *numbers, str(model.config._attn_implementation)))


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Every n-th number. An odd n, so that they are not all of one column where rows are a power of two long."""
    step = weight.numel() // _SAMPLE | 1
    if weight.is_contiguous():
        return weight.view(-1)[::step]
    return weight.take(torch.arange(0, weight.numel(), step, device=weight.device))


def _digest_of_weights(model: Any) -> str:
    weights = sorted(_weights(model), key=lambda one: one[0])
    if missing := [name for name, weight in weights if weight.is_meta]:
        raise LayoutError(f"the weights are not in memory and cannot be told from others: {missing[0]}")
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        digests = list(threads.map(_digest_of_weight, (weight for _, weight in weights)))
    named = [(name, digest) for (name, _), digest in zip(weights, digests, strict=True)]
    return hashlib.blake2b(json.dumps(named).encode(), digest_size=16).hexdigest()


def _digest_of_weight(weight: torch.Tensor) -> str:
    memory = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(
        memory, digest_size=16, key=f"{weight.dtype} {tuple(weight.shape)}".encode()[:64]
    ).hexdigest()


def _digest_of_config(config: Any) -> str:
    fields = json.loads(config.to_json_string(use_diff=False))
    kept = {name: value for name, value in fields.items() if name not in _NOT_OF_THE_KV}
    return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=12).hexdigest()
