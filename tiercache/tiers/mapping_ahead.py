"""What other processes store is mapped and verified here before anybody asks for it: the first get finds it as any later one
does. In the background, one chunk at a time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from tiercache.core.keys import ChunkKey

MOST_WAITING = 4096
"""Keys. Of more the oldest are left to whoever asks for them."""


class MappingAhead:
    """Belongs to the event loop; `follow` is a task of its own."""

    def __init__(self, map_ahead: Callable[[ChunkKey], Awaitable[None]]) -> None:
        """`map_ahead` gives way to whoever reads, and raises nothing."""
        self._map_ahead = map_ahead
        self._waiting: OrderedDict[ChunkKey, None] = OrderedDict()
        self._news = asyncio.Event()

    def stored(self, key: ChunkKey) -> None:
        """Somebody has stored it."""
        self._waiting[key] = None
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popitem(last=False)
        self._news.set()

    async def follow(self) -> None:
        """Until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                key, _ = self._waiting.popitem(last=False)
                await self._map_ahead(key)
