"""How a cache gives back what it has: by one deadline, whatever hangs and whoever is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable
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

    def __init__(self) -> None:
        self.at_s = float("inf")
        self._over = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def bring_forward(self, at_s: float) -> None:
        if at_s < self.at_s:
            self.at_s = at_s
            self.forget()
            self._timer = asyncio.get_running_loop().call_at(at_s, self._over.set)

    def forget(self) -> None:
        """Nobody waits for it any more."""
        if self._timer is not None:
            self._timer.cancel()

    async def bounds(self, work: Coroutine[Any, Any, None]) -> None:
        """Until `work` has ended, or until the deadline. Cancelled, the deadline is now."""
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(self._over.wait())]
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
            task.add_done_callback(look_away)


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

    async def ended(self, until_s: float) -> None:
        """Until all have, or until that loop time: what was merely under way ends soon. Not kept from it by cancellation."""
        loop = asyncio.get_running_loop()
        while (unfinished := [task for task in self.tasks if not task.done()]) and loop.time() < until_s:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(unfinished, timeout=until_s - loop.time())

    def _ended(self, task: asyncio.Task[Any]) -> None:
        # A wait that was cancelled says nothing about the thread that it waited for: that one stays for good.
        if not task.cancelled():
            self.tasks.discard(task)
            self._on_end()


async def closed(until_s: float, *parts: Part) -> list[asyncio.Task[object]]:
    """Close `parts` side by side until that loop time. What has not ended by then is left to itself, and returned.

    Whoever cancels this one (a loop that shuts down cancels everything, at any moment) keeps nothing from being given back.
    """
    loop = asyncio.get_running_loop()
    until_s = max(until_s, loop.time() + _LEAST_S)
    left: list[asyncio.Task[object]] = []
    for _ in range(2):
        tasks = {loop.create_task(close(), name=f"tiercache-close-{name}"): (name, close) for name, close in parts}
        while (unfinished := [task for task in tasks if not task.done()]) and loop.time() < until_s:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(unfinished, timeout=until_s - loop.time())
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
