"""The worker's half of turns: tells the cache what requests said, once what they stored is in it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence

from tiercache.bridge import CacheThread
from tiercache.core.keys import ChunkKey
from tiercache.errors import TierCacheError
from tiercache.integrations.vllm.turns import RequestBegan, RequestEnded, Turn, Wishes

logger = logging.getLogger("tiercache.vllm")

_STORING_S = 30.0
"""The longest wait for a request's saves; what is not stored by then is not counted on."""


class SessionTurns:
    """`follow` is called by the engine's thread and does not wait."""

    def __init__(self, thread: CacheThread, keys_of: Callable[[list[bytes]], list[ChunkKey]]) -> None:
        """`keys_of` the names of chunks."""
        self._thread = thread
        self._keys_of = keys_of
        self._new: dict[str, set[ChunkKey]] = {}
        """The loop's. What requests store and nobody had stored before."""
        self._warned = False

    def stores(self, request_id: str, keys: Sequence[ChunkKey]) -> None:
        """Of a request that wishes to have it forgotten, before it begins to store these. Called by the engine's thread."""
        with contextlib.suppress(RuntimeError):  # closed
            self._thread.loop.call_soon_threadsafe(self._note, request_id, keys)

    def _note(self, request_id: str, keys: Sequence[ChunkKey]) -> None:
        tiers = (self._thread.cache.cpu, *self._thread.cache.tiers)
        new = {key for key in keys if not any(tier.contains(key) for tier in tiers)}
        self._new.setdefault(request_id, set()).update(new)

    def follow(self, turns: Sequence[Turn], storing: Mapping[concurrent.futures.Future[int], str]) -> None:
        """`storing` are the saves under way, with the requests that they are for."""
        for turn in turns:
            saves = []
            if isinstance(turn, RequestEnded):
                saves = [save for save, request_id in list(storing.items()) if request_id == turn.request_id]
            with contextlib.suppress(TierCacheError):  # closed: nothing is worth predicting any more
                self._thread.submit(self._follow(turn, saves))

    async def _follow(self, turn: Turn, saves: list[concurrent.futures.Future[int]]) -> None:
        try:
            keys = self._keys_of(turn.names)
            if isinstance(turn, RequestBegan):
                self._thread.cache.ahead.began(turn.session, keys)
                return
            # Without waiting: the session's next turn may begin before this one is stored, and must not overtake it.
            self._end_turn(turn.wishes, keys)
            if saves:
                # Waiting for them does not end them, and how they end is told elsewhere.
                ended, _ = await asyncio.wait([asyncio.wrap_future(save) for save in saves], timeout=_STORING_S)
                for save in ended:
                    _ = save.cancelled() or save.exception()
            await self._learn(turn, keys)
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning("what a request said about the next ones has no effect: %r", error)

    def _end_turn(self, wishes: Wishes, keys: list[ChunkKey]) -> None:
        ahead = self._thread.cache.ahead
        if wishes.session:
            ahead.ended(wishes.session, keys)
            if wishes.session_over:
                ahead.over(wishes.session)

    async def _learn(self, turn: RequestEnded, keys: list[ChunkKey]) -> None:
        cache, wishes = self._thread.cache, turn.wishes
        if wishes.forget:
            forgotten = list(self._new.pop(turn.request_id, ()))
            cache.ahead.unpin(forgotten)
            await cache.forget(forgotten)
        if wishes.pin_s is not None:
            cache.ahead.pin(keys, wishes.pin_s)
        if wishes.next_in_s is not None:
            cache.prefetch(keys, deadline=wishes.next_in_s)
