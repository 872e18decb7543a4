"""Chunks in device memory: a tensor, or blocks of an engine's paged KV.

The KV of all layers is seen as words, blocks first: a strided view for each run of layers at equal distances. A gather
is an `index_select` per view into a contiguous slot, a scatter an `index_copy_`. A chunk's payload is (blocks, planes,
bytes), contiguous: block by block, each with its planes in turn, each plane's part in the order of its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from tiercache.device.driver import Driver, Stream, Tensor, bytes_of, in_own_thread
from tiercache.errors import LayoutError
from tiercache.payloads import is_tensor

_WARM_UP_BLOCKS = 32
"""The number is above 16, since torch uses other kernels from there on."""


class PagedKv:
    """The planes of an engine's paged KV: K and V of each layer, or a tensor per layer that holds both, or MLA's
    latents.

    Each tensor has the blocks in its first dimension, `blocks` of them or equal parts of them (by default as many as
    the first tensor has); any dtype, and any strides for which blocks do not overlap. KV of shape (2, blocks, ...) is
    passed as its two halves: `tensor[0], tensor[1]`. Raises LayoutError for anything else.
    """

    def __init__(self, driver: Driver, tensors: Sequence[Tensor], blocks: int | None = None) -> None:
        if not tensors:
            raise LayoutError("expected at least one KV tensor, found none")
        self.driver = driver
        self.tensors = list(tensors)  # keeps the memory alive
        self.blocks = blocks or int(tensors[0].shape[0])
        for number, tensor in enumerate(tensors):
            if not driver.owns(tensor):
                raise LayoutError(f"KV tensor {number}: expected memory of {driver.name}, found device {tensor.device}")
        self._views, word_bytes = _views_of(self.tensors, self.blocks)
        self.block_bytes: int = sum(prod(view.shape[1:]) for view in self._views) * word_bytes

    def describe(self) -> str:
        """Return the byte format of a chunk, for the layout's fingerprint.

        It describes the inside of blocks, not their addresses.
        """
        kinds = [f"{inside(tensor, self.blocks)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in self.tensors]
        runs = [(kinds[0], len(kinds))] if len(set(kinds)) == 1 else [(kind, 1) for kind in kinds]
        return "paged(blocks,planes,bytes) " + ", ".join(f"{count}x{kind}" for kind, count in runs)

    def gather(self, blocks: Sequence[int], chunk: Tensor, stream: Stream) -> None:
        """Enqueue the copy of `blocks` into `chunk`, uint8[len(blocks) * block_bytes], aligned to 8 bytes.

        Raises LayoutError if blocks and chunk do not match, without enqueuing anything.
        """
        self._check(blocks, chunk, len(blocks), 0)

        def copy() -> None:
            import torch

            ids = self._ids(blocks)
            for view, part in self._parts(chunk, len(blocks)):
                torch.index_select(view, 0, ids, out=part)

        self.driver.enqueue(stream, copy)

    def scatter(self, chunk: Tensor, chunk_blocks: int, skip: int, blocks: Sequence[int], stream: Stream) -> None:
        """Enqueue the copy of blocks `skip` .. `skip + len(blocks)` of a chunk of `chunk_blocks` blocks into `blocks`.

        Raises LayoutError as `gather` does, and for a repeated id.
        """
        self._check(blocks, chunk, chunk_blocks, skip)
        if len(set(blocks)) < len(blocks):
            raise LayoutError(f"blocks: expected each id once, found {list(blocks)}")

        def copy() -> None:
            ids = self._ids(blocks)
            for view, part in self._parts(chunk, chunk_blocks):
                view.index_copy_(0, ids, part[skip : skip + len(blocks)])

        self.driver.enqueue(stream, copy)

    def warm_up(self) -> None:
        """Copy some blocks out and back, so that kernels are loaded before an engine captures CUDA graphs.

        Runs after the work that the calling thread has enqueued. Changes nothing. Blocks.
        """
        driver, some = self.driver, range(min(self.blocks, _WARM_UP_BLOCKS))
        after = driver.record(driver.current_stream())

        def copy() -> None:
            stream, chunk = driver.make_stream(), driver.empty(len(some) * self.block_bytes)
            driver.wait(stream, after)
            try:
                self.gather(some, chunk, stream)
                self.scatter(chunk, len(some), 0, some, stream)
            finally:
                driver.finish(stream)

        in_own_thread(copy)

    def _check(self, blocks: Sequence[int], chunk: Tensor, chunk_blocks: int, skip: int) -> None:
        """Raise LayoutError for an invalid id, which would be an assertion on the device that ends its context."""
        if not blocks or skip < 0 or skip + len(blocks) > chunk_blocks:
            raise LayoutError(f"{len(blocks)} blocks at {skip} do not lie inside a chunk of {chunk_blocks}")
        if min(blocks) < 0 or max(blocks) >= self.blocks:
            raise LayoutError(f"blocks: expected ids in 0..{self.blocks - 1}, found {min(blocks)}..{max(blocks)}")
        if chunk.numel() != chunk_blocks * self.block_bytes:
            raise LayoutError(
                f"chunk: expected {chunk_blocks * self.block_bytes} bytes for {chunk_blocks} blocks, found {chunk.numel()}"
            )

    def _ids(self, blocks: Sequence[int]) -> Tensor:
        """Return the ids in the device's memory, uploaded on the current stream."""
        import torch

        device = self._views[0].device
        if device.type == "cpu":
            return torch.tensor(list(blocks), dtype=torch.int64)
        return torch.tensor(list(blocks), dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)

    def _parts(self, chunk: Tensor, chunk_blocks: int) -> list[tuple[Tensor, Tensor]]:
        """Return each view with its part of a chunk."""
        words = chunk.view(self._views[0].dtype).view(chunk_blocks, -1)
        sizes = [prod(view.shape[1:]) for view in self._views]
        return [
            (view, part.unflatten(1, view.shape[1:]))
            for view, part in zip(self._views, words.split(sizes, 1), strict=True)
        ]


