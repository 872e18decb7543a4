"""Chunks in device memory as the cache is handed them: a tensor, or a place in an engine's paged KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tiercache.device.driver import Driver, Span, Stream
from tiercache.device.paged import PagedKv
from tiercache.errors import LayoutError


class DevicePayload(Protocol):
    @property
    def payload_bytes(self) -> int:
        """Of the chunk."""

    @property
    def span(self) -> Span | None:
        """Where the chunk lies in one piece; None when it has to be gathered."""

    @property
    def takes_long(self) -> bool:
        """Whether enqueuing is too much work for an event loop."""

    def gather(self, chunk: Span, stream: Stream) -> None:
        """Enqueue the copy into `chunk`."""

    def scatter(self, chunk: Span, stream: Stream) -> None:
        """Enqueue the copy out of `chunk`."""


class PagedChunk:
    """`tokens` tokens from `first_token` of `blocks[0]` on (all that the blocks hold by default).

    To load only the end of a stored chunk, say how long that is (`chunk_tokens`) and how many of its tokens to skip.
    """

    def __init__(
        self,
        kv: PagedKv,
        blocks: Sequence[int],
        first_token: int = 0,
        tokens: int | None = None,
        *,
        chunk_tokens: int | None = None,
        skip: int = 0,
    ) -> None:
        self.kv = kv
        self.blocks = list(blocks)
        self.first_token = first_token
        self.tokens = len(self.blocks) * kv.geometry.block_tokens - first_token if tokens is None else tokens
        self.chunk_tokens = chunk_tokens or self.tokens + skip
        self.skip = skip

    @property
    def payload_bytes(self) -> int:
        return self.chunk_tokens * self.kv.bytes_per_token

    @property
    def span(self) -> Span | None:
        return None

    @property
    def takes_long(self) -> bool:
        return not self.kv.has_kernel  # thousands of copies

    def gather(self, chunk: Span, stream: Stream) -> None:
        if self.skip or self.chunk_tokens != self.tokens:
            raise LayoutError("a part of a chunk can be loaded, not stored")
        self.kv.gather(self.blocks, self.first_token, self.tokens, chunk, stream)

    def scatter(self, chunk: Span, stream: Stream) -> None:
        self.kv.scatter(chunk, self.chunk_tokens, self.skip, self.blocks, self.first_token, self.tokens, stream)


class _TensorChunk:
    takes_long = False

    def __init__(self, driver: Driver, tensor: Any) -> None:
        self._driver = driver
        self._tensor = tensor  # keeps the memory alive
        self.span: Span | None = Span(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    @property
    def payload_bytes(self) -> int:
        assert self.span is not None
        return self.span.length_bytes

    def gather(self, chunk: Span, stream: Stream) -> None:
        assert self.span is not None
        self._driver.copy(chunk.address, self.span.address, self.span.length_bytes, stream)

    def scatter(self, chunk: Span, stream: Stream) -> None:
        assert self.span is not None
        self._driver.copy(self.span.address, chunk.address, self.span.length_bytes, stream)


def device_payload(driver: Driver, value: Any) -> DevicePayload | None:
    """`value` as a payload in the driver's memory; None when it is something else (host memory, another device).

    Raises LayoutError for a tensor of this device that is not contiguous.
    """
    if isinstance(value, PagedChunk):
        if value.kv.driver is not driver:
            raise LayoutError(f"the chunk lies on {value.kv.driver.name}, the cache uses {driver.name}")
        return value
    if type(value).__module__.partition(".")[0] != "torch" or not driver.owns(value):
        return None
    if not value.is_contiguous():
        raise LayoutError(f"expected a contiguous tensor in device memory, found strides {tuple(value.stride())}")
    return _TensorChunk(driver, value)
