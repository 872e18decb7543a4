"""Turns at something scarce: who waits for a chunk goes before those who may want one later."""

from __future__ import annotations

import asyncio
from collections import deque

from tiercache.core.budget import Purpose


class Places:
    """A semaphore whose places go to demand reads first; among equals, first come, first served.

    A demand read that finds all places taken by prefetches waits for one of them to end, whatever is queued behind it.
    Cancelled while waiting, `acquire` holds nothing.
    """

    def __init__(self, count: int) -> None:
        self.free = count
        self._demand: deque[asyncio.Future[None]] = deque()
        self._prefetch: deque[asyncio.Future[None]] = deque()

    async def acquire(self, purpose: Purpose) -> None:
        if self.free and not self._demand and (purpose is not Purpose.PREFETCH or not self._prefetch):
            self.free -= 1
            return
        waiting = self._prefetch if purpose is Purpose.PREFETCH else self._demand
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.release()  # it came at this very moment
            else:
                waiting.remove(turn)
            raise

    def release(self) -> None:
        for waiting in (self._demand, self._prefetch):
            while waiting:
                turn = waiting.popleft()
                if not turn.done():
                    turn.set_result(None)
                    return
        self.free += 1