class PagedChunk:
    """The chunk in `blocks`, in their order.

    To load only the end of a stored chunk, give its number of blocks (`chunk_blocks`) and the number to skip.
    """

    flat = None
    """It has to be gathered."""

    def __init__(self, kv: PagedKv, blocks: Sequence[int], *, chunk_blocks: int | None = None, skip: int = 0) -> None:
        self.kv = kv
        self.blocks = list(blocks)
        self.chunk_blocks = chunk_blocks or len(self.blocks) + skip
        self.skip = skip

    @property
    def payload_bytes(self) -> int:
        """Length of the whole chunk, of which `skip` blocks are left out."""
        return self.chunk_blocks * self.kv.block_bytes

    def gather(self, chunk: Tensor, stream: Stream) -> None:
        """Enqueue the copy of the blocks into `chunk`. Raises LayoutError for a part of a chunk."""
        if self.skip or self.chunk_blocks != len(self.blocks):
            raise LayoutError("a part of a chunk can be loaded, not stored")
        self.kv.gather(self.blocks, chunk, stream)

    def scatter(self, chunk: Tensor, stream: Stream) -> None:
        """Enqueue the copy of `chunk` into the blocks, without its first `skip` blocks."""
        self.kv.scatter(chunk, self.chunk_blocks, self.skip, self.blocks, stream)


class _TensorChunk:
    """A contiguous chunk: `flat` is uint8[payload_bytes]."""

    def __init__(self, driver: Driver, tensor: Tensor) -> None:
        self._driver = driver
        self.flat: Tensor = bytes_of(tensor)  # keeps the memory alive
        self.payload_bytes = int(self.flat.numel())

    def gather(self, chunk: Tensor, stream: Stream) -> None:
        self._driver.copy(chunk, self.flat, stream)

    def scatter(self, chunk: Tensor, stream: Stream) -> None:
        self._driver.copy(self.flat, chunk, stream)


DevicePayload = PagedChunk | _TensorChunk


def device_payload(driver: Driver, value: Any) -> DevicePayload | None:
    """Return `value` as a payload in the driver's memory; None for other memory (host, another device).

    Raises LayoutError for a tensor of this device that is not contiguous.
    """
    if isinstance(value, PagedChunk):
        if value.kv.driver is not driver:
            raise LayoutError(f"the chunk lies on {value.kv.driver.name}, the cache uses {driver.name}")
        return value
    if not is_tensor(value) or not driver.owns(value):
        return None
    if not value.is_contiguous():
        raise LayoutError(f"expected a contiguous tensor in device memory, found strides {tuple(value.stride())}")
    return _TensorChunk(driver, value)


