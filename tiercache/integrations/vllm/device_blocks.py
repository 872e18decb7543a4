"""The engine's paged KV in device memory as bytes.

vLLM 0.32 views every layer's KV as (kernel blocks, heads, tokens, K and V of a token), whatever the order in memory is
(`vllm/v1/kv_cache_layout.py`; FlashAttention, FlashInfer and Triton attention all have it so). A block that the engine's
manager hands out is one kernel block or several behind each other. In memory the order is one of

- LBNHC ("NHD"), LBHNC ("HND"), BLNHC, BLHNC: a layer's part of a block is one run of bytes, and all layers' parts lie side
  by side (B first) or each layer has a region of its own (L first);
- LHBNC, BHLNC: each head's part of a block is one run.

So each layer is one *plane*, or one for each head: runs of `run_bytes` at equal distances, one a block. What lies inside a
run is the engine's business and part of the layout's fingerprint. A chunk's payload is (planes, blocks, run bytes),
contiguous; for the copies (`PagedKv`) a block is one "token".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiercache.device.driver import Driver
from tiercache.device.paged import PagedKv
from tiercache.errors import LayoutError


@dataclass(frozen=True)
class _Runs:
    """Where the bytes of a layer lie; bytes and distances in bytes. One run a block, or one a head and block."""

    run_bytes: int
    block_stride: int
    heads: int = 1
    head_stride: int = 0


class DeviceKvBlocks:
    """All layers' KV tensors of one worker. Raises LayoutError for an arrangement that was not verified.

    Expected of each tensor: shape (kernel blocks, heads, tokens, `content_bytes`), in memory of `driver`, in one of the
    orders that the module names. `blocks` and `block_tokens` are those of the engine's block manager. Of recurrent states
    there is one in the place of the tokens (`states`).
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
        self._runs = _find_runs(first_name, first, blocks)
        self.block_bytes = self._runs.heads * self._runs.run_bytes
        self._inside = _inside(first, blocks)
        planes = [plane for tensor in tensors.values() for plane in _planes(tensor, blocks, self._runs)]
        self.kv = PagedKv(driver, planes, "MLA")

    @property
    def bytes_per_block(self) -> int:
        """Of one block over all layers."""
        return self.layers * self.block_bytes

    @property
    def bytes_per_token(self) -> int:
        return -(-self.bytes_per_block // self.block_tokens)

    def describe(self) -> str:
        """The byte format, for the layout's fingerprint. Where the blocks lie is no part of it, only what is inside them."""
        return (
            f"vllm-device-blocks(planes,blocks,bytes) runs={self._runs.heads}x{self._runs.run_bytes} "
            f"inside={self._inside} dtype={self.dtype}"
        )

    def close(self) -> None:
        """Idempotent. No copy may be under way."""
        self.kv.close()


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


def _find_runs(name: str, tensor: Any, blocks: int) -> _Runs:
    """The runs of bytes that make a block of a layer."""
    size = tensor.element_size()
    split = tensor.shape[0] // blocks
    sizes = dict(zip(("split", "heads", "tokens"), (split, *tensor.shape[1:3]), strict=True))
    strides = dict(zip(sizes, (stride * size for stride in tensor.stride()[:3]), strict=True))
    block_stride = split * strides["split"]
    run_bytes = tensor.shape[3] * size
    outside = [dimension for dimension, count in sizes.items() if count > 1]
    while outside:
        nearest = min(outside, key=strides.__getitem__)
        if strides[nearest] != run_bytes:
            break
        run_bytes *= sizes[nearest]
        outside.remove(nearest)
    known = tensor.stride(3) == 1
    if known and not outside and block_stride >= run_bytes:
        return _Runs(run_bytes, block_stride)
    heads, head_stride = sizes["heads"], strides["heads"]
    heads_outside = head_stride >= (blocks - 1) * block_stride + run_bytes and block_stride >= run_bytes
    blocks_outside = head_stride >= run_bytes and block_stride >= (heads - 1) * head_stride + run_bytes
    if known and outside == ["heads"] and split == 1 and (heads_outside or blocks_outside):
        return _Runs(run_bytes, block_stride, heads, head_stride)
    raise LayoutError(
        f"KV of layer {name}: expected blocks, or heads of blocks, that are one run of bytes each and do not overlap, found "
        f"shape {tuple(tensor.shape)} with strides {tuple(tensor.stride())} for {blocks} blocks"
    )


def _planes(tensor: Any, blocks: int, runs: _Runs) -> list[Any]:
    """Views uint8[blocks, 1, run bytes] that together cover the layer."""
    import torch

    memory = tensor.view(torch.uint8)
    shape, strides = (blocks, 1, runs.run_bytes), (runs.block_stride, runs.run_bytes, 1)
    return [
        memory.as_strided(shape, strides, memory.storage_offset() + head * runs.head_stride)
        for head in range(runs.heads)
    ]


def _inside(tensor: Any, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and order in memory (the widest stride first) of what is inside a block."""
    shape = (tensor.shape[0] // blocks, *tensor.shape[1:])
    order = sorted(range(len(shape)), key=lambda dimension: (-tensor.stride(dimension), dimension))
    return shape, tuple(dimension for dimension in order if shape[dimension] > 1)


def _kind(tensor: Any) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch.")
