"""Who goes first at a device: a prefetch stands still between two parts of its chunk while a read is under way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial

from tiercache.core.keys import ChunkKey

_PATIENCE_S = 0.05
"""How long a prefetch stands still altogether: reads that come one after the other, or hang, do not keep it for ever."""


class Precedence:
    """Belongs to the event loop. The threads of prefetches only wait for what is decided here."""

    def __init__(self) -> None:
        self._reads = 0
        self._prefetches: dict[ChunkKey, tuple[threading.Event, asyncio.Future[int | None]]] = {}
        """Those that stand still for others, and what lets each go on."""

    def read(self, work: asyncio.Future[int | None]) -> asyncio.Future[int | None]:
        """A read that goes first, until it has ended."""
        self._reads += 1
        if self._reads == 1:
            for may_go_on, _ in self._prefetches.values():
                may_go_on.clear()
        work.add_done_callback(self._ended)
        return work

    def prefetch(
        self, key: ChunkKey, begin: Callable[[Callable[[], None]], asyncio.Future[int | None]]
    ) -> asyncio.Future[int | None]:
        """`begin` a prefetch, whose thread calls what it is given between two parts of the chunk."""
        may_go_on = threading.Event()
        if not self._reads:
            may_go_on.set()
        work = begin(_Pause(may_go_on))
        self._prefetches[key] = may_go_on, work
        work.add_done_callback(partial(self._arrived, key))
        return work

    def hurry(self, key: ChunkKey) -> None:
        """Somebody waits for a chunk that is being prefetched: it is a read like others."""
        found = self._prefetches.pop(key, None)
        if found is not None:
            may_go_on, work = found
            may_go_on.set()
            self.read(work)

    def _arrived(self, key: ChunkKey, work: asyncio.Future[int | None]) -> None:
        if self._prefetches.get(key, (None, None))[1] is work:
            del self._prefetches[key]

    def _ended(self, _: asyncio.Future[int | None]) -> None:
        self._reads -= 1
        if not self._reads:
            for may_go_on, _ in self._prefetches.values():
                may_go_on.set()


class _Pause:
    """Of one prefetch. Called in its thread."""

    def __init__(self, may_go_on: threading.Event) -> None:
        self._may_go_on = may_go_on
        self._left_s = _PATIENCE_S

    def __call__(self) -> None:
        if self._left_s > 0 and not self._may_go_on.is_set():
            began_s = time.monotonic()
            self._may_go_on.wait(self._left_s)
            self._left_s -= time.monotonic() - began_s
