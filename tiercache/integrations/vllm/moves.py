"""What the worker's half needs of host and device memory alike: to move whole blocks to the cache and back."""

from __future__ import annotations

import asyncio
import concurrent.futures
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from tiercache.bridge import CacheThread
from tiercache.core.keys import ChunkKey
from tiercache.device.driver import Driver
from tiercache.integrations.vllm.device_blocks import DeviceKvBlocks
from tiercache.integrations.vllm.kv_blocks import KvBlocks
from tiercache.integrations.vllm.planning import BlockTransfer
from tiercache.memory.slots import Lease


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
