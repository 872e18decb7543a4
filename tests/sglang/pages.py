"""Pages of SGLang's host pools, and the names that SGLang gives them. Called only in the process with SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

PAGE_TOKENS = 16


def tokens_of(seed: int, pages: int) -> list[int]:
    return torch.randint(0, 1 << 15, (pages * PAGE_TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()


def page_hashes(tokens: Sequence[int]) -> list[str]:
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    hashes: list[str] = get_storage_hash_str(list(tokens), None, page_size=PAGE_TOKENS)
    return hashes


def random_pages(host: Any, pages: int, seed: int = 0) -> torch.Tensor:
    """Bytes for so many pages of a pool, (pages, bytes of a page)."""
    page_bytes = host.get_dummy_flat_data_page().nbytes
    return torch.randint(0, 256, (pages, page_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def write_pages(host: Any, indices: torch.Tensor, pages: torch.Tensor) -> None:
    dtype = host.get_dummy_flat_data_page().dtype
    for index, page in zip(indices[:: host.page_size].tolist(), pages, strict=True):
        host.set_from_flat_data_page(index, page.view(dtype))


def read_pages(host: Any, indices: torch.Tensor) -> torch.Tensor:
    """In the same form as `random_pages`, by SGLang's own way to pages."""
    found = [host.get_data_page(index).contiguous().view(torch.uint8) for index in indices[:: host.page_size].tolist()]
    return torch.stack(found) if found else random_pages(host, 0)
