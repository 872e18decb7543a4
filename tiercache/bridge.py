"""The cache for a synchronous engine: a thread with an event loop, and the TierCache that lives on it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from tiercache.cache import TierCache
from tiercache.config import Config
from tiercache.control.naming import Naming
from tiercache.core.layout import Layout
from tiercache.device.driver import Driver
from tiercache.errors import CacheClosed
from tiercache.scheduler.fan_out import FlushReport

T = TypeVar("T")

_LET_GO_S = 0.5
"""What the thread has to end once the cache is closed."""


class CacheThread:
    """Starts the thread, opens the cache, and raises what opening raised. `device` and `naming` as for `TierCache`.

    `cache` may be used only inside coroutines given to `submit` and in functions given to `loop.call_soon_threadsafe`.
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
        self._stop: asyncio.Event
        self._close_timeout_s = 0.0
        self.loop: asyncio.AbstractEventLoop
        cache = TierCache(config, layout, device=device, naming=naming)
        self._thread = threading.Thread(target=self._run, args=(cache,), name=name, daemon=True)
        self._thread.start()
        self.cache = self._opened.result()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the cache's loop. Cancelling the future cancels the coroutine."""
        if self._finished.done() or not self._thread.is_alive():
            coroutine.close()
            raise CacheClosed("the cache is closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self, timeout_s: float = 10.0) -> FlushReport:
        """Write what is queued for up to `timeout_s`, close the cache and end the thread. Idempotent.

        A thread that a hung device keeps is left behind.
        """
        if self._thread.is_alive() and not self._finished.done():
            self._close_timeout_s = timeout_s
            self.loop.call_soon_threadsafe(self._stop.set)
        report = self._finished.result(timeout_s + 10.0)
        self._thread.join(_LET_GO_S)
        return report

    def _run(self, cache: TierCache) -> None:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self._serve(cache))

    async def _serve(self, cache: TierCache) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            await cache.start()
        except BaseException as error:
            self._opened.set_exception(error)
            return
        self._opened.set_result(cache)
        try:
            await self._stop.wait()
            self._finished.set_result(await cache.close(self._close_timeout_s))
        except BaseException as error:
            if not self._finished.done():
                self._finished.set_exception(error)


def _loop_factory() -> Any:
    """uvloop's when it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
