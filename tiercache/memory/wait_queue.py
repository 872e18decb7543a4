"""Queue for a scarce resource, a slot or a place at a tier: demand before prefetch, first come, first served."""

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
class Waiter(Generic[T]):
    outcome: asyncio.Future[T | None]
    tier: str | None
    key: ChunkKey | None


class WaitQueue(Generic[T]):
    def __init__(
        self,
        take: Callable[[Purpose, str | None, ChunkKey | None], T | None],
        give_back: Callable[[T, Purpose], None],
        *,
        by_tier: bool = False,
    ) -> None:
        """`take` returns an item if one may be taken now, else None; `give_back` gets an item whose waiter has given up.

        With `by_tier`, a read whose tier has had its share does not block the reads of other tiers behind it.
        """
        self._take = take
        self._give_back = give_back
        self._by_tier = by_tier
        self.blocks_only_itself: Callable[[Purpose, ChunkKey | None], bool] = _never
        """Returns True if a waiter for this chunk is blocked only by its own quota, so that others may overtake it."""
        self.waiting: list[deque[Waiter[T]]] = [deque() for _ in Purpose]
        self.waiters = 0
        self.closed = False
        self._pauses = 0

    async def wait(
        self, purpose: Purpose, until_s: Callable[[], float], tier: str | None = None, key: ChunkKey | None = None
    ) -> T | None:
        """Return an item; None at the loop time `until_s()`, which may change meanwhile, and when the queue is closed.
        Holds nothing if cancelled."""
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
        """Return a future of an item; None when the queue is closed. The item belongs to the caller, unless it calls
        `withdraw`. `tier` is the tier that reads into it, `key` the chunk that it is for."""
        waiter: Waiter[T] = Waiter(asyncio.get_running_loop().create_future(), tier, key)
        if self.closed:
            waiter.outcome.set_result(None)
        else:
            self.waiting[purpose].append(waiter)
            self.waiters += 1
            self.serve()
        return waiter.outcome

    def withdraw(self, purpose: Purpose, requested: asyncio.Future[T | None]) -> None:
        """Give a request up; an item that has come goes to the next waiter."""
        if requested.done():
            taken = requested.result()
            if taken is not None:
                self._give_back(taken, purpose)
            return
        waiting = self.waiting[purpose]
        waiting.remove(next(waiter for waiter in waiting if waiter.outcome is requested))
        self.waiters -= 1
        self.serve()  # it may have blocked those behind it

    def pause(self) -> None:
        """Serve no waiter until `resume`, which must follow without an await."""
        self._pauses += 1

    def resume(self) -> None:
        self._pauses -= 1
        self.serve()

    def serve(self) -> None:
        """Give waiters the items that may be taken by now."""
        if not self.waiters or self._pauses:
            return
        for purpose in (READ, WRITE, PREFETCH):
            waiting = self.waiting[purpose]
            while waiting:
                for waiter in waiting:
                    taken = self._take(purpose, waiter.tier, waiter.key)
                    if taken is not None:
                        break
                    if not (purpose is READ and self._by_tier) and not self.blocks_only_itself(purpose, waiter.key):
                        break
                if taken is None:
                    break
                waiting.remove(waiter)
                self.waiters -= 1
                waiter.outcome.set_result(taken)

    def close(self) -> None:
        """End all waits; later ones end at once."""
        self.closed = True
        for waiting in self.waiting:
            while waiting:
                self.waiters -= 1
                waiting.popleft().outcome.set_result(None)


def _never(purpose: Purpose, key: ChunkKey | None) -> bool:
    return False


async def done_by(work: asyncio.Future[Any], until_s: Callable[[], float]) -> bool:
    """Wait for `work` until the loop time `until_s()`, which may change meanwhile; return True if it is done.

    Leaves `work` alone, also when this is cancelled.
    """
    loop = asyncio.get_running_loop()
    while not work.done() and (left_s := until_s() - loop.time()) > 0:
        await asyncio.wait([work], timeout=left_s)
    return work.done()
