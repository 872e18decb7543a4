"""Copies between an engine's paged KV blocks and contiguous chunks.

A *plane* is K or V (or MLA's latent vectors) of one layer, a strided array (blocks, block tokens, heads, row bytes) in the
device's memory, whatever order the engine keeps it in (NHD, HND). A chunk is (planes, tokens, heads, row bytes), contiguous:
tokens before heads, so that a part of a block, or of a chunk, is a range of tokens in every plane.

Two ways do the same: one kernel for the whole chunk (`kernels.cu`), and, where no kernel can be compiled, one copy for each
run of bytes that lie together. `tiercache/testing/paged.py` says in plain torch what both must do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiercache.device.driver import DeviceError, Driver, Span, Stream
from tiercache.errors import LayoutError

LAYOUTS = ("NHD", "HND", "MLA")
_BLOCKS_A_LAUNCH = 896
_WORDS = (16, 8, 4, 2, 1)
_WORDS_A_THREAD = 4


@dataclass(frozen=True)
class Geometry:
    """Where rows lie in a plane; strides in bytes. `rows` of `row_bytes` each are contiguous."""

    blocks: int
    block_tokens: int
    heads: int
    row_bytes: int
    block_stride: int
    token_stride: int
    head_stride: int

    @property
    def token_bytes(self) -> int:
        """Of one token in one plane."""
        return self.heads * self.row_bytes


_given_up: list[tuple[Span, np.ndarray]] = []
"""Memory of uploads of which a driver did not say that they have ended."""


class PagedKv:
    """The KV tensors of an engine's layers.

    `tensors`, one a layer, all with the same shape, strides and dtype (any dtype, fp8 included), in device memory:

    - NHD: (2, blocks, block_tokens, heads, head_size) or (blocks, 2, block_tokens, heads, head_size)
    - HND: (2, blocks, heads, block_tokens, head_size) or (blocks, 2, heads, block_tokens, head_size)
    - MLA: (blocks, block_tokens, latent_size)

    `planes_first` says where the 2 is; where it is not given it is found, and LayoutError asks for it when both could be.
    Raises LayoutError for anything else. Upload of the plane addresses happens here; `close` gives their memory back.
    """

    def __init__(
        self, driver: Driver, tensors: Sequence[Any], layout: str, *, planes_first: bool | None = None
    ) -> None:
        self.driver = driver
        self.tensors = list(tensors)  # keeps the memory alive
        views = [_plane_views(tensor, layout, planes_first) for tensor in self.tensors]
        if not views:
            raise LayoutError("expected the KV tensor of at least one layer, found none")
        for number, (tensor, planes) in enumerate(zip(self.tensors, views, strict=True)):
            if not driver.owns(tensor):
                raise LayoutError(f"KV of layer {number}: expected memory of {driver.name}, found {tensor.device}")
            if (planes[0].shape, planes[0].stride(), planes[0].dtype, len(planes)) != (
                views[0][0].shape,
                views[0][0].stride(),
                views[0][0].dtype,
                len(views[0]),
            ):
                raise LayoutError(
                    f"KV of layer {number}: expected shape, strides and dtype of layer 0 {_describe(views[0][0])}, found "
                    f"{_describe(planes[0])}; layers of different kinds cannot share a chunk"
                )
        self.planes = [plane for planes in views for plane in planes]
        self.geometry = _geometry(self.planes[0])
        self._addresses = np.array([plane.data_ptr() for plane in self.planes], dtype=np.uint64)
        self._word_bytes = _word_bytes(self.geometry, self._addresses)
        self._table: Span | None = None
        if driver.has_kernels:
            self._table = driver.allocate(-(-self._addresses.nbytes // 4096) * 4096)
            try:
                stream = driver.current_stream()
                driver.copy(self._table.address, self._addresses.ctypes.data, self._addresses.nbytes, stream)
            except BaseException:
                self.close()
                raise
            try:
                driver.finish(stream)
            except BaseException:
                _given_up.append((self._table, self._addresses))  # the copy may still run
                raise

    @property
    def bytes_per_token(self) -> int:
        """Over all planes."""
        return len(self.planes) * self.geometry.token_bytes

    @property
    def has_kernel(self) -> bool:
        """Whether a copy is one kernel; else it is a copy for each run of bytes, thousands where heads lie apart."""
        return self._table is not None

    def close(self) -> None:
        """Idempotent. No copy may be under way."""
        if self._table is not None:
            self.driver.free(self._table)
            self._table = None

    def describe(self) -> str:
        """The byte format of a chunk, for the layout's fingerprint. It does not depend on how the engine pages it."""
        plane = self.planes[0]
        dtype = str(plane.dtype).removeprefix("torch.")
        return f"paged(planes={len(self.planes)}, tokens, heads={plane.shape[2]}, row={plane.shape[3]}) {dtype}"

    def gather(
        self,
        blocks: Sequence[int],
        first_token: int,
        tokens: int,
        chunk: Span,
        stream: Stream,
        *,
        kernel: bool | None = None,
    ) -> None:
        """Enqueue the copy of `tokens` tokens, from `first_token` of `blocks[0]` on, into `chunk` (exactly their bytes).

        `kernel` chooses the way, None the faster one that works here. Raises LayoutError when tokens, blocks and chunk do
        not fit together; nothing is enqueued then.
        """
        self._copy(blocks, first_token, tokens, chunk, tokens, 0, stream, scatter=False, kernel=kernel)

    def scatter(
        self,
        chunk: Span,
        chunk_tokens: int,
        skip: int,
        blocks: Sequence[int],
        first_token: int,
        tokens: int,
        stream: Stream,
        *,
        kernel: bool | None = None,
    ) -> None:
        """Enqueue the copy of tokens `skip` .. `skip + tokens` of a chunk of `chunk_tokens` into blocks, as `gather`."""
        self._copy(blocks, first_token, tokens, chunk, chunk_tokens, skip, stream, scatter=True, kernel=kernel)

    def _copy(
        self,
        blocks: Sequence[int],
        first_token: int,
        tokens: int,
        chunk: Span,
        chunk_tokens: int,
        skip: int,
        stream: Stream,
        *,
        scatter: bool,
        kernel: bool | None,
    ) -> None:
        self._check(blocks, first_token, tokens, chunk, chunk_tokens, skip)
        if kernel and self._table is None:
            raise DeviceError(f"{self.driver.name}: no kernels here")
        if self._table is not None and kernel is not False:
            self._by_kernel(blocks, first_token, tokens, chunk, chunk_tokens, skip, stream, scatter)
        else:
            self._by_copies(blocks, first_token, tokens, chunk, chunk_tokens, skip, stream, scatter)

    def _check(
        self, blocks: Sequence[int], first_token: int, tokens: int, chunk: Span, chunk_tokens: int, skip: int
    ) -> None:
        g = self.geometry
        if tokens < 1 or first_token < 0 or skip < 0 or skip + tokens > chunk_tokens:
            raise LayoutError(f"{tokens} tokens at {skip} do not lie inside a chunk of {chunk_tokens}")
        if len(blocks) * g.block_tokens < first_token + tokens:
            raise LayoutError(
                f"{len(blocks)} blocks of {g.block_tokens} tokens cannot hold {tokens} tokens from token {first_token} on"
            )
        if min(blocks) < 0 or max(blocks) >= g.blocks:
            raise LayoutError(f"blocks: expected ids in 0..{g.blocks - 1}, found {min(blocks)}..{max(blocks)}")
        if chunk.length_bytes != chunk_tokens * self.bytes_per_token:
            raise LayoutError(
                f"chunk: expected {chunk_tokens * self.bytes_per_token} bytes for {chunk_tokens} tokens, found "
                f"{chunk.length_bytes}"
            )

    def _by_kernel(
        self,
        blocks: Sequence[int],
        first_token: int,
        tokens: int,
        chunk: Span,
        chunk_tokens: int,
        skip: int,
        stream: Stream,
        scatter: bool,
    ) -> None:
        assert self._table is not None
        g = self.geometry
        word_bytes = self._word_bytes
        while chunk.address % word_bytes:
            word_bytes //= 2
        per_launch = _BLOCKS_A_LAUNCH * g.block_tokens
        done = 0
        while done < tokens:
            position = first_token + done
            first_block = position // g.block_tokens
            within = position % g.block_tokens
            part = min(tokens - done, per_launch - within)
            ids = np.zeros(_BLOCKS_A_LAUNCH, dtype=np.uint32)
            some = blocks[first_block : first_block + _BLOCKS_A_LAUNCH]
            ids[: len(some)] = some
            parameters = np.array(
                [
                    self._table.address, chunk.address, g.block_stride, g.token_stride, g.head_stride, len(self.planes),
                    part, g.heads, g.row_bytes, g.block_tokens, within, chunk_tokens, skip + done, scatter,
                ],
                dtype=np.uint64,
            )  # fmt: skip
            words = len(self.planes) * part * g.token_bytes // word_bytes
            self.driver.launch(f"paged_{word_bytes}", -(-words // _WORDS_A_THREAD), [parameters, ids], stream)
            done += part

    def _by_copies(
        self,
        blocks: Sequence[int],
        first_token: int,
        tokens: int,
        chunk: Span,
        chunk_tokens: int,
        skip: int,
        stream: Stream,
        scatter: bool,
    ) -> None:
        token_bytes = self.geometry.token_bytes
        for plane, base in enumerate(self._addresses.tolist()):
            packed = chunk.address + (plane * chunk_tokens + skip) * token_bytes
            for offset, in_chunk, length in self._runs(blocks, first_token, tokens):
                pair = (base + offset, packed + in_chunk)
                destination, source = pair if scatter else pair[::-1]
                self.driver.copy(destination, source, length, stream)

    def _runs(self, blocks: Sequence[int], first_token: int, tokens: int) -> Iterator[tuple[int, int, int]]:
        """(offset in the plane, offset in the chunk's plane, length) of bytes that lie together in both."""
        g = self.geometry
        whole_tokens = g.heads == 1 and g.token_stride == g.row_bytes
        start = length = in_chunk = 0
        position, done = first_token, 0
        while done < tokens:
            within = position % g.block_tokens
            part = min(tokens - done, g.block_tokens - within)
            origin = blocks[position // g.block_tokens] * g.block_stride + within * g.token_stride
            if whole_tokens:
                if length and origin == start + length:
                    length += part * g.row_bytes
                else:
                    if length:
                        yield start, in_chunk, length
                    start, in_chunk, length = origin, done * g.row_bytes, part * g.row_bytes
            else:
                for token in range(part):
                    for head in range(g.heads):
                        yield (
                            origin + token * g.token_stride + head * g.head_stride,
                            ((done + token) * g.heads + head) * g.row_bytes,
                            g.row_bytes,
                        )
            position += part
            done += part
        if length:
            yield start, in_chunk, length


def _plane_views(tensor: Any, layout: str, planes_first: bool | None) -> list[Any]:
    """Views (blocks, block tokens, heads, row) of a layer's planes."""
    if layout == "MLA":
        if tensor.dim() != 3:
            raise LayoutError(f"MLA: expected (blocks, block_tokens, latent_size), found shape {tuple(tensor.shape)}")
        return [tensor.unsqueeze(2)]
    if layout not in LAYOUTS:
        raise LayoutError(f"layout: expected one of {', '.join(LAYOUTS)}, found {layout!r}")
    if tensor.dim() != 5:
        raise LayoutError(
            f"{layout}: expected five dimensions, one of them the 2 of K and V, found {tuple(tensor.shape)}"
        )
    if planes_first is None:
        first, second = tensor.shape[0] == 2, tensor.shape[1] == 2
        if first == second:
            raise LayoutError(
                f"{layout}: shape {tuple(tensor.shape)} does not say where K and V are; give planes_first"
            )
        planes_first = first
    if tensor.shape[0 if planes_first else 1] != 2:
        raise LayoutError(
            f"{layout}: expected K and V in dimension {0 if planes_first else 1}, found {tuple(tensor.shape)}"
        )
    planes = [tensor[number] if planes_first else tensor[:, number] for number in range(2)]
    return [plane.transpose(1, 2) if layout == "HND" else plane for plane in planes]


def _geometry(plane: Any) -> Geometry:
    """Merges heads into the row where they lie together."""
    blocks, block_tokens, heads, row = plane.shape
    size = plane.element_size()
    block_stride, token_stride, head_stride, one = (stride * size for stride in plane.stride())
    if one != size:
        raise LayoutError(f"expected the elements of a head side by side, found strides {plane.stride()}")
    row_bytes = row * size
    if heads == 1 or head_stride == row_bytes:
        heads, row_bytes, head_stride = 1, heads * row_bytes, heads * row_bytes
    return Geometry(blocks, block_tokens, heads, row_bytes, block_stride, token_stride, head_stride)


def _word_bytes(geometry: Geometry, addresses: np.ndarray) -> int:
    """The widest word that every row of every plane is aligned to."""
    numbers = [
        geometry.row_bytes,
        geometry.block_stride,
        geometry.token_stride,
        geometry.head_stride,
        *addresses.tolist(),
    ]
    return next(word for word in _WORDS if not any(number % word for number in numbers))


def _describe(plane: Any) -> str:
    return f"{tuple(plane.shape)} strides {tuple(plane.stride())} {plane.dtype}"
