"""SGLang's host pools: the memory and names of their pages, and the calls that copy a page to and from a chunk.

The cache's threads copy pages directly between arena slots and the pool's memory. A page-first layout has one piece per
page, or separate pieces for K and V.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.core.keys import KEY_BYTES, ChunkKey, Tenant
from tiercache.errors import LayoutError
from tiercache.payloads import Sink, Source

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

_GEOMETRY = (
    "layout", "dtype", "store_dtype", "page_size", "layer_num", "target_layer_num", "start_layer", "end_layer", "head_num",
    "head_dim", "v_head_dim", "head_group_num", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "packed_fp8",
    "dsa_kv_cache_store_fp8", "storage_format_tag", "indexer_dtype", "indexer_page_stride_size", "num_mamba_layers",
    "temporal_dtype", "temporal_state_elem_size", "conv_dtype", "conv_state_elem_sizes", "conv_state_shapes",
    "item_bytes", "dcp_size", "dcp_rank",
)  # fmt: skip
"""Attributes of pools that determine the meaning of a page's bytes; each kind has some of these."""
_BY_HEADS = ("MHATokenToKVPoolHost", "MHATokenToKOnlyPoolHost", "MambaPoolHost")
"""Classes of pools that each tensor-parallel rank has its own part of, even if the model's KV is equal on all ranks."""


class HostPool:
    """A pool of SGLang by its registered name, whose page is a few pieces of memory at addresses that the pool reports.

    A transfer has `page_tokens` indices per page of `page_bytes` bytes. Both are read once, since a pool does not change
    its layout. Raises LayoutError if the pool reports no addresses, or some outside of its memory.
    """

    def __init__(self, name: str, host: Any) -> None:
        self.name = name
        self._host = host
        self.page_tokens = int(getattr(host, "logical_page_size", None) or getattr(host, "page_size", None) or 1)
        self.dtype = str(getattr(host, "dtype", "uint8")).removeprefix("torch.")
        self._memory = sorted(
            ((buffer.data_ptr(), _bytes_of(buffer)) for buffer in _buffers(host) if buffer.numel()),
            key=lambda one: one[0],
        )
        self._starts = [start for start, _ in self._memory]
        self._lengths: tuple[int, ...] = ()
        import torch

        (page,) = self._located(torch.arange(self.page_tokens, dtype=torch.int64), 1)
        self._lengths = tuple(piece.nbytes for piece in page)
        self.page_bytes = sum(self._lengths)

    @property
    def by_heads(self) -> bool:
        """True if pages differ between tensor-parallel ranks, independent of the model's other pools."""
        return any(kind.__name__ in _BY_HEADS for kind in type(self._host).__mro__)

    def describe(self) -> str:
        """Return all properties of the pool that change a page's bytes."""
        known = [(name, str(getattr(self._host, name))) for name in _GEOMETRY if hasattr(self._host, name)]
        return json.dumps([self.name, type(self._host).__qualname__, self._lengths, known])

    def sources(self, indices: Any, pages: int) -> list[tuple[int, Source]]:
        """Return the length of each of the `pages` of `indices` (a tensor), and a call that copies it into a slot."""
        return [(self.page_bytes, partial(self._read, page)) for page in self._located(indices, pages)]

    def sinks(self, indices: Any, pages: int) -> list[Sink]:
        """Return a call for each of the `pages` of `indices` that fills the page from a chunk.

        The calls raise ValueError for a chunk of another length.
        """
        return [partial(self._fill, page) for page in self._located(indices, pages)]

    def _located(self, indices: Any, pages: int) -> list[list[np.ndarray]]:
        """Return the pieces of each page as uint8 views of the pool's memory."""
        if len(indices) != pages * self.page_tokens:
            raise LayoutError(
                f"pool {self.name}: expected {self.page_tokens} indices for each of {pages} pages, found {len(indices)}"
            )
        try:
            addresses, lengths = self._host.get_page_buffer_meta(indices)
        except (AttributeError, NotImplementedError, ValueError, TypeError) as error:
            kind, layout = type(self._host).__qualname__, getattr(self._host, "layout", None)
            raise LayoutError(
                f"pool {self.name} ({kind}, layout {layout}) does not say where a page lies; try --hicache-mem-layout "
                f"page_first ({error})"
            ) from error
        if not addresses or len(addresses) != len(lengths) or len(addresses) % pages:
            raise LayoutError(f"pool {self.name}: expected pieces of {pages} pages, found {len(addresses)}")
        pieces = [self._piece(int(address), int(length)) for address, length in zip(addresses, lengths, strict=True)]
        each = len(pieces) // pages
        split = [pieces[start : start + each] for start in range(0, len(pieces), each)]
        if self._lengths and any(tuple(piece.nbytes for piece in page) != self._lengths for page in split):
            raise LayoutError(f"pool {self.name}: expected pages of {self._lengths} bytes, found others")
        return split

    def _piece(self, address: int, length_bytes: int) -> np.ndarray:
        position = bisect_right(self._starts, address) - 1
        if position >= 0:
            start, memory = self._memory[position]
            if length_bytes > 0 and address + length_bytes <= start + memory.nbytes:
                return memory[address - start : address - start + length_bytes]
        raise LayoutError(f"pool {self.name}: {length_bytes} bytes at {address:#x} are not in its memory")

    def _read(self, page: Sequence[np.ndarray], slot: np.ndarray) -> None:
        for piece, part in _pairs(page, slot):
            np.copyto(part, piece)

    def _fill(self, page: Sequence[np.ndarray], chunk: np.ndarray) -> None:
        if chunk.nbytes != self.page_bytes:
            raise ValueError(f"the page has {self.page_bytes} bytes, the chunk {chunk.nbytes}")
        for piece, part in _pairs(page, chunk):
            np.copyto(piece, part)


