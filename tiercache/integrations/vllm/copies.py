"""Move whole blocks between the engine's KV and the cache, in host and in device memory.

`Lending` lends blocks to copying threads for one transfer and takes them back. `make_mover` finds where the engine's KV
lies and returns the `Mover` for it.

`HostMover`: copying threads of the cache read and write blocks in host memory. On vLLM's CPU platform KV is written when
the forward returns, so blocks may be read at once.

`DeviceMover`: streams of the cache read and write blocks in device memory. The engine's thread records an event on the
stream that it gives its work to, and the copies begin after that event: a save reads what the forward wrote, and a load
does not write while an earlier step still reads. Blocks are free again when the events behind the copies have passed. A
save releases the engine's blocks when they are gathered, long before the chunks are in host memory or in a file.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from tiercache.assembly import make_cpu_driver
from tiercache.bridge import CacheThread
from tiercache.config import Config
from tiercache.core.keys import ChunkKey
from tiercache.device.driver import CudaDriver, Driver, Event, Stream, Tensor
from tiercache.device.paged import PagedChunk
from tiercache.errors import CacheClosed, DeviceError, LayoutError
from tiercache.integrations.vllm.blocks import DeviceKvBlocks, KvBlocks
from tiercache.integrations.vllm.planning import BlockTransfer, HeadParts, KvGroup
from tiercache.memory.slots import Lease
from tiercache.payloads import Source


class TakenBack(Exception):
    """The engine took its blocks back: they must not be touched any more."""


class Lending:
    """A copy runs inside `with lending`; after `take_back` none begins, and it waits for those under way.

    Without it a copy that comes too late would write into a block that the engine has given to another request, or store
    that request's bytes under this one's key.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._copying = 0
        self._taken_back = False

    def __enter__(self) -> None:
        with self._condition:
            if self._taken_back:
                raise TakenBack
            self._copying += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._condition:
            self._copying -= 1
            self._condition.notify_all()

    def reading(self, source: Source) -> Source:
        """`source`, which reads what is lent."""

        def fill(slot: np.ndarray) -> None:
            with self:
                source(slot)
                self.check()

        return fill

    def check(self) -> None:
        """Raise TakenBack when what was just read may have been overwritten meanwhile."""
        if self._taken_back:
            raise TakenBack

    def take_back(self, wait_s: float) -> bool:
        """False when a copy is still running after `wait_s` seconds."""
        until_s = time.monotonic() + wait_s
        with self._condition:
            self._taken_back = True
            return self._condition.wait_for(lambda: not self._copying, max(0.0, until_s - time.monotonic()))


