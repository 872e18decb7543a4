"""Chunks between vLLM's CPU tier and the cache: what moves them, on the cache's loop, and what became of it.

vLLM may give a row to somebody else as soon as a transfer is reported to have ended. So it is reported when nothing touches
the row any more, however late that is; everything else has a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tiercache.cache import TierCache
from tiercache.core.keys import ChunkKey

logger = logging.getLogger("tiercache.vllm")

_Copy = Callable[[int, np.ndarray], None]


@dataclass(frozen=True)
class Transfer:
    """The chunks of one job of vLLM's, and the rows of its CPU tier that they belong in."""

    job_id: int
    keys: Sequence[ChunkKey]
    rows: Sequence[np.ndarray]
    """uint8 vectors, one a key. Nobody else writes to them until the transfer has ended."""
    is_prefix: bool = False
    """Whether the chunks follow one another."""


@dataclass(frozen=True)
class Ended:
    job_id: int
    done: Sequence[bool]
    """By chunk: of a load, whether it is in its row; of a store, whether it is in the cache."""
    seconds: float


class _Copies:
    """Copies between rows and slots of the arena, which run on the cache's threads."""

    def __init__(self, rows: Sequence[np.ndarray]) -> None:
        self.done = [False] * len(rows)
        self._rows = rows
        self._under_way = 0
        self._lock = threading.Lock()
        self._idle: asyncio.Event | None = None
        """Made by whoever waits for the last of them."""
        self._loop = asyncio.get_running_loop()

    def into_row(self, position: int, chunk: np.ndarray) -> None:
        row = self._rows[position]
        if chunk.nbytes != row.nbytes:
            raise ValueError(f"a chunk has {chunk.nbytes} bytes, vLLM's row {row.nbytes}")
        self._copy(position, row, chunk)

    def from_row(self, position: int, slot: np.ndarray) -> None:
        self._copy(position, slot, self._rows[position])

    def _copy(self, position: int, into: np.ndarray, source: np.ndarray) -> None:
        with self._lock:
            self._under_way += 1
        try:
            np.copyto(into, source)
            self.done[position] = True
        finally:
            with self._lock:
                self._under_way -= 1
                if self._idle is not None and not self._under_way:
                    self._loop.call_soon_threadsafe(self._idle.set)

    async def ended(self) -> None:
        """Until none is under way. Usually that is so; the cache leaves one behind where the machine hangs in it."""
        with self._lock:
            if not self._under_way:
                return
            self._idle = asyncio.Event()
        await self._idle.wait()


async def store(cache: TierCache, transfer: Transfer) -> Ended:
    """Copy rows into the cache. Tiers below are written from there, behind it. Never raises but for cancellation."""
    began_s = time.monotonic()
    copies = _Copies(transfer.rows)
    stored = 0
    try:
        items = [
            (key, row.nbytes, _bound(copies.from_row, position))
            for position, (key, row) in enumerate(zip(transfer.keys, transfer.rows, strict=True))
        ]
        # A slot that does not come free soon is not worth holding vLLM's memory for.
        stored = await cache.put_from(items, deadline_s=cache.config.queue_wait_s, prefix=transfer.is_prefix)
    except Exception as error:
        logger.warning("storing %d chunks failed: %r", len(transfer.keys), error)
    finally:
        await copies.ended()
    # Those that were there already were not copied.
    done = copies.done if stored < len(transfer.keys) else [True] * len(transfer.keys)
    return Ended(transfer.job_id, done, time.monotonic() - began_s)


async def load(cache: TierCache, transfer: Transfer) -> Ended:
    """Copy verified chunks into rows: all that can be had within `blocking_timeout_secs`, also those behind one that
    cannot. Never raises but for cancellation."""
    began_s = time.monotonic()
    until_s = began_s + cache.config.blocking_timeout_secs
    copies = _Copies(transfer.rows)
    left = list(range(len(transfer.keys)))
    try:
        while left and (left_s := until_s - time.monotonic()) > 0:
            sinks = [_bound(copies.into_row, position) for position in left]
            found = await cache.get_to([transfer.keys[position] for position in left], sinks, deadline_s=left_s)
            # The one at the gap is not there. What lies behind it may be, and may have been read already.
            left = [position for position in left[found + 1 :] if not copies.done[position]]
    except Exception as error:
        logger.warning("loading %d chunks failed: %r", len(transfer.keys), error)
    finally:
        await copies.ended()
    return Ended(transfer.job_id, copies.done, time.monotonic() - began_s)


def _bound(copy: _Copy, position: int) -> Callable[[np.ndarray], None]:
    return lambda memory: copy(position, memory)


class EndedTransfers:
    """What has ended and vLLM was not told of. Filled on the cache's loop, emptied by the scheduler's thread."""

    def __init__(self) -> None:
        self._ended: deque[Ended] = deque()
        self._changed = threading.Condition()
        self._under_way = 0

    def begin(self) -> None:
        with self._changed:
            self._under_way += 1

    def end(self, ended: Ended) -> None:
        with self._changed:
            self._ended.append(ended)
            self._under_way -= 1
            self._changed.notify_all()

    def take(self) -> list[Ended]:
        with self._changed:
            ended = list(self._ended)
            self._ended.clear()
        return ended

    def wait(self, timeout_s: float) -> bool:
        """Until none is under way; whether that came to be."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._under_way, timeout_s)
