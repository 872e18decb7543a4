"""Deliver a batch of chunks: hot chunks in parts, others as they are read, up to the first gap."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from tiercache.core.keys import ChunkKey
from tiercache.memory.slots import READ, Lease
from tiercache.memory.workers import Workers, all_or_none, once_ended
from tiercache.payloads import Sink
from tiercache.tiers.cpu import CpuTier

_PART = 512
"""Chunks looked up, or delivered, between checks of the deadline; other tasks run in between."""
_PARTS_AT_ONCE = 4

LeaseHot = Callable[[ChunkKey], Lease | None]
"""Return a lease on a chunk if it is hot. Its access is already counted."""
Fetch = Callable[[ChunkKey, float, ChunkKey | None, int], Awaitable[Lease | None]]
"""Return a lease on a chunk from the first tier that has it. Arguments: key, deadline, parent key, time of the access."""


class Landing(Protocol):
    """The destination of a batch: host memory, a device's memory, or the hot cache."""

    def part_of(self, chunks: int) -> int:
        """Return how many of `chunks` hot chunks are delivered at a time, at least 1."""

    async def take(self, part: Sequence[tuple[int, Lease]], delivered: bytearray) -> None:
        """Deliver chunks, by position in the batch, and mark those that are in place.

        Releases the leases in any case, as soon as their memory is no longer read.
        """


async def deliver(
    cpu: CpuTier,
    keys: Sequence[ChunkKey],
    landing: Landing,
    deadline_s: float,
    lease_hot: LeaseHot,
    fetch: Fetch,
    lanes: int,
) -> int:
    """Deliver the chunks of a prefix to `landing`, and return how many of the contiguous prefix are in place.

    Ends at the loop time `deadline_s`. Chunks after a gap may be in place as well. At most `lanes` chunks that are not
    hot are fetched at a time. After a return, error or cancellation, no chunk is delivered any more, except by copies
    that hang.
    """
    loop = asyncio.get_running_loop()
    delivered = bytearray(len(keys))
    time = cpu.access(keys)
    hot: dict[int, Lease] = {}
    parts: dict[int, list[tuple[int, Lease]]] = {}
    try:
        gap = await _lease_all_hot(cpu, lease_hot, keys, hot, deadline_s)
        chunks, whole = list(hot.items()), landing.part_of(len(hot))
        size, at_once = min(_PART, whole), max(_PARTS_AT_ONCE, -(-len(hot) // whole))
        parts = {start: chunks[start : start + size] for start in range(0, len(chunks), size)}
        hot_parts = iter(range(0, len(chunks), size))
        cold = iter([position for position in range(gap) if position not in hot] if len(hot) < gap else ())

        async def hand_over() -> None:
            """Deliver the parts one after another until the deadline. The first `at_once` parts are always delivered."""
            for start in hot_parts:
                if start >= at_once * size and loop.time() >= deadline_s:
                    return
                await landing.take(parts.pop(start), delivered)

        async def lane() -> None:
            """Fetch chunks one after another until a gap makes the rest useless."""
            nonlocal gap
            for position in cold:
                if position > gap:
                    return
                parent = keys[position - 1] if position else None
                lease = await fetch(keys[position], deadline_s, parent, time - position)
                if lease is not None:
                    await landing.take([(position, lease)], delivered)
                if not delivered[position]:
                    gap = min(gap, position)

        work = [asyncio.ensure_future(hand_over()) for _ in range(min(at_once, len(parts)))]
        work += [asyncio.ensure_future(lane()) for _ in range(min(lanes, gap - len(hot)))]
        hot = {}  # the parts own the leases now
        await all_or_none(work)
    finally:
        # A part that never began, or was cancelled before its first step, has not released its leases.
        for lease in (*hot.values(), *(lease for part in parts.values() for _, lease in part)):
            lease.release()
    cpu.link(keys, time)
    lost = delivered.find(0)
    return len(keys) if lost < 0 else lost


def or_held(lease_hot: LeaseHot, held: Mapping[ChunkKey, Lease] | None) -> LeaseHot:
    """Return `lease_hot`, extended to chunks that the caller leases (`held`) and that were removed since."""
    if held is None:
        return lease_hot

    def lease(key: ChunkKey) -> Lease | None:
        found = lease_hot(key)
        if found is None and (kept := held.get(key)) is not None:
            return kept.another(READ, counted=True)
        return found

    return lease


async def _lease_all_hot(
    cpu: CpuTier, lease_hot: LeaseHot, keys: Sequence[ChunkKey], hot: dict[int, Lease], deadline_s: float
) -> int:
    """Fill `hot`, by position, until the deadline; return the number of keys checked.

    No waiter gets a slot while a part is leased, since it could evict a later chunk of the part.
    """
    loop = asyncio.get_running_loop()
    for start in range(0, len(keys), _PART):
        if start:
            await asyncio.sleep(0)
            if loop.time() >= deadline_s:
                return start
        cpu.wait_queue.pause()
        try:
            for position in range(start, min(start + _PART, len(keys))):
                lease = lease_hot(keys[position])
                if lease is not None:
                    hot[position] = lease
        finally:
            cpu.wait_queue.resume()
    return len(keys)


class HostMemory:
    """Host memory as a landing: each chunk is passed to its sink on a worker thread. A sink that fails ends the prefix."""

    def __init__(
        self, sinks: Sequence[Sink], copiers: Workers, undelivered: Callable[[Exception], None], deadline_s: float
    ) -> None:
        """`undelivered` is called with the error of a part that could not be delivered."""
        self._sinks = sinks
        self._copiers = copiers
        self._undelivered = undelivered
        self._deadline_s = deadline_s

    def part_of(self, chunks: int) -> int:
        """Return the number of chunks per copying thread, at least 4 if there are that many."""
        return max(1, -(-chunks // max(1, min(self._copiers.threads, chunks // 4))))

    async def take(self, part: Sequence[tuple[int, Lease]], delivered: bytearray) -> None:
        copying: list[asyncio.Future[None]] = []

        def release() -> None:
            for _, lease in part:
                lease.release()

        try:
            todo = [(position, lease.view, self._sinks[position]) for position, lease in part]
            copying.append(self._copiers.submit(_run_sinks, todo, delivered))
            await self._copiers.ended_by(copying[0], self._deadline_s)
        except Exception as error:
            if not all(copy.done() for copy in copying):  # the copy hangs, and still writes to the caller's memory
                raise
            self._undelivered(error)
        finally:
            once_ended(copying, release)


def _run_sinks(todo: Sequence[tuple[int, np.ndarray, Sink]], delivered: bytearray) -> None:
    for position, view, sink in todo:
        sink(view)
        delivered[position] = 1


class HotCache:
    """The hot cache as a landing: chunks are in place as soon as they are hot."""

    def part_of(self, chunks: int) -> int:
        return max(1, chunks)

    async def take(self, part: Sequence[tuple[int, Lease]], delivered: bytearray) -> None:
        for position, lease in part:
            lease.release()
            delivered[position] = 1
