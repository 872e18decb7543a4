"""Removals from one tier: each when nothing of its key is under way there any more, and until it is done."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tiercache.core.keys import ChunkKey
from tiercache.errors import CacheClosed
from tiercache.tiers.base import Tier

logger = logging.getLogger("tiercache.writer")

Outcome = asyncio.Future[Exception | None]
"""None when the chunk is gone, else why it is not yet."""

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


@dataclass(eq=False)
class _Removal:
    outcome: Outcome
    timer: asyncio.TimerHandle
    """For the next attempt, or when patience ends."""
    pause_s: float = _FIRST_PAUSE_S
    stalled: bool = False
    waiting: bool = False
    """For the next attempt, after one that failed."""


class Removals:
    """All methods belong to the event loop. Until a removal has ended the tier's traffic refuses its key, so one that hangs
    or fails never brings a chunk back. It is tried again until it succeeds or the cache is closed."""

    def __init__(
        self,
        tier: Tier,
        patience_s: float,
        on_end: Callable[[ChunkKey], None],
        on_stall: Callable[[ChunkKey], None],
    ) -> None:
        """`on_end` is called when a key may be written again, `on_stall` when that may take long: it failed, or has not
        ended for `patience_s`."""
        self.tier = tier
        self.patience_s = patience_s
        self._on_end = on_end
        self._on_stall = on_stall
        self._wanted: dict[ChunkKey, _Removal] = {}
        self._due: deque[ChunkKey] = deque()
        self._lanes: set[asyncio.Task[None]] = set()
        self._closed = False
        tier.traffic.on_clear = self._begin

    def __len__(self) -> int:
        return len(self._wanted)

    def stalled(self, key: ChunkKey) -> bool:
        """Whether it makes no sense to wait for the removal of `key`."""
        removal = self._wanted.get(key)
        return removal is not None and removal.stalled

    def want(self, key: ChunkKey) -> Outcome:
        """Begin to remove `key`, or join the removal that is under way: since that was wanted nothing was written. The
        outcome may be left alone; it never raises."""
        loop = asyncio.get_running_loop()
        removal = self._wanted.get(key)
        if removal is None:
            timer = loop.call_later(self.patience_s, self._give_up, key)
            removal = self._wanted[key] = _Removal(loop.create_future(), timer)
            if self.tier.traffic.want_removal(key):
                self._begin(key)
        elif removal.outcome.done():
            removal.outcome = loop.create_future()
            if removal.waiting:
                self._try_again(key)
        return removal.outcome

    def close(self) -> None:
        """Stop. Does not wait for removals that hang."""
        self._closed = True
        self._due.clear()
        for lane in self._lanes:
            lane.cancel()
        for removal in self._wanted.values():
            removal.timer.cancel()
            if not removal.outcome.done():
                removal.outcome.set_result(CacheClosed(f"{self.tier.name}: the cache was closed before a chunk was removed"))

    def _begin(self, key: ChunkKey) -> None:
        if self._closed:
            return
        self._due.append(key)
        if len(self._lanes) < self.tier.traits.write_concurrency:
            lane = asyncio.create_task(self._remove_due(), name=f"tiercache-remove-{self.tier.name}")
            self._lanes.add(lane)

    async def _remove_due(self) -> None:
        try:
            while self._due:
                await self._remove(self._due.popleft())
        finally:
            # Now, not when callbacks run: what is due in between would find a lane that takes no more.
            task = asyncio.current_task()
            assert task is not None
            self._lanes.discard(task)

    async def _remove(self, key: ChunkKey) -> None:
        removal = self._wanted[key]
        traffic = self.tier.traffic
        answered = traffic.answered
        try:
            await self.tier.remove(key)
            if traffic.questions or traffic.answered != answered:
                # They may have seen the chunk before it went, and have told the tier's index since, or tell it only now.
                if traffic.questions:
                    await asyncio.wait(list(traffic.questions))
                await self.tier.remove(key)
        except Exception as error:
            if not self._closed:
                self._failed(key, removal, error)
            return
        removal.timer.cancel()
        del self._wanted[key]
        self.tier.traffic.removed(key)
        if not removal.outcome.done():
            removal.outcome.set_result(None)
        self._on_end(key)

    def _failed(self, key: ChunkKey, removal: _Removal, error: Exception) -> None:
        if removal.outcome.done():
            logger.info("%s: a chunk could still not be removed: %s", self.tier.name, error)
        else:
            removal.outcome.set_result(error)
        removal.timer.cancel()
        removal.timer = asyncio.get_running_loop().call_later(removal.pause_s, self._try_again, key)
        removal.pause_s = min(2 * removal.pause_s, _LONGEST_PAUSE_S)
        removal.waiting = True
        self._give_up(key)

    def _try_again(self, key: ChunkKey) -> None:
        removal = self._wanted[key]
        removal.timer.cancel()
        removal.waiting = False
        self._begin(key)

    def _give_up(self, key: ChunkKey) -> None:
        removal = self._wanted[key]
        if not removal.stalled:
            removal.stalled = True
            self._on_stall(key)
