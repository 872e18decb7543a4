"""How a cache gives back what it has: by one deadline, whatever hangs and whoever is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from tiercache.device.device import Device
from tiercache.memory.arena import Arena
from tiercache.memory.slots import SlotPool
from tiercache.memory.workers import retrieve_exception
from tiercache.scheduler.reads import Reader
from tiercache.scheduler.writer import FlushReport, TierWriter

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
        task.add_done_callback(retrieve_exception)

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


class Operations:
    """What is under way. `with` it: one more, until the end of that."""

    __slots__ = ("_idle", "_when_ended", "under_way")

    def __init__(self, when_ended: Callable[[], None]) -> None:
        self.under_way = 0
        self._when_ended = when_ended
        self._idle: asyncio.Event | None = None

    async def ended(self) -> None:
        """Until none is under way."""
        if self.under_way:
            self._idle = self._idle or asyncio.Event()
            self._idle.clear()
            await self._idle.wait()

    def __enter__(self) -> None:
        self.under_way += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.under_way -= 1
        if not self.under_way:
            if self._idle is not None:
                self._idle.set()
            self._when_ended()


class AbandonedTasks:
    """What hung when a cache was opened or closed, and may still touch its memory."""

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
            task.add_done_callback(retrieve_exception)
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


class Closing:
    """How a cache gives back what it took: in reverse, by one deadline; memory last, when nothing may touch it any more."""

    def __init__(self) -> None:
        self.deadline = Deadline()
        self.device: Device | None = None
        self.arena: Arena | None = None
        self.pool: SlotPool | None = None
        self.users: list[TierWriter | Reader] = []
        """Who touches that memory, and knows what of it was left behind."""
        self.abandoned = AbandonedTasks(self._give_memory_back)
        self.operations = Operations(self._give_memory_back)
        """A close waits for those."""
        self.reads = Operations(self._give_memory_back)
        """It does not wait for these: it ends what they wait for."""
        self.task: asyncio.Task[FlushReport] | None = None
        self.taken = AsyncExitStack()
        self.taken.callback(self._end)
        self._ended = False
        self._closers = 0
        """Who waits for `task`."""

    @property
    def stuck(self) -> int:
        """Operations that outlived their deadline and still hold a slot."""
        return len(self._left_behind()) + (self.device.unfinished if self.device is not None else 0)

    def push(self, parts: Iterable[Part]) -> None:
        """Close those that `parts` has by then, side by side, and before all that was pushed earlier."""

        async def close() -> None:
            self.abandoned.keep(await closed(self.deadline, *parts))

        self.taken.push_async_callback(close)

    async def settle(self) -> None:
        """Give what was left behind a little time: what was merely under way ends soon."""
        self.abandoned.keep(self._left_behind())
        await self.abandoned.ended(min(self.deadline.until_s, asyncio.get_running_loop().time() + GRACE_S))

    async def let_end(self) -> None:
        """Those that waited for memory are told that there will be none, and need a moment to end."""
        if self.operations.under_way:
            deadline = Deadline(asyncio.get_running_loop().time() + _LEAST_S)
            await deadline.bounds(self.operations.ended())

    async def run(self) -> None:
        """Give everything back by the deadline, with `GRACE_S` from now at least."""
        self.deadline.least_s = asyncio.get_running_loop().time() + GRACE_S
        await self.taken.aclose()

    async def by(self, at_s: float, close: Callable[[], Coroutine[Any, Any, FlushReport]]) -> FlushReport:
        """What comes of `close`, which the first of several callers begins; the nearest of their deadlines counts.

        Cancelled, the deadline is now, unless others wait too, and CancelledError comes out when everything is given back.
        """
        loop = asyncio.get_running_loop()
        self.task = self.task or loop.create_task(close(), name="tiercache-close")
        self.deadline.bring_forward(at_s)
        self._closers += 1
        try:
            return await asyncio.shield(self.task)
        except asyncio.CancelledError:
            if self._closers == 1:
                self.deadline.bring_forward(loop.time())
                while not self.task.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([self.task])
            raise
        finally:
            self._closers -= 1

    def _end(self) -> None:
        self._ended = True
        if hanging := self.abandoned.hanging + self.operations.under_way:
            logger.warning("%d operations hang in a device; their memory stays mapped until they end", hanging)
        if called_off := self.abandoned.called_off:
            logger.warning(
                "the event loop was shut down before the cache was closed, with %d operations under way: its memory stays "
                "mapped. Use `async with TierCache.open(...)`, or await `close`, before the loop ends",
                called_off,
            )
        self._give_memory_back()

    def _give_memory_back(self) -> None:
        if not self._ended:
            return  # after every operation of a cache in use
        if any(task.done() for task in self._left_behind()):
            asyncio.get_running_loop().call_soon(self._give_memory_back)  # what they owe at their end comes before that
        elif not (self.abandoned.tasks or self.stuck or self.operations.under_way or self.reads.under_way):
            for part in (self.device, self.pool, self.arena):  # a view of the arena keeps all of it mapped
                if part is not None:
                    part.close()

    def _left_behind(self) -> list[asyncio.Task[Any]]:
        return [task for user in self.users for task in user.abandoned]
