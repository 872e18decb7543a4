"""How chunks in host memory get into the cache: copied by worker threads into slots of the arena, then fanned out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tiercache.core.budget import WRITE
from tiercache.core.keys import ChunkKey, each_once
from tiercache.core.patience import Patience
from tiercache.core.tombstones import Operation
from tiercache.memory.slots import Fill, Slot, fill_slot
from tiercache.memory.workers import GIVE_UP_S, NotBegun, Workers, once_ended, retrieve_exception, wait_uncancelled
from tiercache.payloads import PlainCopy, Source
from tiercache.scheduler.fan_out import FanOut
from tiercache.tiers.cpu import CpuTier
from tiercache.tiers.leases import Lease

_BATCH_BYTES = 32 << 20
_PART_BYTES = 2 << 20
"""What a copying thread gets at least of a batch that is shared among them: to wake one up for less takes longer."""

_ON_LOOP_BYTES = 64 << 10
"""What is copied on the loop in one of its turns, at most: about 5 us at 12 GB/s, where a hand-over to a thread
takes 72 to 94."""

_Item = tuple[ChunkKey, int, Source]


@dataclass(slots=True)
class _Put:
    """One call, which may take several batches."""

    operation: Operation
    patience: Patience
    parents: Mapping[ChunkKey, ChunkKey] | None = None
    """What each chunk follows, where they are a prefix."""
    times: dict[ChunkKey, int] = field(default_factory=dict)
    """The time of each chunk's access, which falls along a prefix."""
    stored: int = 0
    skipped: int = 0
    elsewhere: list[tuple[_Item, _Batch]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Batch:
    """The chunks that are filled at a time. Others wait for its end, and store theirs only if it fails."""

    operation: Operation
    passed: int = 0
    """Chunks of the put that it deals with."""
    fills: dict[ChunkKey, Fill] = field(default_factory=dict)
    filling: list[asyncio.Future[None]] = field(default_factory=list)
    """A part of them each, in a thread."""
    leases: list[Lease] = field(default_factory=list)
    over: bool = False
    """Whether its chunks are hot, or will not be."""
    ended: asyncio.Future[None] | None = None
    """Made by whoever waits for that first."""


class HostPath:
    """All methods belong to the event loop. Of several puts of one chunk at a time, one copies."""

    def __init__(self, cpu: CpuTier, fan_out: FanOut, copiers: Workers) -> None:
        """`copiers` run the sources of puts, and nothing that a get waits for."""
        self.cpu = cpu
        self.copiers = copiers
        self.skipped = 0
        self._fan_out = fan_out
        self._filling: dict[ChunkKey, _Batch] = {}
        """Only while its owner has a slot for it, and fills it."""
        self._copied_bytes = 0
        """On the loop, in this turn of it."""
        self._batch_items = max(1, min(cpu.pool.count // 8, max(1, _BATCH_BYTES // cpu.pool.slot_bytes)))
        """Chunks in a batch: few enough that tiers begin to write while the rest is copied, and that two batches fit beside
        the floor for reads (a put would wait for its own slots)."""

    async def put(self, items: Sequence[_Item], wait_s: float, *, prefix: bool = False) -> int:
        """As `TierCache.put_from`. `wait_s` is for all of them together."""
        items = each_once(items)
        keys = [key for key, _, _ in items]
        put = _Put(self.cpu.tombstones.begin(), Patience(asyncio.get_running_loop().time() + wait_s))
        # What is here is used before room is made for the rest: nothing of the same put goes for that.
        if prefix:
            put.parents = dict(zip(keys[1:], keys, strict=False))
        latest_first = keys if prefix else keys[::-1]
        time = self.cpu.access(latest_first, prefix=prefix)
        put.times = dict(zip(latest_first, range(time, time - len(keys), -1), strict=True))
        try:
            while items:
                await self._put_all(items, put)
                items = await self._left_undone(put) if put.elsewhere else ()
        except NotBegun:
            put.skipped = sum(key not in self.cpu.residents and not put.operation.forgot(key) for key in keys)
        finally:
            self.cpu.tombstones.end(put.operation)
            self.skipped += put.skipped
        if prefix:
            self.cpu.link(keys, time)  # a chunk that came before its parent does not know it
        return put.stored

    async def _put_all(self, items: Sequence[_Item], put: _Put) -> None:
        """Batch after batch; while one is copied the next one is handed over already, so that no thread waits for the loop.

        A batch ends where a slot has to be waited for: first all that was begun is made hot, since whoever waits must not
        hold what others wait for.
        """
        position = 0
        before: _Batch | None = None
        batch: _Batch | None = None
        try:
            while position < len(items) or before is not None:
                batch = self._begin(items, position, put) if position < len(items) else None
                if before is not None:
                    await self._finish(before, items, put)
                elif batch is None:
                    batch = await self._begin_late(items, position, put)
                if batch is not None:
                    position += batch.passed
                before, batch = batch, None
        except BaseException as error:
            begun = [each for each in (before, batch) if each is not None and not each.over]
            try:
                fillings = [filling for each in begun for filling in each.filling]
                for filling in fillings:
                    if self.copiers.withdraw(filling):
                        retrieve_exception(filling)
                if not isinstance(error, GeneratorExit):  # then nobody runs what waits
                    left_s = put.patience.deadline_s + GIVE_UP_S - asyncio.get_running_loop().time()
                    await wait_uncancelled(fillings, min(GIVE_UP_S, left_s))
            finally:
                for each in begun:
                    self._drop(each)
            raise

    async def _left_undone(self, put: _Put) -> list[_Item]:
        """Wait for those who fill the same chunks. Returns these, to be put as if they had come now: most are hot. But
        who filled them may have failed, or be cancelled before tiers had room for them."""
        loop = asyncio.get_running_loop()
        elsewhere, put.elsewhere = put.elsewhere, []
        undone = []
        for item, batch in elsewhere:
            if not batch.over:
                batch.ended = batch.ended or loop.create_future()
                await asyncio.wait([batch.ended], timeout=max(0.0, put.patience.deadline_s - loop.time()))
            if batch.over:
                undone.append(item)
            else:
                put.skipped += 1
        return undone

    def _begin(self, items: Sequence[_Item], position: int, put: _Put) -> _Batch | None:
        """As many chunks as there are slots for, handed to the threads; None where that is none."""
        batch = _Batch(put.operation)
        some = items[position : position + self._batch_items]
        reserved = self._reserve(some, put) if len(some) > 1 else {}
        try:
            for item in some:
                key, length, source = item
                slot = reserved.pop(key, None)
                if slot is None:
                    if not self._admit(item, batch, put):
                        break
                else:
                    batch.fills[key] = (slot, length, source)
                    self._filling[key] = batch
                batch.passed += 1
            self._hand_over(batch)
        except BaseException:
            self._drop(batch)
            raise
        finally:
            for slot in reserved.values():
                self.cpu.abandon(slot, WRITE)
        return batch if batch.passed else None

    def _reserve(self, items: Sequence[_Item], put: _Put) -> dict[ChunkKey, Slot]:
        """Slots for those that plainly need one, all at once."""
        here, filling, forgot = self.cpu.residents, self._filling, put.operation.forgot
        return self.cpu.try_reserve_all(
            [key for key, _, _ in items if key not in here and key not in filling and not forgot(key)]
        )

    async def _begin_late(self, items: Sequence[_Item], position: int, put: _Put) -> _Batch:
        """As `_begin`, of one chunk, waiting for a slot as long as the put may."""
        item = key, length, source = items[position]
        batch = _Batch(put.operation, passed=1)
        left_s = put.patience.deadline_s - asyncio.get_running_loop().time()
        slot = await self.cpu.reserve(WRITE, left_s, key)
        if slot is None:
            put.skipped += 1
        # While we waited, somebody else may have begun the same chunk, or finished it.
        elif put.operation.forgot(key) or self._is_taken_care_of(item, batch, put):
            self.cpu.abandon(slot, WRITE)
        else:
            batch.fills[key] = (slot, length, source)
            self._filling[key] = batch
            try:
                self._hand_over(batch)
            except BaseException:
                self._drop(batch)
                raise
        return batch

    def _hand_over(self, batch: _Batch) -> None:
        work = [(self.cpu.pool.view(slot), length, source) for slot, length, source in batch.fills.values()]
        if self._may_copy_here(work):
            _fill(work)
        elif work:
            copiers = self.copiers
            parts = max(1, min(copiers.threads, len(work) * self.cpu.pool.slot_bytes // _PART_BYTES))
            size = -(-len(work) // parts)
            batch.filling = [copiers.submit(_fill, work[n : n + size]) for n in range(0, len(work), size)]

    def _may_copy_here(self, work: Sequence[tuple[np.ndarray, int, Source]]) -> bool:
        """Whether the loop may copy these itself: few bytes, of memory that cannot block. If so they are counted."""
        total_bytes = self._copied_bytes
        for _, length, source in work:
            total_bytes += length
            if type(source) is not PlainCopy or total_bytes > _ON_LOOP_BYTES:
                return False
        if work and not self._copied_bytes:
            asyncio.get_running_loop().call_soon(self._turn_ended)
        self._copied_bytes = total_bytes
        return bool(work)

    def _turn_ended(self) -> None:
        self._copied_bytes = 0

    async def _finish(self, batch: _Batch, items: Sequence[_Item], put: _Put) -> None:
        """Make its chunks hot when they are filled, and give them to the tiers. Raises NotBegun when no thread came free for
        them by the deadline."""
        for filling in batch.filling:
            await self.copiers.ended_by(filling, put.patience.deadline_s)
        parents = put.parents or {}
        cpu, fills, leases = self.cpu, batch.fills, batch.leases
        if forgotten := put.operation.forgotten(fills):
            for key in forgotten:
                cpu.abandon(fills[key][0], WRITE)
            fills = {key: fill for key, fill in fills.items() if key not in forgotten}
        put.stored += sum(lease.findable for lease in leases) + len(fills)  # hot ones may have been forgotten meanwhile
        if (
            self._fan_out.writers or not cpu.keep or len(fills) == 1
        ):  # for one, the way of many costs more than its lease
            for key, (slot, n, _) in fills.items():
                leases.append(cpu.publish(key, slot, n, WRITE, parents.get(key), put.times.get(key)))
        else:
            cpu.publish_all(fills, parents, put.times)
        self._end(batch)
        if leases:
            await self._fan_out.offer(leases, put.patience)

    def _drop(self, batch: _Batch) -> None:
        """Nothing of it is stored. Slots that a thread may still write to, since it hangs, are given back when it ends."""
        slots = [slot for slot, _, _ in batch.fills.values()]

        def give_back() -> None:
            for slot in slots:
                self.cpu.abandon(slot, WRITE)

        once_ended(batch.filling, give_back)
        for lease in batch.leases:
            lease.release()
        self._end(batch)

    def _admit(self, item: _Item, batch: _Batch, put: _Put) -> bool:
        """Find a slot for a chunk that needs one; False when it must be waited for."""
        key, length, source = item
        if key in batch.fills or put.operation.forgot(key) or self._is_taken_care_of(item, batch, put):
            return True
        slot = self.cpu.try_reserve(WRITE, None, key)
        if slot is None:
            return False
        batch.fills[key] = (slot, length, source)
        self._filling[key] = batch
        return True

    def _is_taken_care_of(self, item: _Item, batch: _Batch, put: _Put) -> bool:
        """Whether the chunk is hot, or somebody else is filling it at this moment."""
        key = item[0]
        lease = self.cpu.lease(key, writes=True)
        if lease is not None:
            batch.leases.append(lease)
            return True
        other = self._filling.get(key)
        if other is None or other.operation.forgot(key):
            return False
        put.elsewhere.append((item, other))
        return True

    def _end(self, batch: _Batch) -> None:
        for key in batch.fills:
            if self._filling.get(key) is batch:
                del self._filling[key]
        batch.over = True
        if batch.ended is not None:
            batch.ended.set_result(None)


def _fill(work: Sequence[tuple[np.ndarray, int, Source]]) -> None:
    for slot, length, source in work:
        fill_slot(slot, length, source)
