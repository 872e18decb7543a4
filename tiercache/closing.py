"""How a cache gives back what it has: by one deadline, whatever hangs and whoever is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any

from tiercache.memory.workers import look_away

logger = logging.getLogger("tiercache")

GRACE_S = 0.5
"""What all parts together have to give back what they hold, at least: also where the deadline has passed."""

_LEAST_S = 0.1
"""What one of them has though others have used up the time."""


Part = tuple[str, Callable[[], Coroutine[Any, Any, object]]]
"""What it is called in a log, and how it is closed."""


class Deadline:
    """A loop time in seconds that may come nearer while somebody waits for it."""

    def __init__(self, at_s: float = float("inf")) -> None:
        self.at_s = at_s
        self.least_s = float("-inf")
        """Whatever is brought forward, the deadline is not before this."""
        self._moved = asyncio.Event()

    @property
    def until_s(self) -> float:
        return max(self.at_s, self.least_s)

    def bring_forward(self, at_s: float) -> None:
        if at_s < self.at_s:
            self.at_s = at_s
            self._moved.set()
            self._moved = asyncio.Event()

    async def bounds(self, work: Coroutine[Any, Any, None]) -> None:
        """Until `work` has ended, or until the deadline. Cancelled, the deadline is now."""
        task = asyncio.ensure_future(work)
        with contextlib.suppress(asyncio.CancelledError):
            await self._ended([task], float("-inf"))
        task.cancel()
        task.add_done_callback(look_away)

    async def ended(self, tasks: Collection[asyncio.Future[Any]], least_s: float = float("-inf")) -> None:
        """Until all `tasks` have ended, or until the deadline, but no sooner than at `least_s`. Not kept from it by
        cancellation: a loop that shuts down cancels everything."""
        done = False
        while not done:
            with contextlib.suppress(asyncio.CancelledError):
                await self._ended(tasks, least_s)
                done = True

    async def _ended(self, tasks: Collection[asyncio.Future[Any]], least_s: float) -> None:
        loop = asyncio.get_running_loop()
        while left := [task for task in tasks if not task.done()]:
            left_s = max(self.until_s, least_s) - loop.time()
            if left_s <= 0.0:
                return
            moved = loop.create_task(self._moved.wait())
            try:
                timeout_s = None if left_s == float("inf") else left_s
                await asyncio.wait([*left, moved], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                moved.cancel()


class Lingering:
    """What hung when a cache was closed, and may still touch its memory."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        """`on_end` is called when one of them has ended."""
        self.tasks: set[asyncio.Task[Any]] = set()
        self._on_end = on_end

    def keep(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        for task in tasks:
            self.tasks.add(task)
            task.add_done_callback(self._ended)

    @property
    def hanging(self) -> int:
        """How many have not ended."""
        return sum(not task.done() for task in self.tasks)

    @property
    def called_off(self) -> int:
        """Of how many nobody knows: who waited for them was cancelled, as a loop that is shut down does with all."""
        return sum(task.cancelled() for task in self.tasks)

    async def ended(self, until_s: float) -> None:
        """Until all have, or until that loop time: what was merely under way ends soon. Not kept from it by cancellation."""
        loop = asyncio.get_running_loop()
        while (unfinished := [task for task in self.tasks if not task.done()]) and loop.time() < until_s:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(unfinished, timeout=until_s - loop.time())
        # What ended a moment ago has told those who wait for it, and not us: callbacks come with the next step.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        # A wait that was cancelled says nothing about the thread that it waited for: that one stays for good.
        if not task.cancelled():
            self.tasks.discard(task)
            self._on_end()


async def closed(deadline: Deadline, *parts: Part) -> list[asyncio.Task[object]]:
    """Close `parts` side by side. What has not ended by then is left to itself, and returned.

    Whoever cancels this one (a loop that shuts down cancels everything, at any moment) keeps nothing from being given back.
    """
    loop = asyncio.get_running_loop()
    least_s = loop.time() + _LEAST_S
    left: list[asyncio.Task[object]] = []
    for _ in range(2):
        tasks = {loop.create_task(close(), name=f"tiercache-close-{name}"): (name, close) for name, close in parts}
        await deadline.ended(tasks, least_s)
        for task, (name, _) in tasks.items():
            task.add_done_callback(look_away)
            if not task.done():
                logger.warning("%s: does not close in time, and is left behind", name)
                left.append(task)
            elif not task.cancelled() and (error := task.exception()) is not None:
                logger.error("%s: closing failed", name, exc_info=error)
        # Cancelled with everything else, and not by us: those have not ended what they do.
        parts = tuple(part for task, part in tasks.items() if task.done() and task.cancelled())
        if not parts:
            break
    return left
