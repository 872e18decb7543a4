"""A Llama-shaped model in plain torch with a paged KV cache: enough to fill one, and to see in the logits what is in it.

Random weights, so its words mean nothing; its arithmetic, its shapes and its KV are those of the real one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    feed_forward: int
    vocabulary: int
    rope_theta: float = 500_000.0

    @property
    def kv_bytes_per_token(self) -> int:
        """bfloat16."""
        return self.layers * 2 * self.kv_heads * self.head * 2


LLAMA_31_8B = Shape(32, 4096, 32, 8, 128, 14336, 128_256)
TINY = Shape(2, 64, 4, 2, 16, 128, 256)


class PagedCache:
    """KV of `blocks` blocks: for each layer (2, blocks, block tokens, KV heads, head)."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers

    @property
    def planes(self) -> list[Any]:
        """K and V of each layer, blocks first."""
        return [plane for layer in self.layers for plane in layer]

    @staticmethod
    def shape_of(shape: Shape, blocks: int) -> tuple[int, ...]:
        return (2, blocks, BLOCK_TOKENS, shape.kv_heads, shape.head)

    def write(self, layer: int, blocks: Any, first: int, keys: Any, values: Any) -> None:
        """`keys` and `values` (tokens, KV heads, head), for positions from `first` on of a sequence in `blocks`."""
        import torch

        position = torch.arange(first, first + keys.shape[0], device=keys.device)
        place = blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS
        self.layers[layer][0][place] = keys
        self.layers[layer][1][place] = values

    def read(self, layer: int, blocks: Any, tokens: int) -> Any:
        """Keys and values of the first `tokens` positions: (2, tokens, KV heads, head)."""
        used = blocks[: -(-tokens // BLOCK_TOKENS)]
        return self.layers[layer][:, used].flatten(1, 2)[:, :tokens]


class Model:
    """Weights are normal with a deviation that keeps activations near one, from `seed`; bfloat16."""

    def __init__(self, shape: Shape, device: str, seed: int = 1) -> None:
        import torch

        self.shape = shape
        self.device = device
        generator = torch.Generator(device).manual_seed(seed)

        def weight(rows: int, columns: int) -> Any:
            values = torch.empty((rows, columns), dtype=torch.bfloat16, device=device)
            return values.normal_(std=columns**-0.5, generator=generator)

        width, kv_width = shape.heads * shape.head, shape.kv_heads * shape.head
        self.embedding = weight(shape.vocabulary, shape.hidden)
        self.embedding *= shape.hidden**0.5
        self.output = weight(shape.vocabulary, shape.hidden)
        self.layers = [
            (
                weight(width + 2 * kv_width, shape.hidden),
                weight(shape.hidden, width),
                weight(2 * shape.feed_forward, shape.hidden),
                weight(shape.hidden, shape.feed_forward),
            )
            for _ in range(shape.layers)
        ]
        frequency = torch.arange(0, shape.head, 2, device=device, dtype=torch.float32) / shape.head
        self._frequency = shape.rope_theta**-frequency

    def forward(self, tokens: Any, first: int, cache: PagedCache, blocks: Any) -> Any:
        """Logits (vocabulary,) after `tokens` (int64 vector), the positions from `first` on; those before are in `cache`.

        `blocks` (int64 vector on the device): where the sequence lies. KV of `tokens` is written there.
        """
        import torch
        from torch.nn import functional

        shape, count = self.shape, tokens.shape[0]
        context = first + count
        angle = torch.arange(first, context, device=self.device).outer(self._frequency)
        turn = angle.cos()[:, None, :], angle.sin()[:, None, :]
        mask = None
        if first and count > 1:
            mask = torch.ones((count, context), dtype=torch.bool, device=self.device).tril(diagonal=first)
        with torch.inference_mode():
            hidden = self.embedding[tokens]
            for number, (qkv, attended, up_and_gate, down) in enumerate(self.layers):
                parts = (_normed(hidden) @ qkv.T).view(count, -1, shape.head)
                queries, keys, values = parts.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
                cache.write(number, blocks, first, _turned(keys, turn), values)
                both = cache.read(number, blocks, context).repeat_interleave(shape.heads // shape.kv_heads, dim=2)
                mixed = functional.scaled_dot_product_attention(
                    _turned(queries, turn).transpose(0, 1)[None],
                    both[0].transpose(0, 1)[None],
                    both[1].transpose(0, 1)[None],
                    attn_mask=mask,
                    is_causal=first == 0 and count > 1,
                )
                hidden = hidden + mixed[0].transpose(0, 1).reshape(count, -1) @ attended.T
                up, gate = (_normed(hidden) @ up_and_gate.T).chunk(2, dim=1)
                hidden = hidden + (functional.silu(gate) * up) @ down.T
            return (_normed(hidden[-1:]) @ self.output.T)[0].float()


def _normed(hidden: Any) -> Any:
    from torch.nn import functional

    return functional.rms_norm(hidden, (hidden.shape[-1],), eps=1e-5)


def _turned(heads: Any, turn: tuple[Any, Any]) -> Any:
    """Rotary position embedding, halves paired."""
    import torch

    cosine, sine = turn
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(heads.dtype)
