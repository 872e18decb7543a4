"""The cache for a synchronous engine: a thread with an event loop, and its TierCache."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tiercache.cache import TierCache
from tiercache.config import Config
from tiercache.control.naming import Naming
from tiercache.core.layout import Layout
from tiercache.device.driver import Driver
from tiercache.errors import CacheClosed, ConfigError, TierCacheError
from tiercache.payloads import check_number
from tiercache.scheduler.writer import FlushReport

T = TypeVar("T")

_LET_GO_S = 0.5
"""Seconds for the thread to end once the cache is closed."""
_CLOSED = "the cache is closed"


class CacheThread:
    """A thread with an open cache. Raises the errors of opening. `device` and `naming` are as for `TierCache`.

    `cache` may be used only inside coroutines given to `submit` and in functions given to `call_soon`.
    A coroutine that raises SystemExit or KeyboardInterrupt ends the thread, as it would a program: the cache is closed
    then.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        *,
        name: str = "tiercache",
        device: Driver | None = None,
        naming: Naming | None = None,
    ) -> None:
        self._opened: concurrent.futures.Future[TierCache] = concurrent.futures.Future()
        self._finished: concurrent.futures.Future[FlushReport] = concurrent.futures.Future()
        self._stop = asyncio.Event()
        self._close_timeout_s = config.close_timeout_s
        self._submitting = threading.Lock()
        self._takes_no_more = False
        cache = TierCache(config, layout, device=device, naming=naming)
        self.loop = _make_loop()
        self._thread = threading.Thread(target=self._run, args=(cache,), name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self.loop.close()
            raise ConfigError(
                f"no thread can be started for the cache: {error}; raise the limit of processes and threads (ulimit -u, "
                "pids.max of the container) or free memory"
            ) from error
        self.cache = self._opened.result()  # ends: each part has a deadline, and the thread always sets a result

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the cache's loop. Cancelling the future cancels the coroutine. Raises CacheClosed."""
        if self._thread.is_alive():  # checked first: in a forked process this lock may be held for ever
            with self._submitting:
                if not self._takes_no_more:
                    return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        coroutine.close()
        raise CacheClosed(_CLOSED)

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Call `function` on the cache's loop, without waiting for it. Has no effect once the cache is closed."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(function, *arguments)

    def close(self, timeout_s: float = 10.0) -> FlushReport:
        """Write the queued chunks for up to `timeout_s`, close the cache and end the thread. Idempotent.

        A thread that a hung device blocks is abandoned. Raises CacheClosed in a process that was forked from the
        cache's process, since it has no such thread, and leaves the cache unchanged.
        """
        check_number("timeout_s", timeout_s)
        wait_s = min(max(0.0, timeout_s) + 10.0, threading.TIMEOUT_MAX)
        is_here = self._thread.is_alive()
        if not self._finished.done():
            if not is_here:
                raise CacheClosed("the cache belongs to the process that this one was forked from; close it there")
            self._close_timeout_s = timeout_s
            self.call_soon(self._stop.set)
        report = self._finished.result(wait_s)
        self._thread.join(_LET_GO_S)
        return report

    def _run(self, cache: TierCache) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                serving = runner.get_loop().create_task(self._serve(cache))
                while not serving.done():
                    # A coroutine may stop the loop (SystemExit, `loop.stop`): queued chunks are still written.
                    with contextlib.suppress(SystemExit, KeyboardInterrupt, RuntimeError):
                        self.loop.run_until_complete(serving)
                    self._stop.set()
        except BaseException as error:
            for result in (self._opened, self._finished):
                if not result.done():
                    result.set_exception(TierCacheError(f"the cache's thread has ended: {error!r}"))
            raise

    async def _serve(self, cache: TierCache) -> None:
        try:
            await cache.start()
        except BaseException as error:
            self._opened.set_exception(error)
            return
        self._opened.set_result(cache)
        try:
            with contextlib.suppress(asyncio.CancelledError):  # every task of the loop may be cancelled
                await self._stop.wait()
            report = await cache.close(self._close_timeout_s)
        except BaseException as error:
            self._take_no_more()
            self._finished.set_exception(TierCacheError(f"the cache could not be closed as it should be: {error!r}"))
        else:
            self._take_no_more()
            self._finished.set_result(report)

    def _take_no_more(self) -> None:
        """Refuse coroutines from now on. Coroutines submitted before begin before the loop ends."""
        with self._submitting:
            self._takes_no_more = True


def _make_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop, from uvloop if it is installed. Raises ConfigError."""
    make = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        import uvloop

        make = uvloop.new_event_loop
    try:
        return make()
    except OSError as error:
        raise ConfigError(
            f"no event loop can be made for the cache: {error}; raise the limit of open files (ulimit -n)"
        ) from error
