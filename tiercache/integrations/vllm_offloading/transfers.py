"""Move chunks between vLLM's CPU tier and the cache, on the cache's loop, and report the results.

vLLM may reuse a row as soon as a transfer is reported as ended. So the report waits until no copy uses the row, without
limit; everything else has a deadline.
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
    """The chunks of one vLLM job, and their rows in its CPU tier."""

    job_id: int
    keys: Sequence[ChunkKey]
    rows: Sequence[np.ndarray]
    """uint8 vectors, one per key. No other code writes to them until the transfer has ended."""
    is_prefix: bool = False
    """True if each chunk is followed by the next."""


@dataclass(frozen=True)
class Ended:
    job_id: int
    done: Sequence[bool]
    """Per chunk: True if a load has filled its row, or if a stored chunk is in the cache."""
    seconds: float


class _Copies:
    """Copies between rows and slots of the arena on the cache's threads."""

    def __init__(self, rows: Sequence[np.ndarray]) -> None:
        self.done = [False] * len(rows)
        self._rows = rows
        self._under_way = 0
        self._lock = threading.Lock()
        self._idle: asyncio.Event | None = None
        """Made by the waiter for the last copy."""
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
        """Wait until no copy is in flight. The cache leaves a copy behind only if the machine hangs in it."""
        with self._lock:
            if not self._under_way:
                return
            self._idle = asyncio.Event()
        await self._idle.wait()


async def store(cache: TierCache, transfer: Transfer) -> Ended:
    """Copy rows into the cache, which writes them to the tiers below later. Raises only CancelledError."""
    began_s = time.monotonic()
    copies = _Copies(transfer.rows)
    stored = 0
    try:
        items = [
            (key, row.nbytes, _bound(copies.from_row, position))
            for position, (key, row) in enumerate(zip(transfer.keys, transfer.rows, strict=True))
        ]
        # Waiting longer for a free slot is not worth holding vLLM's memory.
        stored = await cache.put_from(items, deadline_s=cache.config.queue_wait_s, prefix=transfer.is_prefix)
    except Exception as error:
        logger.warning("storing %d chunks failed: %r", len(transfer.keys), error)
    finally:
        await copies.ended()
    # Chunks that were already present were not copied.
    done = copies.done if stored < len(transfer.keys) else [True] * len(transfer.keys)
    return Ended(transfer.job_id, done, time.monotonic() - began_s)


async def load(cache: TierCache, transfer: Transfer) -> Ended:
    """Copy verified chunks into rows within `blocking_timeout_secs`, also those after a missing chunk.

    Raises only CancelledError.
    """
    began_s = time.monotonic()
    until_s = began_s + cache.config.blocking_timeout_secs
    copies = _Copies(transfer.rows)
    left = list(range(len(transfer.keys)))
    try:
        while left and (left_s := until_s - time.monotonic()) > 0:
            sinks = [_bound(copies.into_row, position) for position in left]
            found = await cache.get_to([transfer.keys[position] for position in left], sinks, deadline_s=left_s)
            # The chunk at the gap is missing. Later chunks may be present, and may have been read already.
            left = [position for position in left[found + 1 :] if not copies.done[position]]
    except Exception as error:
        logger.warning("loading %d chunks failed: %r", len(transfer.keys), error)
    finally:
        await copies.ended()
    return Ended(transfer.job_id, copies.done, time.monotonic() - began_s)


def _bound(copy: _Copy, position: int) -> Callable[[np.ndarray], None]:
    return lambda memory: copy(position, memory)


class EndedTransfers:
    """Ended transfers that vLLM has not been told about. Filled on the cache's loop, emptied by the scheduler's thread."""

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
        """Wait until no transfer is in flight. Return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._under_way, timeout_s)