def inside(tensor: Tensor, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a block and the order of its dimensions in memory (the widest stride first)."""
    shape = (tensor.shape[0] // blocks, *tensor.shape[1:])
    order = sorted(range(len(shape)), key=lambda dimension: (-tensor.stride(dimension), dimension))
    return shape, tuple(dimension for dimension in order if shape[dimension] > 1)


class _Run:
    """Planes of one storage at equal distances. Offsets are bytes from the beginning of the storage."""

    def __init__(self, tensor: Tensor, blocks: int) -> None:
        size, split = tensor.element_size(), tensor.shape[0] // blocks
        if not split or split * blocks != tensor.shape[0]:
            raise LayoutError(f"expected {blocks} blocks or equal parts of them, found shape {tuple(tensor.shape)}")
        self.storage = tensor.untyped_storage()
        self.begins = [tensor.storage_offset() * size]
        self.distance = split * tensor.stride(0) * size
        """Bytes from one block to the next."""
        self.inner: list[tuple[int, int]] = []
        """(count, stride) of the dimensions inside a block, the widest first; the last is a run of bytes."""
        sizes = [split, *tensor.shape[1:], size]
        strides = [*(stride * size for stride in tensor.stride()), 1]
        extent = sorted(
            ((stride, count) for count, stride in zip(sizes, strides, strict=True) if count > 1), reverse=True
        )
        for stride, count in extent:
            if self.inner and self.inner[-1][1] == count * stride:
                self.inner[-1] = (self.inner[-1][0] * count, stride)
            else:
                self.inner.append((count, stride))
        if not self.inner or self.inner[-1][1] != 1:
            self.inner.append((1, 1))
        # Each dimension, the blocks included, must step over the extent of narrower dimensions.
        reach = 0
        for stride, count in sorted([(stride, count) for count, stride in self.inner] + [(self.distance, blocks)]):
            if count > 1 and stride <= reach:
                raise LayoutError(
                    f"expected blocks that do not overlap, found shape {tuple(tensor.shape)} with strides "
                    f"{tuple(tensor.stride())} for {blocks} blocks"
                )
            reach += (count - 1) * stride

    def takes(self, other: _Run) -> bool:
        """Append another plane if it continues the run; return False otherwise."""
        begin = other.begins[0]
        step = begin - self.begins[-1]
        alike = (other.storage.data_ptr(), other.distance, other.inner) == (
            self.storage.data_ptr(),
            self.distance,
            self.inner,
        )
        if not alike or step <= 0 or (len(self.begins) > 1 and step != self.step):
            return False
        self.begins.append(begin)
        return True

    @property
    def step(self) -> int:
        """Bytes from one plane to the next."""
        return int(self.begins[1] - self.begins[0] if len(self.begins) > 1 else self.distance)


def _views_of(tensors: Sequence[Tensor], blocks: int) -> tuple[list[Tensor], int]:
    """Return views (blocks, planes, ...) of equal words that together cover the tensors in their order, and the bytes
    of a word.

    They are made from the storage, so the rules of `Tensor.view` for dtypes and inference tensors do not apply.
    """
    import torch

    runs: list[_Run] = []
    for tensor in tensors:
        run = _Run(tensor, blocks)
        if not runs or not runs[-1].takes(run):
            runs.append(run)
    numbers = [
        number for run in runs for number in (run.storage.data_ptr(), run.distance, *run.begins, run.inner[-1][0])
    ]
    numbers += [stride for run in runs for _, stride in run.inner[:-1]]
    word = next(size for size in (8, 4, 2, 1) if not any(number % size for number in numbers))
    dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[word]
    views = []
    for run in runs:
        shape = (blocks, len(run.begins), *(count for count, _ in run.inner[:-1]), run.inner[-1][0] // word)
        strides = [run.distance // word, run.step // word, *(stride // word for _, stride in run.inner[:-1]), 1]
        with torch.inference_mode(False):
            view = torch.empty(0, dtype=dtype, device=tensors[0].device)
            views.append(view.set_(run.storage, run.begins[0] // word, shape, strides))
    return views, word
