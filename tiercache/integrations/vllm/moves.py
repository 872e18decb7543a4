"""What the worker's half needs of host and device memory alike: to move whole blocks to the cache and back."""

from __future__ import annotations

import concurrent.futures
from abc import ABC, abstractmethod
from collections.abc import Sequence

from tiercache.bridge import CacheThread
from tiercache.core.keys import ChunkKey
from tiercache.device.driver import Driver
from tiercache.integrations.vllm.device_blocks import DeviceKvBlocks
from tiercache.integrations.vllm.kv_blocks import KvBlocks
from tiercache.integrations.vllm.planning import BlockTransfer


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


class Mover(ABC):
    """Begins moves between one worker's KV blocks and its cache. All methods are called by the engine's thread."""

    driver: Driver | None
    """Of the device that the blocks lie in; None for host memory. The cache has to use the same."""
    kv: KvBlocks | DeviceKvBlocks

    @abstractmethod
    def put(
        self, thread: CacheThread, keys: Sequence[ChunkKey], transfers: Sequence[BlockTransfer], deadline_s: float
    ) -> Move:
        """Store blocks as chunks. They are read when all that the engine has begun by now is done."""

    @abstractmethod
    def get(
        self, thread: CacheThread, keys: Sequence[ChunkKey], transfers: Sequence[BlockTransfer], deadline_s: float
    ) -> Move:
        """Load chunks into blocks. They are written when all that the engine has begun by now is done."""

    @abstractmethod
    def close(self) -> None:
        """After the cache's thread has ended."""
