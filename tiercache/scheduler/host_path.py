"""How chunks in host memory get into the cache: copied by worker threads into slots of the arena, then fanned out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from tiercache.core.budget import Purpose
from tiercache.core.header import aligned
from tiercache.core.keys import ChunkKey
from tiercache.memory.slots import Slot
from tiercache.memory.workers import to_the_end
from tiercache.payloads import Source
from tiercache.scheduler.writer import FanOut
from tiercache.tiers.base import Tier
from tiercache.tiers.cpu import CpuTier, Lease

_BATCH_BYTES = 32 << 20


class HostPath:
    """All methods belong to the event loop. Of several puts of one chunk at a time, one copies."""

    def __init__(self, cpu: CpuTier, fan_out: FanOut) -> None:
        self.cpu = cpu
        self.skipped = 0
        self._fan_out = fan_out
        self._filling: dict[ChunkKey, asyncio.Future[None]] = {}

    async def put(
        self, items: Sequence[tuple[ChunkKey, int, Source]], wait_s: float, *, prefix: bool = False
    ) -> int:
        """As `TierCache.put_from`. `wait_s` is for all of them together."""
        parents: dict[ChunkKey, ChunkKey] | None = None
        keys = [key for key, _, _ in items]
        if prefix:
            parents = dict(zip(keys[1:], keys, strict=False))
            # What is here is used before room is made for the rest: nothing of the same prefix goes for that.
            self.cpu.touch_prefix(keys)
        deadline_s = asyncio.get_running_loop().time() + wait_s
        stored = position = 0
        elsewhere: list[tuple[ChunkKey, asyncio.Future[None]]] = []
        while position < len(items):
            batch = items[position : position + self._batch_items]
            hot, passed = await self._put_batch(batch, parents, elsewhere, deadline_s)
            stored += hot
            if prefix:
                self.cpu.follow(keys[max(0, position - 1) : position + passed + 1])
            position += passed
        for key, other in elsewhere:
            # Somebody else is filling the same chunk at this moment: theirs is as good as ours.
            await asyncio.wait([other], timeout=max(0.0, deadline_s - asyncio.get_running_loop().time()))
            stored += self.cpu.contains(key)
        return stored

    async def _put_batch(
        self,
        items: Sequence[tuple[ChunkKey, int, Source]],
        parents: Mapping[ChunkKey, ChunkKey] | None,
        elsewhere: list[tuple[ChunkKey, asyncio.Future[None]]],
        deadline_s: float,
    ) -> tuple[int, int]:
        """How many chunks are hot now, and how many of `items` that was about: the batch ends where a slot has to be waited
        for, since whoever waits must not hold what others wait for."""
        fills: dict[ChunkKey, tuple[Slot, int, Source]] = {}
        leases: list[Lease] = []
        passed = 0
        filled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            for key, length, source in items:
                if key not in fills:
                    lease = self.cpu.lease(key, writes=True)
                    if lease is not None:
                        if parents is None:
                            self.cpu.touch([key])
                        leases.append(lease)
                    elif key in self._filling:
                        elsewhere.append((key, self._filling[key]))
                    else:
                        slot = self.cpu.try_reserve(Purpose.WRITE)
                        if slot is not None:
                            self._filling[key] = filled
                        elif fills or leases:
                            break
                        else:
                            slot = await self._slot_to_fill(key, filled, deadline_s)
                        if slot is not None:
                            fills[key] = (slot, length, source)
                        elif self.cpu.contains(key) or key in self._filling:
                            # While we waited, somebody else began the same chunk, or finished it.
                            elsewhere.append((key, self._filling.get(key, filled)))
                passed += 1
            if fills:
                work = [(self.cpu.pool.view(slot), length, source) for slot, length, source in fills.values()]
                await to_the_end(self.cpu.copiers.submit(_fill, work))
        except BaseException:
            for slot, _, _ in fills.values():
                self.cpu.abandon(slot, Purpose.WRITE)
            for lease in leases:
                lease.release()
            raise
        else:
            leases += [
                self.cpu.publish(key, slot, length, Purpose.WRITE, parents.get(key) if parents else None)
                for key, (slot, length, _) in fills.items()
            ]
        finally:
            for key in fills:
                self._filling.pop(key, None)
            filled.set_result(None)
        stored = len(leases)
        await self._fan_out.offer(leases, self.lease_for)
        return stored, passed

    async def _slot_to_fill(self, key: ChunkKey, filled: asyncio.Future[None], deadline_s: float) -> Slot | None:
        """A slot for `key`, announced as being filled; None when none came free in time."""
        slot = await self.cpu.reserve(Purpose.WRITE, deadline_s - asyncio.get_running_loop().time())
        if slot is None:
            self.skipped += 1
        elif self._filling.setdefault(key, filled) is not filled or self.cpu.contains(key):
            self.cpu.abandon(slot, Purpose.WRITE)
            return None
        return slot

    def lease_for(self, key: ChunkKey, tier: Tier) -> Lease | None:
        """A writer's hold on a hot chunk; None when it is not hot any more."""
        return self.cpu.lease(key, writes=True)

    @property
    def _batch_items(self) -> int:
        """Chunks that are copied in one hand-over: few enough that tiers begin to write while the rest is copied, and that a
        batch fits beside the floor for reads (it would wait for its own slots)."""
        return max(1, min(self.cpu.pool.count // 4, max(1, _BATCH_BYTES // self.cpu.pool.slot_bytes)))


def _fill(work: Sequence[tuple[np.ndarray, int, Source]]) -> None:
    """Fill slots and zero the padding behind each payload, so that no tier ever stores another chunk's bytes."""
    for slot, length, source in work:
        source(slot[:length])
        end = aligned(length)
        if end != length:
            slot[length:end] = 0
