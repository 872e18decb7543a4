"""Put: reserve slots, copy chunks into them on worker threads, publish the chunks, and hand them to the write queues."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tiercache.core.keys import ChunkKey, each_once
from tiercache.memory.slots import WRITE, Fill, Lease, Slot, fill_slot
from tiercache.memory.workers import GIVE_UP_S, NotBegun, Workers, once_ended, retrieve_exception, wait_uncancelled
from tiercache.payloads import PlainCopy, Source
from tiercache.scheduler.writer import FanOut
from tiercache.tiers.cpu import CpuTier

_BATCH_BYTES = 32 << 20
_PART_BYTES = 2 << 20
"""Least number of bytes for a further copying thread: waking a thread costs more than copying less."""

_ON_LOOP_BYTES = 64 << 10
"""Largest copy on the loop per iteration, which takes less time than the hand-over to a thread."""

Item = tuple[ChunkKey, int, Source]
"""A chunk to store: its key, the length of its payload in bytes, and the call that fills it."""


@dataclass(slots=True)
class _Put:
    """A call of `put`, which may need several batches."""

    epoch: int
    """The epoch of the tombstones at the start of the put."""
    began_s: float
    deadline_s: float
    parents: Mapping[ChunkKey, ChunkKey]
    """The parent of each chunk, if the chunks are a prefix."""
    times: Mapping[ChunkKey, int]
    """The time of each chunk's access, which decreases along a prefix."""
    stored: int = 0
    skipped: int = 0


@dataclass(slots=True, eq=False)
class _Batch:
    """Chunks of a put that are copied together."""

    passed: int = 0
    """Number of items that the batch covers."""
    fills: dict[ChunkKey, Fill] = field(default_factory=dict)
    copies: list[asyncio.Future[None]] = field(default_factory=list)
    """The copies, one per thread."""
    leases: list[Lease] = field(default_factory=list)
    """Leases on chunks that were hot already, and later on the published chunks."""
    published: bool = False


