"""What copies between paged KV and chunks must do, in plain torch indexing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tiercache.device.paged import PagedKv


def gather_reference(kv: PagedKv, blocks: Sequence[int], first_token: int, tokens: int) -> Any:
    """What `PagedKv.gather` must produce, in plain torch indexing: (planes, tokens, heads, row), in the KV's dtype."""
    ids, within = _places(kv, blocks, first_token, tokens)
    # As bytes: torch does not index every dtype on every device.
    rows = torch.stack([plane.view(torch.uint8)[ids, within] for plane in kv.planes])
    return rows.view(kv.planes[0].dtype)


def scatter_reference(kv: PagedKv, chunk: Any, skip: int, blocks: Sequence[int], first_token: int, tokens: int) -> None:
    """What `PagedKv.scatter` must do to the engine's blocks; `chunk` as `gather_reference` returns it."""
    ids, within = _places(kv, blocks, first_token, tokens)
    rows = chunk[:, skip : skip + tokens].view(torch.uint8)
    for plane, plane_rows in zip(kv.planes, rows, strict=True):
        plane.view(torch.uint8)[ids, within] = plane_rows.to(plane.device)


def _places(kv: PagedKv, blocks: Sequence[int], first_token: int, tokens: int) -> tuple[Any, Any]:
    device = kv.planes[0].device
    position = torch.arange(first_token, first_token + tokens, device=device)
    ids = torch.as_tensor(blocks, device=device)[position // kv.geometry.block_tokens]
    return ids, position % kv.geometry.block_tokens
