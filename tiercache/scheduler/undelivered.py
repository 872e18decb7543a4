"""Chunks that a caller's memory did not take, counted and said in the log: not each, since who is wrong once is so again."""

from __future__ import annotations

import asyncio
import logging

from tiercache.scheduler.reads import ReaderStatistics

logger = logging.getLogger("tiercache.reader")

EVERY_S = 60.0


class Undelivered:
    """The first one is said at once, the others once a minute, with their number."""

    def __init__(self, counters: ReaderStatistics) -> None:
        self._counters = counters
        self._unsaid = 0
        self._said_s: float | None = None

    def note(self, error: Exception, where: str = "") -> None:
        """One chunk, or a part of a batch that failed as a whole. `where`: a phrase for the log line."""
        self._counters.sink_failures += 1
        self._unsaid += 1
        now_s = asyncio.get_running_loop().time()
        if self._said_s is not None and now_s < self._said_s + EVERY_S:
            return
        more = f" ({self._unsaid} times since this was said last)" if self._unsaid > 1 else ""
        logger.warning("a chunk could not be delivered%s: %r%s", where, error, more)
        self._said_s, self._unsaid = now_s, 0