class Move(ABC):
    """Chunks on their way between the engine's blocks and the cache. All methods are called by the engine's thread."""

    future: concurrent.futures.Future[int]
    """Ends with the number of chunks that are in the cache, or (of the contiguous prefix) in the blocks."""

    @abstractmethod
    def is_off_blocks(self) -> bool:
        """Whether the blocks are not touched any more. May be true long before `future` is done."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """`is_off_blocks`, after waiting for that."""

    @abstractmethod
    def take_back(self, wait_s: float) -> bool:
        """Let no further copy begin, and wait for those under way. False when one still runs after `wait_s` seconds."""


async def by_group(
    transfers: Sequence[BlockTransfer],
    windows: Collection[int],
    move: Callable[[Sequence[int], bool], Coroutine[Any, Any, int]],
) -> int:
    """Run `move` for the positions of each group's transfers, side by side, saying whether it is one of `windows`. Returns
    the sum of what they return; where one fails, the others are ended first."""
    groups: dict[int, list[int]] = {}
    for position, transfer in enumerate(transfers):
        groups.setdefault(transfer.group, []).append(position)
    if len(groups) == 1:
        ((group, positions),) = groups.items()
        return await move(positions, group in windows)
    async with asyncio.TaskGroup() as tasks:
        moves = [tasks.create_task(move(positions, group in windows)) for group, positions in groups.items()]
    return sum(one.result() for one in moves)


def last_first(positions: Sequence[int]) -> Sequence[int]:
    """The order in which chunks of a window are loaded: eviction keeps what is named before rather than what follows."""
    return positions[::-1]


class Mover(ABC):
    """Begins moves between one worker's KV blocks and its cache. All methods are called by the engine's thread."""

    driver: Driver | None
    """Of the device that the blocks lie in; None for host memory. The cache has to use the same."""
    kvs: Sequence[KvBlocks | DeviceKvBlocks]
    """By group, as `BlockTransfer.group` counts them. Their tensors may share memory."""
    windows: frozenset[int]
    """Groups with a window. Their chunks do not follow one another in a prefix: the last are worth most."""

    @abstractmethod
    def put(
        self, thread: CacheThread, keys: Sequence[ChunkKey], transfers: Sequence[BlockTransfer], deadline_s: float
    ) -> Move:
        """Store blocks as chunks. They are read when all that the engine has begun by now is done."""

    @abstractmethod
    def get(
        self,
        thread: CacheThread,
        keys: Sequence[ChunkKey],
        transfers: Sequence[BlockTransfer],
        deadline_s: float,
        held: Mapping[ChunkKey, Lease] | None = None,
    ) -> Move:
        """Load chunks into blocks. They are written when all that the engine has begun by now is done. `held` as for
        `TierCache.get_to`.

        Chunks of several groups: all of them are needed, so what one lacks leaves the others uncounted.
        """


class _HostMove(Move):
    """`_copied` is set when no copy will touch the engine's blocks any more."""

    def __init__(self, chunks: int) -> None:
        self._remaining = chunks
        self._lock = threading.Lock()
        self._lending = Lending()
        self._copied = threading.Event()

    def follow(self, future: concurrent.futures.Future[int]) -> None:
        self.future = future
        future.add_done_callback(lambda _: self._copied.set())

    def is_off_blocks(self) -> bool:
        return self._copied.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._copied.wait(timeout_s)

    def take_back(self, wait_s: float) -> bool:
        self.future.cancel()
        ended = self._lending.take_back(wait_s)
        self._copied.set()
        return ended

    def source(self, kvs: Sequence[KvBlocks], transfer: BlockTransfer) -> Callable[[np.ndarray], None]:
        def fill(payload: np.ndarray) -> None:
            with self._lending:
                kvs[transfer.group].gather(transfer.blocks, payload)
                self._lending.check()
            with self._lock:
                self._remaining -= 1
                if not self._remaining:
                    self._copied.set()

        return fill

    def sink(self, kvs: Sequence[KvBlocks], transfer: BlockTransfer) -> Callable[[np.ndarray], None]:
        def scatter(payload: np.ndarray) -> None:
            with self._lending:
                kvs[transfer.group].scatter(payload, transfer.chunk_blocks, transfer.skip, transfer.blocks)

        return scatter


class HostMover(Mover):
    def __init__(self, kvs: Sequence[KvBlocks], windows: Iterable[int] = ()) -> None:
        self.driver = None
        self.kvs: Sequence[KvBlocks] = kvs
        self.windows = frozenset(windows)

    def put(
        self, thread: CacheThread, keys: Sequence[ChunkKey], transfers: Sequence[BlockTransfer], deadline_s: float
    ) -> Move:
        move = _HostMove(len(transfers))
        items = [
            (key, transfer.chunk_blocks * self.kvs[transfer.group].bytes_per_block, move.source(self.kvs, transfer))
            for key, transfer in zip(keys, transfers, strict=True)
        ]

        def put_group(positions: Sequence[int], window: bool) -> Coroutine[Any, Any, int]:
            return thread.cache.put_from([items[one] for one in positions], deadline_s=deadline_s, prefix=not window)

        move.follow(thread.submit(by_group(transfers, self.windows, put_group)))
        return move

    def get(
        self,
        thread: CacheThread,
        keys: Sequence[ChunkKey],
        transfers: Sequence[BlockTransfer],
        deadline_s: float,
        held: Mapping[ChunkKey, Lease] | None = None,
    ) -> Move:
        move = _HostMove(len(transfers))
        sinks = [move.sink(self.kvs, transfer) for transfer in transfers]

        def get_group(positions: Sequence[int], window: bool) -> Coroutine[Any, Any, int]:
            ordered = last_first(positions) if window else positions
            return thread.cache.get_to(
                [keys[one] for one in ordered], [sinks[one] for one in ordered], deadline_s=deadline_s, held=held
            )

        move.follow(thread.submit(by_group(transfers, self.windows, get_group)))
        return move


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


