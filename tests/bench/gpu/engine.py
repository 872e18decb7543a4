"""The model with a prompt, its KV before and after it went through the cache, and the chunks of both."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.bench.gpu.accelerator import Accelerator
from tests.bench.gpu.model import BLOCK_TOKENS, Model, PagedCache, Shape
from tiercache.cache import TierCache
from tiercache.core.layout import Layout
from tiercache.device.paged import PagedChunk, PagedKv


class Engine:
    """The model, two places for KV (before and after), and a prompt."""

    def __init__(self, accelerator: Accelerator, shape: Shape, prompt_tokens: int, chunk_tokens: int) -> None:
        import torch

        self.accelerator = accelerator
        self.shape = shape
        self.chunk_tokens = chunk_tokens
        self.model = Model(shape, accelerator.torch_device)
        self.prompt_tokens = prompt_tokens
        generator = torch.Generator().manual_seed(3)
        self.token_ids = torch.randint(0, shape.vocabulary, (prompt_tokens,), generator=generator)
        self.tokens = self.token_ids.to(accelerator.torch_device)
        self.chunks = (prompt_tokens - 1) // chunk_tokens
        """Number of full chunks without the last token, whose logits have to be computed."""
        blocks = -(-(prompt_tokens + BLOCK_TOKENS) // BLOCK_TOKENS)
        self.before, self.after = self._cache(blocks), self._cache(blocks)
        self.old_blocks, self.new_blocks = self._order(blocks, 1), self._order(blocks, 2)
        self.stored = PagedKv(accelerator.driver, self.before.planes)
        self.loaded = PagedKv(accelerator.driver, self.after.planes)
        self.layout = Layout("bench-llama", chunk_tokens=chunk_tokens, bytes_per_token=shape.kv_bytes_per_token)

    @property
    def cached_tokens(self) -> int:
        return self.chunks * self.chunk_tokens

    @property
    def cached_bytes(self) -> int:
        return self.cached_tokens * self.shape.kv_bytes_per_token

    def keys(self, cache: TierCache) -> list[bytes]:
        return cache.keys(self.token_ids.numpy())[: self.chunks]

    def chunks_of(self, kv: PagedKv, blocks: Any) -> list[PagedChunk]:
        each = self.chunk_tokens // BLOCK_TOKENS
        order = blocks.tolist()
        return [PagedChunk(kv, order[number * each : (number + 1) * each]) for number in range(self.chunks)]

    def prefill(self) -> Any:
        return self.model.forward(self.tokens, 0, self.before, self.old_blocks)

    def rest(self, cache: PagedCache, blocks: Any) -> Any:
        """Logits after the prompt, when its cached tokens are in place."""
        return self.model.forward(self.tokens[self.cached_tokens :], self.cached_tokens, cache, blocks)

    def same_kv(self) -> bool:
        """Whether the cached tokens have the same KV in both places, position by position."""
        import torch

        return all(
            torch.equal(
                self.before.read(layer, self.old_blocks, self.cached_tokens),
                self.after.read(layer, self.new_blocks, self.cached_tokens),
            )
            for layer in range(self.shape.layers)
        )

    def _cache(self, blocks: int) -> PagedCache:
        import torch

        shape = PagedCache.shape_of(self.shape, blocks)
        tensors = [self.accelerator.empty(shape, torch.bfloat16) for _ in range(self.shape.layers)]
        for tensor in tensors:
            tensor.zero_()
        return PagedCache(tensors)

    def _order(self, blocks: int, seed: int) -> Any:
        import torch

        order = np.random.default_rng(seed).permutation(blocks)
        return torch.from_numpy(order).to(self.accelerator.torch_device)
