"""Several tasks as one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any


async def all_or_none(work: Sequence[asyncio.Future[Any]]) -> None:
    """Wait for all; if this or one of them is cancelled or fails, none is left running."""
    try:
        await asyncio.gather(*work)
    except BaseException:
        for item in work:
            item.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        raise