class Ingest:
    """Stores chunks of host memory. Bound to the event loop.

    Two concurrent puts of one key both copy; the first published copy stays, and equal keys have equal bytes.
    """

    def __init__(self, cpu: CpuTier, fan_out: FanOut, copiers: Workers) -> None:
        """`copiers` run the sources of puts, and no work that a get waits for."""
        self.cpu = cpu
        self.copiers = copiers
        self.skipped = 0
        """Number of chunks without a slot or a thread by their deadline."""
        self._fan_out = fan_out
        self._copied_bytes = 0
        """Bytes copied on the loop in this iteration."""

    @property
    def _batch_items(self) -> int:
        """Chunks per batch: tiers write during the copies, and two batches fit beside the slots kept for reads.

        A batch takes its slots at once. It is small beside a quota, or the tail of a long prefix would evict its head.
        """
        return max(1, min(self.cpu.most_slots // 8, max(1, _BATCH_BYTES // self.cpu.pool.slot_bytes)))

    async def put(self, items: Sequence[Item], wait_s: float, *, prefix: bool = False) -> int:
        """Store chunks as `TierCache.put_from` does, and return how many of them are in the cache.

        `wait_s` limits the whole call.
        """
        items = each_once(items)
        keys = [key for key, _, _ in items]
        put = _Put(
            self.cpu.tombstones.epoch,
            began_s := asyncio.get_running_loop().time(),
            began_s + wait_s,
            dict(zip(keys[1:], keys, strict=False)) if prefix else {},
            self.cpu.access_for_put(keys, prefix=prefix),
        )
        try:
            await self._put_all(items, put)
        except NotBegun:
            absent = [key for key in keys if key not in self.cpu.residents]
            put.skipped = len(absent) - len(self.cpu.tombstones.forgotten(absent, put.epoch))
        finally:
            self.skipped += put.skipped
        if prefix and keys:
            self.cpu.link(keys, put.times[keys[0]])  # a chunk that was inserted before its parent has no link to it
        return put.stored

    async def _put_all(self, items: Sequence[Item], put: _Put) -> None:
        """Put batch after batch. The next batch is prepared during a copy, so that no thread waits for the loop.

        A batch ends at the first item that has to wait for a slot. Before the put waits, it publishes all begun chunks,
        so that puts do not wait for each other's slots.
        """
        position = 0
        before: _Batch | None = None
        batch: _Batch | None = None
        try:
            while position < len(items) or before is not None:
                some = items[position : position + self._batch_items]
                batch = self._begin(some, self._reserve(some, put), put) if some else None
                if before is not None:
                    await self._finish(before, put)
                elif batch is None:
                    batch = await self._begin_late(items[position], put)
                if batch is not None:
                    position += batch.passed
                before, batch = batch, None
        except BaseException as error:
            begun = [each for each in (before, batch) if each is not None and not each.published]
            cancelled = False
            try:
                copies = [copy for each in begun for copy in each.copies]
                for copy in copies:
                    if self.copiers.withdraw(copy):
                        retrieve_exception(copy)
                if not isinstance(error, GeneratorExit):  # a closed coroutine cannot wait
                    left_s = put.deadline_s + GIVE_UP_S - asyncio.get_running_loop().time()
                    cancelled = await wait_uncancelled(copies, min(GIVE_UP_S, left_s))
            finally:
                for each in begun:
                    self._drop(each)
            if cancelled and not isinstance(error, asyncio.CancelledError):
                raise asyncio.CancelledError from error
            raise

    def _reserve(self, items: Sequence[Item], put: _Put) -> dict[ChunkKey, Slot]:
        """Reserve slots for the items that need them, up to the first item without a free slot."""
        residents, forgot, epoch = self.cpu.residents, self.cpu.tombstones.forgot, put.epoch
        return self.cpu.try_reserve_all([key for key, _, _ in items if key not in residents and not forgot(key, epoch)])

    def _begin(self, items: Sequence[Item], slots: dict[ChunkKey, Slot], put: _Put) -> _Batch | None:
        """Start to copy chunks into their `slots`, up to the first without a slot.

        Returns None if that is the first chunk.
        """
        batch = _Batch()
        try:
            for key, length, source in items:
                if not self.cpu.tombstones.forgot(key, put.epoch):
                    if (lease := self.cpu.lease(key, writes=True)) is not None:
                        batch.leases.append(lease)
                    elif key in slots:
                        batch.fills[key] = (slots.pop(key), length, source)
                    else:
                        break  # it was hot in `_reserve`, and was evicted for the slot of an earlier item
                batch.passed += 1
            self._copy(batch)
        except BaseException:
            self._drop(batch)
            raise
        finally:
            for slot in slots.values():
                self.cpu.abandon(slot, WRITE)
        return batch if batch.passed else None

    async def _begin_late(self, item: Item, put: _Put) -> _Batch:
        """Begin a batch with one chunk, waiting for a slot as long as the put may. Without a slot the chunk is skipped."""
        key = item[0]
        slot = await self.cpu.reserve(WRITE, put.deadline_s - asyncio.get_running_loop().time(), key)
        batch = self._begin([item], {} if slot is None else {key: slot}, put)
        if batch is None:
            put.skipped += 1
            batch = _Batch(passed=1)
        return batch

    def _copy(self, batch: _Batch) -> None:
        """Copy small payloads on the loop if they cannot block, and others in threads."""
        work = [(self.cpu.pool.view(slot), length, source) for slot, length, source in batch.fills.values()]
        if self._may_copy_on_loop(work):
            _fill(work)
        elif work:
            copiers = self.copiers
            parts = max(1, min(copiers.threads, len(work) * self.cpu.pool.slot_bytes // _PART_BYTES))
            size = -(-len(work) // parts)
            batch.copies = [copiers.submit(_fill, work[n : n + size]) for n in range(0, len(work), size)]

    def _may_copy_on_loop(self, work: Sequence[tuple[np.ndarray, int, Source]]) -> bool:
        """Return True if the loop may copy this work, and count its bytes."""
        total_bytes = self._copied_bytes
        for _, length, source in work:
            total_bytes += length
            if type(source) is not PlainCopy or total_bytes > _ON_LOOP_BYTES:
                return False
        if work and not self._copied_bytes:
            asyncio.get_running_loop().call_soon(self._iteration_ended)
        self._copied_bytes = total_bytes
        return bool(work)

    def _iteration_ended(self) -> None:
        self._copied_bytes = 0

    async def _finish(self, batch: _Batch, put: _Put) -> None:
        """Publish the chunks of a batch once they are copied, and offer them to the tiers.

        Raises NotBegun if no thread was free for them by the deadline.
        """
        for copy in batch.copies:
            await self.copiers.ended_by(copy, put.deadline_s)
        cpu, fills, leases = self.cpu, batch.fills, batch.leases
        if forgotten := cpu.tombstones.forgotten(fills, put.epoch):
            for key in forgotten:
                cpu.abandon(fills[key][0], WRITE)
            fills = {key: fill for key, fill in fills.items() if key not in forgotten}
        put.stored += sum(lease.findable for lease in leases) + len(fills)  # hot chunks may have been forgotten meanwhile
        for key, (slot, length, _) in fills.items():
            leases.append(cpu.publish(key, slot, length, WRITE, put.parents.get(key), put.times.get(key)))
        batch.published = True
        if leases:
            await self._fan_out.offer(leases, put.began_s, put.deadline_s)

    def _drop(self, batch: _Batch) -> None:
        """Discard a batch. Slots that a hung thread may still write to are released when it ends."""
        slots = [slot for slot, _, _ in batch.fills.values()]

        def give_back() -> None:
            for slot in slots:
                self.cpu.abandon(slot, WRITE)

        once_ended(batch.copies, give_back)
        for lease in batch.leases:
            lease.release()


def _fill(work: Sequence[tuple[np.ndarray, int, Source]]) -> None:
    for slot, length, source in work:
        fill_slot(slot, length, source)