def make_mover(
    config: Config, tensors: Mapping[str, Any], blocks: int, groups: Sequence[KvGroup], parts: HeadParts | None = None
) -> Mover:
    """`groups` as the geometry has them, where it has any. Raises LayoutError for KV that cannot be moved from where it lies
    or was not verified; DeviceError without driver."""
    driver = _driver_of(config, tensors)
    windows = [position for position, group in enumerate(groups) if group.window_tokens is not None]
    if driver is None:
        return HostMover(
            [_in_host_memory(_of(group, tensors, parts), blocks, group, parts) for group in groups], windows
        )
    kvs = [_in_device_memory(driver, _of(group, tensors, parts), blocks, group, parts) for group in groups]
    for kv in kvs:
        kv.kv.warm_up()
    return DeviceMover(kvs, windows)


def _of(group: KvGroup, tensors: Mapping[str, Any], parts: HeadParts | None) -> Mapping[str, Any]:
    """The group's tensors; of its part of the heads, views."""
    if group.layers:
        tensors = {name: tensors[name] for name in group.layers if name in tensors}
    if parts is None:
        return tensors
    heads = group.spec.num_kv_heads // parts.here
    return {name: tensor[:, group.part * heads : (group.part + 1) * heads] for name, tensor in tensors.items()}


def _in_host_memory(tensors: Mapping[str, Any], blocks: int, group: KvGroup, parts: HeadParts | None) -> KvBlocks:
    spec = group.spec
    if group.recurrent:
        return KvBlocks(
            tensors,
            blocks=blocks,
            heads=spec.num_heads,
            block_tokens=spec.block_size,
            state_bytes=spec.state_content_size_bytes,
        )
    return KvBlocks(
        tensors,
        blocks=blocks,
        heads=spec.num_kv_heads // (parts.here if parts else 1),
        block_tokens=spec.block_size,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        part=parts is not None,
    )


def _in_device_memory(
    driver: Driver, tensors: Mapping[str, Any], blocks: int, group: KvGroup, parts: HeadParts | None
) -> DeviceKvBlocks:
    spec = group.spec
    return DeviceKvBlocks(
        driver,
        tensors,
        blocks=blocks,
        heads=spec.num_heads // (parts.here if parts else 1),
        block_tokens=spec.block_size,
        content_bytes=spec.state_content_size_bytes,
        states=group.recurrent,
    )


def _driver_of(config: Config, tensors: Mapping[str, Any]) -> Driver | None:
    """The driver of the device that holds the KV; None for host memory."""
    devices = {str(tensor.device): tensor.device for tensor in tensors.values()}
    if len(devices) != 1:
        raise LayoutError(f"expected the KV of all layers on one device, found {', '.join(sorted(devices)) or 'no KV'}")
    ((name, device),) = devices.items()
    if device.type == "cpu":
        return make_cpu_driver() if config.device == "cpu" else None
    if device.type != "cuda":
        raise LayoutError(f"expected KV in host memory or on a CUDA GPU, found it on {name}")
    if config.device != "auto":
        raise LayoutError(
            f"the KV lies on {name}, and the configuration says device: {config.device}; use device: auto"
        )
    return CudaDriver(device.index or 0)
