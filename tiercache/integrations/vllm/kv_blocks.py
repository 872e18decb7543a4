"""The engine's paged KV as bytes, and the copies between its blocks and contiguous chunks.

Blocks move as opaque bytes: what lies inside one (on CPU a K half and a V half per head) is the engine's business and part
of the layout's fingerprint. A chunk's payload is (layers, blocks, block bytes), contiguous.

On vLLM's CPU platform all layers lie in one storage at equal distances, (layers, blocks, block bytes) with strides, so one
`numpy.copyto` moves a run of consecutive blocks of all layers: few, large calls that release the GIL. Many small copies on
a thread beside the engine's took up to 50 times longer (the GIL convoy).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tiercache.errors import LayoutError


class KvBlocks:
    """All layers' KV tensors of one worker. Raises LayoutError for an arrangement that was not verified.

    Expected of each tensor: shape (blocks, heads, block_tokens, head_size + head_size_v), dense, in host memory. By
    default V is as wide as K; MLA's latents are no two of them. Of recurrent states: (blocks, heads, 1, `state_bytes`), with
    room behind each block. With `part` they are views of a part of the heads.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        *,
        blocks: int,
        heads: int,
        block_tokens: int,
        head_size: int = 0,
        head_size_v: int | None = None,
        state_bytes: int | None = None,
        part: bool = False,
    ) -> None:
        if not tensors:
            raise LayoutError("the engine registered no KV tensors")
        first_name, first = next(iter(tensors.items()))
        self.shape = tuple(first.shape)
        self.strides = tuple(first.stride())
        self.dtype = str(first.dtype).removeprefix("torch.")
        self.layers = len(tensors)
        self.block_tokens = block_tokens
        width = head_size + (head_size if head_size_v is None else head_size_v)
        inside = (heads, block_tokens, width) if state_bytes is None else (heads, 1, state_bytes)
        self._check(first_name, first, (blocks, *inside), padded=part or state_bytes is not None)
        self._part = part
        for name, tensor in tensors.items():
            found = (tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch."))
            if found != (self.shape, self.strides, self.dtype):
                raise LayoutError(
                    f"KV of layer {name}: expected shape, strides and dtype of {first_name} "
                    f"{(self.shape, self.strides, self.dtype)}, found {found}; models with unlike layers are not supported"
                )
        self.blocks = self.shape[0]
        self.block_bytes: int = math.prod(inside) * first.element_size()
        stride = self.strides[0] * first.element_size()
        self._planes = _planes(list(tensors.values()), self.blocks, self.block_bytes, stride)

    @property
    def bytes_per_block(self) -> int:
        """Of one block over all layers."""
        return self.layers * self.block_bytes

    @property
    def bytes_per_token(self) -> int:
        return -(-self.bytes_per_block // self.block_tokens)

    def describe(self) -> str:
        """The byte format, for the layout's fingerprint. Of a part it does not say how far apart blocks lie."""
        if self._part:
            return f"vllm-blocks(layers,blocks,bytes) part={self.shape[1:]} dtype={self.dtype}"
        return f"vllm-blocks(layers,blocks,bytes) shape={self.shape[1:]} strides={self.strides} dtype={self.dtype}"

    def gather(self, blocks: Sequence[int], payload: np.ndarray) -> None:
        """Copy `blocks` of all layers into `payload` (uint8[layers * len(blocks) * block_bytes])."""
        chunk = payload.reshape(self.layers, len(blocks), self.block_bytes)
        for start, stop, block in _runs(blocks):
            layer = 0
            for plane in self._planes:
                part = plane[:, block : block + stop - start]
                np.copyto(chunk[layer : layer + len(plane), start:stop], part)
                layer += len(plane)

    def scatter(self, payload: np.ndarray, chunk_blocks: int, skip: int, blocks: Sequence[int]) -> None:
        """Copy blocks `skip` .. `skip + len(blocks)` of a chunk of `chunk_blocks` blocks to `blocks` of all layers.

        Raises LayoutError when the payload is not that long.
        """
        if payload.nbytes != chunk_blocks * self.bytes_per_block:
            raise LayoutError(f"chunk: expected {chunk_blocks * self.bytes_per_block} bytes, found {payload.nbytes}")
        chunk = payload.reshape(self.layers, chunk_blocks, self.block_bytes)
        for start, stop, block in _runs(blocks):
            layer = 0
            for plane in self._planes:
                part = chunk[layer : layer + len(plane), skip + start : skip + stop]
                np.copyto(plane[:, block : block + stop - start], part)
                layer += len(plane)

    @staticmethod
    def _check(name: str, tensor: Any, expected: tuple[int, ...], *, padded: bool) -> None:
        if str(tensor.device) != "cpu":
            raise LayoutError(f"KV of layer {name}: expected memory of the CPU platform, found device {tensor.device}")
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        if shape != expected:
            raise LayoutError(
                f"KV of layer {name}: expected shape {expected} (blocks, heads, tokens, K and V of a head) as vLLM 0.32 has "
                f"it on CPU, found {shape}; this layout was not verified, so its bytes are not touched"
            )
        dense = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
        # How far the next one would be does not matter where there is only one, as with MLA's heads.
        inside = list(zip(shape, strides, dense, strict=True))[padded:]
        if any(size > 1 and found != stride for size, found, stride in inside) or strides[0] < dense[0]:
            raise LayoutError(f"KV of layer {name}: expected dense blocks with strides {dense}, found {strides}")


def _planes(tensors: list[Any], blocks: int, block_bytes: int, stride: int) -> list[np.ndarray]:
    """uint8 views (layers, blocks, block bytes) that together cover all layers: one where they lie at equal distances in
    one storage, else one a layer."""
    starts = [tensor.data_ptr() for tensor in tensors]
    distance = starts[1] - starts[0] if len(starts) > 1 else 0
    evenly = all(after - before == distance for before, after in itertools.pairwise(starts))
    together = len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    if together and evenly and distance >= 0:
        memory = _bytes_of(tensors[0])
        shape, strides = (len(tensors), blocks, block_bytes), (distance, stride, 1)
        return [np.lib.stride_tricks.as_strided(memory, shape, strides)]
    return [
        np.lib.stride_tricks.as_strided(_bytes_of(tensor), (1, blocks, block_bytes), (0, stride, 1))
        for tensor in tensors
    ]


def _bytes_of(tensor: Any) -> np.ndarray:
    """The tensor's storage from its first element on."""
    import torch

    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    view: np.ndarray = whole.numpy()[tensor.storage_offset() * tensor.element_size() :]
    return view


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, stop, first block id) of the runs of consecutive ids."""
    start = 0
    for position in range(1, len(blocks) + 1):
        if position == len(blocks) or blocks[position] != blocks[position - 1] + 1:
            yield start, position, blocks[start]
            start = position
