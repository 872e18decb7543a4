"""The engine's paged KV in device memory as bytes.

vLLM 0.32 views every layer's KV as (kernel blocks, heads, tokens, K and V of a token), whatever the order in memory is
(`vllm/v1/kv_cache_layout.py`; FlashAttention, FlashInfer and Triton attention all have it so). A block that the engine's
manager hands out is one kernel block or several behind each other. Each layer is one plane of `PagedKv`, whatever its order:
what lies inside a block is the engine's business and part of the layout's fingerprint. A chunk's payload is
(blocks, layers, block bytes), contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercache.device.driver import Driver
from tiercache.device.paged import PagedKv
from tiercache.errors import LayoutError


class DeviceKvBlocks:
    """All layers' KV tensors of one worker. Raises LayoutError for a shape that was not verified, or blocks that overlap.

    Expected of each tensor: shape (kernel blocks, heads, tokens, `content_bytes`), in memory of `driver`. `blocks` and
    `block_tokens` are those of the engine's block manager. Of recurrent states there is one in the place of the tokens
    (`states`).
    """

    def __init__(
        self,
        driver: Driver,
        tensors: Mapping[str, Any],
        *,
        blocks: int,
        heads: int,
        block_tokens: int,
        content_bytes: int,
        states: bool = False,
    ) -> None:
        if not tensors:
            raise LayoutError("the engine registered no KV tensors")
        first_name, first = next(iter(tensors.items()))
        self.driver = driver
        self.dtype = str(first.dtype).removeprefix("torch.")
        self.layers = len(tensors)
        self.blocks = blocks
        self.block_tokens = block_tokens
        _check_shape(first_name, first, blocks, heads, 1 if states else block_tokens, content_bytes)
        for name, tensor in tensors.items():
            if not driver.owns(tensor):
                raise LayoutError(f"KV of layer {name}: expected memory of {driver.name}, found device {tensor.device}")
            if _kind(tensor) != _kind(first):
                raise LayoutError(
                    f"KV of layer {name}: expected shape, strides and dtype of {first_name} {_kind(first)}, found "
                    f"{_kind(tensor)}; models with unlike layers are not supported"
                )
        try:
            self.kv = PagedKv(driver, list(tensors.values()), blocks)
        except LayoutError as error:
            raise LayoutError(f"KV of layer {first_name}: {error}") from error
        self.bytes_per_block: int = self.kv.block_bytes
        """The bytes of one block over all layers."""

    @property
    def bytes_per_token(self) -> int:
        return -(-self.bytes_per_block // self.block_tokens)

    def describe(self) -> str:
        """Return the byte format, for the layout's fingerprint. Where the blocks lie is no part of it."""
        return f"vllm-device-{self.kv.describe()}"


def _check_shape(name: str, tensor: Any, blocks: int, heads: int, block_tokens: int, content_bytes: int) -> None:
    shape, size = tuple(tensor.shape), tensor.element_size()
    split = shape[0] // blocks if len(shape) == 4 and blocks > 0 else 0
    whole = split > 0 and block_tokens % split == 0 and content_bytes % size == 0
    if not whole or shape != (blocks * split, heads, block_tokens // split, content_bytes // size):
        raise LayoutError(
            f"KV of layer {name}: expected shape (blocks, heads, tokens, K and V of a token) with {blocks} blocks of "
            f"{block_tokens} tokens (or equal parts of them), {heads} heads and {content_bytes} bytes, as vLLM 0.32 has "
            f"it on CUDA, found {shape} of {size} bytes each; this layout was not verified, so its bytes are not touched"
        )


def _kind(tensor: Any) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch.")
