"""Daemon threads for large calls that release the GIL.

A `ThreadPoolExecutor` joins its threads at interpreter exit, so a read from a hung mount would block the exit of the
engine, and its hand-over to the loop is slower.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from tiercache.errors import CacheClosed, TierCacheError, TierUnavailable

T = TypeVar("T")
_Work = TypeVar("_Work", bound="asyncio.Future[Any]")

GIVE_UP_S = 30.0
"""Longest wait in seconds for a call that uses the caller's memory after a cancellation or the deadline."""

_AGAIN_S = 0.01
"""A call past its deadline is checked again after this time while there is a thread for each call: it begins soon."""


class NotBegun(TierCacheError):
    """No thread was free for a call by its deadline, or its caller was cancelled before: the call never runs."""


class Workers:
    """A pool of `threads` daemon threads that run calls for one event loop. Threads start on first use.

    The queue has no bound of its own: callers bound their submissions (tiers by their concurrency, copies by the slots
    of the arena). A call that never returns occupies only its thread; calls that wait for a thread can be withdrawn.
    """

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self.threads = threads
        self._waiting: OrderedDict[asyncio.Future[Any], tuple[Callable[..., Any], tuple[Any, ...]]] = OrderedDict()
        """Calls that have not begun, oldest first. A thread removes a call to run it; `withdraw` removes it as well."""
        self._waiters: dict[asyncio.Future[Any], asyncio.Future[None]] = {}
        """Futures that end with a call, for `_wait`: cancelling them does not affect the call's own future."""
        self._tickets: SimpleQueue[None] = SimpleQueue()
        """At least one ticket per waiting call, and one per thread that has to end. Threads block on it."""
        self._started = 0
        self.unfinished = 0
        """Number of calls submitted and not ended."""
        self.abandoned = 0
        """Number of calls that use the memory of a caller that waits for them no longer."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._wake_pending = False
        self._closed = False

    def submit(self, call: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Run `call(*arguments)` in a thread. Cancelling the future abandons the result; the call itself continues.

        If a thread cannot be started, the running threads take the call. Raises TierUnavailable if none runs.
        """
        if self._closed:
            raise CacheClosed(f"workers {self.name} are closed")
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None:
                raise RuntimeError(f"workers {self.name} belong to another event loop")
            self._loop = loop
        if self._started < min(self.threads, self.unfinished + 1):
            self.start_thread()
        future: asyncio.Future[T] = loop.create_future()
        self.unfinished += 1
        self._waiting[future] = call, arguments
        self._tickets.put(None)
        return future

    async def ended_by(self, work: asyncio.Future[T], deadline_s: float) -> T:
        """Wait for a submitted call that uses the caller's memory, and return its result.

        A call that has not begun by `deadline_s`, a loop time, is withdrawn: raises NotBegun. A call that has begun is
        awaited. Raises TierUnavailable if it has not ended 30 s after the deadline; it still uses that memory then.
        Cancellation withdraws a call that has not begun, and otherwise behaves as in `wait_shielded`.
        """
        loop = work.get_loop()
        try:
            await self._wait(work, deadline_s)
            while work in self._waiting and self.unfinished <= self._started:
                await self._wait(work, loop.time() + _AGAIN_S)
            if not work.done() and not self.withdraw(work):
                await self._wait(work, deadline_s + GIVE_UP_S)
        except asyncio.CancelledError:
            self.withdraw(work)
            await wait_uncancelled([work], GIVE_UP_S)
            raise
        finally:
            if not work.done():
                self.abandoned += 1
                work.add_done_callback(self._finished)
        if not work.done():
            raise TierUnavailable(
                f"a copy has not ended {GIVE_UP_S:.0f} s after its deadline; its memory is still in use"
            )
        return work.result()

    async def _wait(self, work: asyncio.Future[Any], until_s: float) -> None:
        """Wait for a call, until the loop time `until_s` at most. `asyncio.wait` would take another round of the loop."""
        if work.done():
            return
        loop = work.get_loop()
        ended = self._waiters[work] = loop.create_future()
        timer = loop.call_at(until_s, _end, ended)
        try:
            await ended
        finally:
            timer.cancel()
            del self._waiters[work]

    def _finished(self, work: asyncio.Future[Any]) -> None:
        self.abandoned -= 1
        retrieve_exception(work)

    def withdraw(self, work: asyncio.Future[Any]) -> bool:
        """Withdraw a submitted call, whose future then raises NotBegun. Return False if a thread has begun it."""
        if self._waiting.pop(work, None) is None:
            return False
        if not self._closed:  # otherwise the remaining tickets end the threads
            with contextlib.suppress(Empty):
                self._tickets.get_nowait()
        self.unfinished -= 1
        if not work.done():
            work.set_exception(NotBegun(f"{self.name}: no thread was free for a call by its deadline"))
        return True

    def close(self) -> None:
        """Let the threads end after the calls already submitted. Does not wait, since a call may hang."""
        if not self._closed:
            self._closed = True
            for _ in range(self._started):
                self._tickets.put(None)

    def start_thread(self) -> None:
        """Start a further thread. Raises TierUnavailable if none can be started and none runs."""
        thread = threading.Thread(target=self._run, name=f"tiercache-{self.name}-{self._started + 1}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._started:
                raise TierUnavailable(
                    f"no thread can be started for {self.name}: {error}; raise the limit of processes and threads "
                    "(ulimit -u, pids.max of the container) or free memory"
                ) from error
        else:
            self._started += 1

    def _run(self) -> None:
        while True:
            self._tickets.get()
            try:
                future, (call, arguments) = self._waiting.popitem(last=False)
            except KeyError:
                if self._closed:
                    return
                continue  # it was withdrawn
            assert self._loop is not None  # since a call was submitted
            result: Any = None
            error: BaseException | None = None
            try:
                result = call(*arguments)
            except BaseException as caught:  # passed to the waiter
                error = caught
            del call, arguments  # release the caller's memory before the loop is notified of the end
            self._done.append((future, result, error))
            del future, result, error
            # A single wake-up settles every call that has ended by then. The flag is set after the append and cleared
            # before the loop drains, so a result always has a later wake-up.
            if not self._wake_pending:
                self._wake_pending = True
                try:
                    self._loop.call_soon_threadsafe(self._settle)
                except RuntimeError:
                    # The loop is closed. Calls submitted before `close` still run, since they may be clean-ups.
                    if not self._closed:
                        return

    def _settle(self) -> None:
        self._wake_pending = False
        while self._done:
            future, result, error = self._done.popleft()
            self.unfinished -= 1
            if (waiter := self._waiters.get(future)) is not None:
                _end(waiter)
            if future.cancelled():
                continue
            if isinstance(error, StopIteration):
                # A future rejects StopIteration, and its waiter, and those of later calls, would wait for ever.
                error, cause = RuntimeError("a call in a worker thread raised StopIteration"), error
                error.__cause__ = cause
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)


