"""Limits on what control messages take of the cache's loop: one short step a round, and so much memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")

ARRIVES_S = 10.0
"""For a message to arrive, once its length has."""
_STALLS_S = 1.0


def due_s(arrived_bytes: int, size_bytes: int) -> float:
    """How long after its first byte so much of a large message should have arrived: at an even pace, with a second to spare.
    So a client that announces much and sends little does not keep others' room for long."""
    return _STALLS_S + ARRIVES_S * arrived_bytes / size_bytes


class Pace:
    """One step for each round of the loop, in the order in which they were asked for, however many connections ask."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._calling = False

    async def turn(self) -> None:
        """Wait for it. What follows up to the next `await` should take no longer than a few milliseconds."""
        loop = asyncio.get_running_loop()
        called: asyncio.Future[None] = loop.create_future()
        self._waiting.append(called)
        if not self._calling:
            self._calling = True
            loop.call_soon(self._call)
        await called

    async def all_of(self, steps: Generator[None, None, T]) -> T:
        """A long piece of work, a turn for each of its steps. Returns what it returns; cancelled, it stops where it is."""
        while True:
            await self.turn()
            try:
                next(steps)
            except StopIteration as end:
                result: T = end.value
                return result

    def _call(self) -> None:
        while self._waiting:
            called = self._waiting.popleft()
            if not called.done():
                called.set_result(None)
                asyncio.get_running_loop().call_soon(self._call)
                return
        self._calling = False


class ByteSemaphore:
    """Bytes that large messages may take, all together. First come, first served: others wait."""

    def __init__(self, size_bytes: int) -> None:
        self._left_bytes = size_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def of(self, size_bytes: int) -> AsyncIterator[None]:
        """`size_bytes` of it, at most all. Cancelled while waiting, nothing is taken."""
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, taken))
        self._hand_out()
        try:
            await taken
            yield
        finally:
            if taken.done() and not taken.cancelled():
                self._left_bytes += size_bytes
            else:
                taken.cancel()
            self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting:
            size_bytes, taken = self._waiting[0]
            if not taken.done():
                if size_bytes > self._left_bytes:
                    return
                self._left_bytes -= size_bytes
                taken.set_result(None)
            self._waiting.popleft()

