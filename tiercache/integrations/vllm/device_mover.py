"""Blocks in device memory: streams of the cache read and write them, after the engine's own.

The engine's thread records an event on the stream that it gives its work to, and the copies begin after that: a save reads
what the forward wrote, a load does not write while an earlier step still reads. Blocks are free again when the copies have
ended, which is asked of events recorded behind them; a save lets go of the engine's blocks as soon as they are gathered,
long before the chunks have come to the host or a file.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from tiercache.bridge import CacheThread
from tiercache.core.keys import ChunkKey
from tiercache.device.driver import Driver, Event, Stream, Tensor
from tiercache.device.paged import PagedChunk
from tiercache.errors import CacheClosed, DeviceError
from tiercache.integrations.vllm.device_blocks import DeviceKvBlocks
from tiercache.integrations.vllm.lending import Lending
from tiercache.integrations.vllm.moves import Move, Mover, by_group, last_first
from tiercache.integrations.vllm.planning import BlockTransfer
from tiercache.memory.slots import Lease

_POLL_S = 0.0005


class _DeviceMove(Move):
    """Copies are enqueued by threads of the cache inside `lending`; events behind them say when they have ended."""

    def __init__(self, driver: Driver, thread: CacheThread, copies: int) -> None:
        self.future = concurrent.futures.Future()
        self._driver = driver
        self._thread = thread
        self._lending = Lending()
        self._task: asyncio.Task[int] | None = None
        self._lock = threading.Lock()
        self._to_come = copies
        """Copies that may still be enqueued: 0 when all were, the cache is done, or the blocks were taken back."""
        self._behind: dict[Stream, Event] = {}
        """The last event of each stream, as long as it may not have happened."""
        self.after = driver.record(driver.current_stream())

    def begin(self, operation: Callable[[], Coroutine[Any, Any, int]]) -> None:
        try:
            self.future = self._thread.submit(self._run(operation))
        except CacheClosed as error:
            self._finish()
            self.future.set_exception(error)

    async def _run(self, operation: Callable[[], Coroutine[Any, Any, int]]) -> int:
        self._task = asyncio.current_task()
        try:
            self._lending.check()
            return await operation()
        finally:
            self._finish()

    def _finish(self) -> None:
        with self._lock:
            self._to_come = 0
            self._have_ended()

    def enqueue(self, copy: Callable[[], None], stream: Stream) -> None:
        """Called by a thread of the cache's. Raises TakenBack."""
        with self._lending:
            try:
                copy()
            finally:
                # Also a copy that failed may have been enqueued in part.
                event = self._driver.record(stream)
                with self._lock:
                    self._to_come -= 1
                    self._behind[stream] = event

    def is_off_blocks(self) -> bool:
        with self._lock:
            return self._to_come <= 0 and self._have_ended()

    def wait(self, timeout_s: float) -> bool:
        until_s = time.monotonic() + timeout_s
        while not self.is_off_blocks():
            if time.monotonic() >= until_s:
                return False
            time.sleep(_POLL_S)
        return True

    def take_back(self, wait_s: float) -> bool:
        self._lending.take_back(wait_s)
        with self._lock:
            self._to_come = 0
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._thread.loop.call_soon_threadsafe(self._cancel)
        if self.wait(wait_s):
            return True
        with self._lock, contextlib.suppress(DeviceError):
            # At least whatever the engine enqueues from now on comes after them.
            for event in self._behind.values():
                self._driver.wait(self._driver.current_stream(), event)
        return False

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _have_ended(self) -> bool:
        """Whether all copies enqueued by now have ended. Called with the lock held."""
        try:
            if not all(self._driver.query(event) for event in self._behind.values()):
                return False
        except DeviceError:
            # The device is lost, or about to be: who waits for this has a time limit.
            return False
        self._behind.clear()
        return True


class _LentChunk(PagedChunk):
    """A chunk in blocks that may be taken back."""

    def __init__(self, move: _DeviceMove, kv: DeviceKvBlocks, transfer: BlockTransfer) -> None:
        super().__init__(kv.kv, transfer.blocks, chunk_blocks=transfer.chunk_blocks, skip=transfer.skip)
        self._move = move

    def gather(self, chunk: Tensor, stream: Stream) -> None:
        self._move.enqueue(lambda: super(_LentChunk, self).gather(chunk, stream), stream)

    def scatter(self, chunk: Tensor, stream: Stream) -> None:
        self._move.enqueue(lambda: super(_LentChunk, self).scatter(chunk, stream), stream)


class DeviceMover(Mover):
    def __init__(self, kvs: Sequence[DeviceKvBlocks], windows: Iterable[int] = ()) -> None:
        self.driver: Driver = kvs[0].driver
        self.kvs: Sequence[DeviceKvBlocks] = kvs
        self.windows = frozenset(windows)

    def put(
        self, thread: CacheThread, keys: Sequence[ChunkKey], transfers: Sequence[BlockTransfer], deadline_s: float
    ) -> Move:
        move = _DeviceMove(self.driver, thread, len(transfers))
        chunks = [_LentChunk(move, self.kvs[transfer.group], transfer) for transfer in transfers]

        def put_group(positions: Sequence[int], window: bool) -> Coroutine[Any, Any, int]:
            return thread.cache.put_many(
                [keys[one] for one in positions],
                [chunks[one] for one in positions],
                after=move.after,
                deadline_s=deadline_s,
                prefix=not window,
            )

        move.begin(lambda: by_group(transfers, self.windows, put_group))
        return move

    def get(
        self,
        thread: CacheThread,
        keys: Sequence[ChunkKey],
        transfers: Sequence[BlockTransfer],
        deadline_s: float,
        held: Mapping[ChunkKey, Lease] | None = None,
    ) -> Move:
        move = _DeviceMove(self.driver, thread, len(transfers))
        chunks = [_LentChunk(move, self.kvs[transfer.group], transfer) for transfer in transfers]

        def get_group(positions: Sequence[int], window: bool) -> Coroutine[Any, Any, int]:
            ordered = last_first(positions) if window else positions
            return thread.cache.get_into(
                [keys[one] for one in ordered],
                [chunks[one] for one in ordered],
                after=move.after,
                deadline_s=deadline_s,
                held=held,
            )

        move.begin(lambda: by_group(transfers, self.windows, get_group))
        return move