def _end(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def wait_shielded(work: asyncio.Future[T]) -> T:
    """Wait for work that uses the caller's memory: cancellation is raised only after the work has ended.

    A call that hangs in a device is abandoned 30 s after the cancellation, since a loop that shuts down must not
    hang with it. Its memory belongs to the arena, which stays mapped.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await wait_uncancelled([work], GIVE_UP_S)
        raise


async def wait_uncancelled(works: Sequence[asyncio.Future[Any]], timeout_s: float) -> bool:
    """Wait until all of `works` have ended, for `timeout_s` at most.

    Cancellation does not end the wait. Returns True if there was one, which the caller has to raise. Exceptions of `works`
    count as retrieved.
    """
    cancelled, loop = False, asyncio.get_running_loop()
    until_s = loop.time() + timeout_s
    while (left := [work for work in works if not work.done()]) and (left_s := until_s - loop.time()) > 0:
        try:
            await asyncio.wait(left, timeout=left_s)
        except asyncio.CancelledError:
            cancelled = True
    for work in works:
        work.add_done_callback(retrieve_exception)
    return cancelled


def once_ended(works: Sequence[asyncio.Future[Any]], call: Callable[[], object]) -> None:
    """Call `call` when all of `works` have ended, including abandoned works; at once if they have."""
    left = [work for work in works if not work.done()]
    if not left:
        call()
        return

    def ended(work: asyncio.Future[Any]) -> None:
        retrieve_exception(work)
        left.remove(work)
        if not left:
            call()

    for work in tuple(left):
        work.add_done_callback(ended)


def retrieve_exception(work: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a future without a waiter, since asyncio logs exceptions that are never retrieved."""
    if not work.cancelled():
        work.exception()


def was_cancelled() -> bool:
    """Return True if the current task was cancelled: otherwise its CancelledError is the failure of another call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def all_or_none(work: Sequence[asyncio.Future[Any]]) -> None:
    """Wait for all of `work`. If this call or any of `work` fails or is cancelled, cancel the others and wait for them.

    A coroutine that is closed instead (its loop has ended) cancels them and does not wait.
    """
    together = asyncio.gather(*work)
    together.add_done_callback(retrieve_exception)  # a closed caller does not retrieve it
    try:
        await together
    except GeneratorExit:
        cancel_all(work)
        raise
    except BaseException:
        cancel_all(work)
        await asyncio.gather(*work, return_exceptions=True)
        raise


def cancel_all(work: Iterable[_Work]) -> list[_Work]:
    """Cancel unfinished work, and return it. Does nothing if the loop of `work` is closed already."""
    left = [item for item in work if not item.done() and not item.get_loop().is_closed()]
    for item in left:
        item.cancel()
    return left
