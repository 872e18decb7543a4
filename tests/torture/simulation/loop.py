"""The event loop of a simulated process: asyncio's contract on the world's clock."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
from asyncio import events, futures, tasks
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

from tests.torture.simulation.world import MOST_TURNS

if TYPE_CHECKING:
    from tests.torture.simulation.world import Strand, World

_SHUFFLED = 4
"""One seed in so many runs callbacks in an order by seed."""


_Base: Any = asyncio.AbstractEventLoop
"""Most of what a loop may be asked is not asked of this one: it raises NotImplementedError."""


class _Handle:
    """What `asyncio.Handle` is to who holds one."""

    __slots__ = ("_arguments", "_callback", "_context", "_is_cancelled")

    def __init__(self, callback: Callable[..., object], arguments: tuple[Any, ...], context: Context | None) -> None:
        self._callback: Callable[..., object] | None = callback
        self._arguments = arguments
        self._context = copy_context() if context is None else context
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True
        self._callback = None
        self._arguments = ()


class SimulatedLoop(_Base):  # type: ignore[misc]
    """Runs in the strand that calls `run_until_complete`. Threads reach it by `call_soon_threadsafe` alone."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.strand: Strand
        self.is_dead = False
        self.errors: list[dict[str, Any]] = []
        """What asyncio reports as nobody's: exceptions never retrieved, callbacks that raised."""
        self._ready: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._order = 0
        self._waits = False
        self._closed = False
        self._stopping = False
        self.after_each: Callable[[], None] | None = None
        """Called after each callback."""
        self._shuffle: random.Random | None = world.chance if world.seed % _SHUFFLED == _SHUFFLED - 1 else None

    def time(self) -> float:
        return self.world.now_s

    def run_until_complete(self, main: Any) -> Any:
        future = asyncio.ensure_future(main, loop=self)
        future.add_done_callback(self._stop)
        self._stopping = False
        events._set_running_loop(self)
        try:
            self._run()
        finally:
            events._set_running_loop(None)
        future.remove_done_callback(self._stop)
        return future.result()

    def _stop(self, future: object) -> None:
        self._stopping = True

    def _run(self) -> None:
        ready = self._ready
        timers = self._timers
        world = self.world
        others = world.ready
        while not self._stopping:
            while timers and (timers[0][2]._is_cancelled or timers[0][0] <= world.now_s):
                timer = heapq.heappop(timers)[2]
                if not timer._is_cancelled:
                    ready.append(timer)
            if not ready:
                self._waits = True
                world.wait(timers[0][0] if timers else None)
                self._waits = False
                continue
            if self._shuffle is not None and len(ready) > 1:
                ready.rotate(-int(self._shuffle.random() * len(ready)))
            handle = ready.popleft()
            callback = handle._callback
            if callback is not None:
                world.turns += 1
                if world.turns > MOST_TURNS:
                    raise world.spins()
                try:
                    handle._context.run(callback, *handle._arguments)
                except Exception as error:
                    self.call_exception_handler({"message": f"Exception in callback {callback!r}", "exception": error})
                if self.after_each is not None:
                    self.after_each()
            if others:
                world.wake(self.strand)
                world.wait()

    # What asyncio asks of a loop

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        handle = _Handle(callback, args, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        handle = self.call_soon(callback, *args, context=context)
        if self._waits:
            self.world.wake(self.strand)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_at(self.world.now_s + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        self._check_open()
        timer = _Handle(callback, args, context)
        self._order += 1
        heapq.heappush(self._timers, (when, self._order, timer))
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        return futures.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None, **more: Any
    ) -> asyncio.Task[Any]:
        self._check_open()
        return tasks.Task(coro, loop=self, name=name, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """In a strand of its own."""
        future = self.create_future()

        def run() -> None:
            result, failure = None, None
            try:
                result = func(*args)
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # nobody waits any more: the loop is closed
                self.call_soon_threadsafe(_settle, future, result, failure)

        self.world.start(self.strand.process, "executor", run)
        return future

    get_debug = staticmethod(bool)
    """False: in C, because each future asks."""

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.is_dead:
            self.errors.append(context)

    def left(self) -> list[str]:
        """Tasks that have not ended, and timers that are set, but for those of the simulation."""
        timers = [timer._callback for _, _, timer in self._timers if timer._callback is not None]
        tiercaches = [call for call in timers if not getattr(call, "__module__", "").startswith("tests.torture.")]
        return [repr(each) for each in (*asyncio.all_tasks(self), *tiercaches)]

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("Event loop is closed")


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if not future.cancelled():
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