def _pairs(page: Sequence[np.ndarray], payload: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield each piece of the page with its part of the payload."""
    start = 0
    for piece in page:
        yield piece, payload[start : start + piece.nbytes]
        start += piece.nbytes


def _buffers(host: Any) -> list[Any]:
    """Return the tensors that hold a pool's pages."""
    found = host.get_hybrid_pool_buffer() if hasattr(host, "get_hybrid_pool_buffer") else [host.kv_buffer]
    return [buffer for each in found for buffer in (each if isinstance(each, (list, tuple)) else [each])]


def _bytes_of(tensor: Any) -> np.ndarray:
    """Return a uint8 vector over a tensor's memory."""
    import torch

    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise LayoutError(
            f"expected a contiguous tensor in host memory, found strides {tensor.stride()} on {tensor.device}"
        )
    view: np.ndarray = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return view


class StoredPool:
    """A pool with the names of its pages, below the namespace of a layout.

    `generation` is empty unless SGLang has cleared its storage. The rank is part of the names in pools that are divided
    among tensor-parallel ranks although the model's KV is not; the layout separates all others.
    """

    def __init__(
        self, pool: HostPool, storage: HiCacheStorageConfig, layout: bytes, tenant: Tenant, generation: bytes
    ) -> None:
        apart = pool.by_heads and storage.is_mla_model
        meaning = pool.describe() + (f" tp {storage.tp_rank} of {storage.tp_size}" if apart else "")
        self.pool = pool
        self.writes = (storage.is_storage_writer or apart) and not (generation and shares_pages(storage))
        """False if another rank writes the same pages, or no rank can find them."""
        self._namespace = hashlib.blake2b(generation + meaning.encode(), digest_size=KEY_BYTES, key=layout).digest()
        self._tenant = tenant

    def keys(self, hashes: Sequence[str]) -> list[ChunkKey]:
        """Return the keys of pages. SGLang's hashes are chained SHA-256 over tokens, LoRA and cache salt, in hex."""
        namespace, tenant = self._namespace, self._tenant
        return [
            hashlib.blake2b(value.encode(), digest_size=KEY_BYTES, key=namespace).digest() + tenant for value in hashes
        ]


def shares_pages(storage: HiCacheStorageConfig) -> bool:
    """Return True if other ranks read this rank's pages, which is impossible under names private to a process."""
    return bool(storage.is_mla_model and storage.tp_size > 1)
