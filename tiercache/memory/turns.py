"""Turns at something scarce, a slot or a place at a tier: first come, first served, and demand before what may be wanted."""

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
    """Somebody who waits."""

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
        """`take` gives one if one may go now, and None else; `give_back` gets one that nobody wants any more. `by_tier`:
        among reads, one whose tier has had its share does not stand before those of other tiers."""
        self._take = take
        self._give_back = give_back
        self._by_tier = by_tier
        self.stands_aside: Callable[[Purpose, ChunkKey | None], bool] = _never
        """Whether it is his own affair that who waits for this chunk gets nothing: others do not wait for him."""
        self.waiting: list[deque[Turn[T]]] = [deque() for _ in Purpose]
        self.waiters = 0
        self.closed = False

    async def wait(
        self, purpose: Purpose, until_s: Callable[[], float], tier: str | None = None, key: ChunkKey | None = None
    ) -> T | None:
        """One by a loop time that may move meanwhile; None at that time, and when all is closed. Cancelled, it holds
        nothing."""
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
        """One as soon as there is one; None: all is closed. Who gives up says so with `withdraw`; else it is his. `tier` is
        what somebody reads from, `key` the chunk that it is for."""
        turn: Turn[T] = Turn(asyncio.get_running_loop().create_future(), tier, key)
        if self.closed:
            turn.outcome.set_result(None)
        else:
            self.waiting[purpose].append(turn)
            self.waiters += 1
            self.serve()
        return turn.outcome

    def withdraw(self, purpose: Purpose, requested: asyncio.Future[T | None]) -> None:
        """Nobody waits for it any more: what came meanwhile goes to the next one."""
        if requested.done():
            taken = requested.result()
            if taken is not None:
                self._give_back(taken, purpose)
            return
        waiting = self.waiting[purpose]
        waiting.remove(next(turn for turn in waiting if turn.outcome is requested))
        self.waiters -= 1
        self.serve()  # whom it stood before

    def serve(self) -> None:
        """Give to those who wait what may go by now."""
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
        """Nobody gets one any more."""
        self.closed = True
        for waiting in self.waiting:
            while waiting:
                self.waiters -= 1
                waiting.popleft().outcome.set_result(None)


def _never(purpose: Purpose, key: ChunkKey | None) -> bool:
    return False


async def done_by(work: asyncio.Future[Any], until_s: Callable[[], float]) -> bool:
    """Whether `work` is done by a loop time that may move while one waits. Left alone, also when this is cancelled."""
    loop = asyncio.get_running_loop()
    while not work.done() and (left_s := until_s() - loop.time()) > 0:
        await asyncio.wait([work], timeout=left_s)
    return work.done()
