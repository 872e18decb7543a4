"""Waiters for something scarce, a slot or a place at a tier: first come, first served, and demand before prefetches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tiercache.core.budget import PREFETCH, READ, WRITE, Purpose
from tiercache.core.keys import ChunkKey

T = TypeVar("T")


@dataclass(eq=False)
class Turn(Generic[T]):
    """A waiter."""

    outcome: asyncio.Future[T | None]
    tier: str | None
    key: ChunkKey | None


class Turns(Generic[T]):
    def __init__(
        self,
        take: Callable[[Purpose, str | None, ChunkKey | None], T | None],
        give_back: Callable[[T, Purpose], None],
        *,
        by_tier: bool = False,
    ) -> None:
        """`take` returns one if one may go now, and None otherwise; `give_back` gets one whose waiter is gone. With
        `by_tier` a read whose tier has its share does not delay reads of other tiers."""
        self._take = take
        self._give_back = give_back
        self._by_tier = by_tier
        self.stands_aside: Callable[[Purpose, ChunkKey | None], bool] = _never
        """Returns True if a waiter for this chunk is blocked only by its tenant's quota, so that it delays no other."""
        self.waiting: list[deque[Turn[T]]] = [deque() for _ in Purpose]
        self.waiters = 0
        self.closed = False

    async def wait(
        self, purpose: Purpose, until_s: Callable[[], float], tier: str | None = None, key: ChunkKey | None = None
    ) -> T | None:
        """Return one by the loop time `until_s()`, which may move meanwhile; None at that time, and when this is closed.
        Cancelled, it holds nothing."""
        if not self.waiting[purpose] and not self.closed and (taken := self._take(purpose, tier, key)) is not None:
            return taken
        requested = self.request(purpose, tier, key)
        came = False
        try:
            came = await done_by(requested, until_s)
        finally:
            if not came:
                self.withdraw(purpose, requested)
        return requested.result() if came else None

    def request(
        self, purpose: Purpose, tier: str | None = None, key: ChunkKey | None = None
    ) -> asyncio.Future[T | None]:
        """Return a future of one; None when this is closed. A caller that gives up calls `withdraw`; otherwise it owns the
        result. `tier` is the tier to read from, `key` the chunk that it is for."""
        turn: Turn[T] = Turn(asyncio.get_running_loop().create_future(), tier, key)
        if self.closed:
            turn.outcome.set_result(None)
        else:
            self.waiting[purpose].append(turn)
            self.waiters += 1
            self.serve()
        return turn.outcome

    def withdraw(self, purpose: Purpose, requested: asyncio.Future[T | None]) -> None:
        """Give up a request. What came meanwhile goes to the next waiter."""
        if requested.done():
            taken = requested.result()
            if taken is not None:
                self._give_back(taken, purpose)
            return
        waiting = self.waiting[purpose]
        waiting.remove(next(turn for turn in waiting if turn.outcome is requested))
        self.waiters -= 1
        self.serve()  # it may have been in the way of others

    def serve(self) -> None:
        """Give waiters what may go now."""
        if not self.waiters:
            return
        for purpose in (READ, WRITE, PREFETCH):
            waiting = self.waiting[purpose]
            while waiting:
                for turn in waiting:
                    taken = self._take(purpose, turn.tier, turn.key)
                    if taken is not None:
                        break
                    if not (purpose is READ and self._by_tier) and not self.stands_aside(purpose, turn.key):
                        break
                if taken is None:
                    break
                waiting.remove(turn)
                self.waiters -= 1
                turn.outcome.set_result(taken)

    def close(self) -> None:
        """Give every waiter, and every later one, None."""
        self.closed = True
        for waiting in self.waiting:
            while waiting:
                self.waiters -= 1
                waiting.popleft().outcome.set_result(None)


def _never(purpose: Purpose, key: ChunkKey | None) -> bool:
    return False


async def done_by(work: asyncio.Future[Any], until_s: Callable[[], float]) -> bool:
    """Wait for `work` until the loop time `until_s()`, which may move meanwhile. Return True if it is done. `work` is never
    cancelled, also when this is."""
    loop = asyncio.get_running_loop()
    while not work.done() and (left_s := until_s() - loop.time()) > 0:
        await asyncio.wait([work], timeout=left_s)
    return work.done()
