"""Several tasks as one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from tiercache.memory.workers import retrieve_exception

_Work = TypeVar("_Work", bound="asyncio.Future[Any]")


async def all_or_none(work: Sequence[asyncio.Future[Any]]) -> None:
    """Wait for all; if this or one of them is cancelled or fails, none is left running. Closed, it calls them off, and they
    end by themselves."""
    together = asyncio.gather(*work)
    together.add_done_callback(retrieve_exception)  # a caller that was closed does not
    try:
        await together
    except GeneratorExit:  # nobody runs what waits
        call_off(work)
        raise
    except BaseException:
        call_off(work)
        await asyncio.gather(*work, return_exceptions=True)
        raise


def call_off(work: Iterable[_Work]) -> list[_Work]:
    """Cancel what is under way, and return it: nothing, where whoever calls was dropped and is collected after its loop was
    closed."""
    left = [item for item in work if not item.done() and not item.get_loop().is_closed()]
    for item in left:
        item.cancel()
    return left
