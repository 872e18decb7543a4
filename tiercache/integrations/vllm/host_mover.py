"""Blocks in host memory: copying threads of the cache read and write them.

On vLLM's CPU platform KV is written when the forward returns, so blocks may be read at once.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tiercache.bridge import CacheThread
from tiercache.core.keys import ChunkKey
from tiercache.integrations.vllm.kv_blocks import KvBlocks
from tiercache.integrations.vllm.lending import Lending
from tiercache.integrations.vllm.moves import Move, Mover, by_group, last_first
from tiercache.integrations.vllm.planning import BlockTransfer
from tiercache.memory.slots import Lease


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
