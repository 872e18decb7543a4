"""The `transformers.Cache` that a model fills, starting from a hit; new KV is stored from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from tiercache.core.keys import ChunkKey
from tiercache.errors import LayoutError
from tiercache.integrations.transformers.model_kv import ModelKv
from tiercache.integrations.transformers.parts import Part


class TieredCache(DynamicCache):  # type: ignore[misc]
    """The KV of a conversation, for `generate` and for a model's `forward`. `PrefixCache.load` makes it.

    It also keeps the KV that has left a sliding window since the hit, so it uses as much memory as a cache of full
    attention.
    """

    def __init__(self, kv: ModelKv, salt: str) -> None:
        super().__init__(config=kv.model.config)
        self.layers: list[Any] = [
            _WindowLayer(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else layer
            for layer in self.layers
        ]
        self.kv = kv
        self.salt = salt
        self.hit_tokens = 0
        """Tokens loaded from the cache."""
        self.hit_by_tier: dict[str, int] = {}
        """Loaded tokens by the tier in which the lookup found them."""
        self.stored_keys: list[ChunkKey] = []
        """Keys of the chunks that are known to be stored: those of the hit and of later stores."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if key_states.shape[0] != 1:
            raise LayoutError(f"expected the tokens of one conversation, found a batch of {key_states.shape[0]}")
        if torch.is_autocast_enabled(key_states.device.type):
            raise LayoutError(
                "under autocast the same tokens get other KV, and no key says so: convert the model instead"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def take(self, tensors: Sequence[tuple[torch.Tensor, torch.Tensor]], keys: Sequence[ChunkKey]) -> None:
        """Start with the hit `keys`. `tensors` are the keys and values of each layer, for the tokens that it needs.

        Copies to the layers' devices, so do not call it on an event loop.
        """
        self.stored_keys = list(keys)
        self.hit_tokens = len(keys) * self.kv.chunk_tokens
        for layer, device, (key_states, value_states) in zip(self.layers, self.kv.devices, tensors, strict=True):
            key_states, value_states = key_states.to(device), value_states.to(device)
            layer.lazy_initialization(key_states, value_states)
            if isinstance(layer, _WindowLayer):
                layer.begin_behind(self.hit_tokens, key_states, value_states)
            else:
                layer.keys, layer.values = key_states, value_states

    def fill(self, part: Part, chunk: int, slot: np.ndarray) -> None:
        """Copy a chunk of computed KV into `slot`."""
        memory = torch.from_numpy(slot).view(self.kv.dtype)
        begin, tokens = chunk * self.kv.chunk_tokens, self.kv.chunk_tokens
        offset = 0
        for number in part.layers:
            for states in _computed(self.layers[number], begin, begin + tokens):
                length = states.numel()
                memory[offset : offset + length].view(states.shape).copy_(states)
                offset += length


class _WindowLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A sliding window layer that also keeps all KV since its start."""

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self._forget()

    def _forget(self) -> None:
        self._first_token = 0
        self._kept: list[torch.Tensor] = []
        """Keys and values since the start; the tensors grow by doubling and are longer than their contents."""

    def begin_behind(self, tokens: int, key_states: Any, value_states: Any) -> None:
        """Start after `tokens` tokens, the last of which have these states."""
        self.cumulative_length = self._first_token = tokens
        self.keys = key_states[:, :, -self.sliding_window + 1 :, :]
        self.values = value_states[:, :, -self.sliding_window + 1 :, :]

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        begin = self.cumulative_length - self._first_token
        states = super().update(key_states, value_states, *args, **kwargs)
        end = self.cumulative_length - self._first_token
        for position, new in enumerate((key_states, value_states)):
            if len(self._kept) <= position:
                self._kept.append(new[:, :, :0, :])
            if self._kept[position].shape[2] < end:
                self._kept[position] = _longer(self._kept[position], max(end, 2 * begin), new)
            self._kept[position][:, :, begin:end, :] = new
        return states

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.cumulative_length < self._first_token:
            raise LayoutError("what came from the cache cannot be cropped from a sliding window: load a shorter prefix")

    def reset(self) -> None:
        super().reset()
        self._forget()

    def kept(self, begin: int, end: int) -> list[torch.Tensor]:
        """Return keys and values of these tokens."""
        assert self._first_token <= begin <= end <= self.cumulative_length
        return [states[:, :, begin - self._first_token : end - self._first_token, :] for states in self._kept]


def _longer(states: torch.Tensor, tokens: int, like: torch.Tensor) -> torch.Tensor:
    longer = like.new_empty((*like.shape[:2], tokens, like.shape[3]))
    longer[:, :, : states.shape[2], :] = states
    return longer


def _computed(layer: Any, begin: int, end: int) -> list[torch.Tensor]:
    """Return keys and values of these tokens."""
    if isinstance(layer, _WindowLayer):
        return layer.kept(begin, end)
    return [states[:, :, begin:end, :] for states in (layer.keys, layer.values)]


class Landing:
    """Host memory for loading a hit: for each layer as many chunks as it needs."""

    def __init__(self, kv: ModelKv, chunks: int) -> None:
        self._kv = kv
        self._first = {number: part.first_chunk(chunks, kv.chunk_tokens) for part in kv.parts for number in part.layers}
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, layer in enumerate(kv.layers):
            shape = 1, layer.heads, (chunks - self._first[number]) * kv.chunk_tokens
            keys, values = (torch.empty((*shape, size), dtype=kv.dtype) for size in (layer.key_size, layer.value_size))
            self.tensors.append((keys, values))

    def land(self, part: Part, chunk: int, payload: np.ndarray) -> None:
        """Copy a chunk to the memory of its layers. Raises ValueError for a wrong length."""
        tokens = self._kv.chunk_tokens
        if payload.nbytes != part.bytes_per_token * tokens:
            raise ValueError(f"expected a chunk of {part.bytes_per_token * tokens} bytes, found {payload.nbytes}")
        offset = 0
        for number in part.layers:
            begin = (chunk - self._first[number]) * tokens
            for states in self.tensors[number]:
                place = states.view(torch.uint8).numpy()[0, :, begin : begin + tokens, :]
                np.copyto(place, payload[offset : offset + place.size].reshape(place.shape))
                offset += place.size
