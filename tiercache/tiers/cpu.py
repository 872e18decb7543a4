"""The CPU tier: the hot cache, and the staging memory of everything that passes through.

Residency is decided synchronously on the loop. A chunk is here while its slot is; a lease keeps the slot from being
reused, and every chunk that a write queue still has to write is leased by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tiercache.core.budget import PREFETCH, READ, WRITE, Purpose, SlotBudget
from tiercache.core.eviction import Order, make_order
from tiercache.core.index import prefix_in
from tiercache.core.keys import ChunkKey
from tiercache.core.under_way import UnderWay
from tiercache.errors import CacheClosed
from tiercache.memory.slots import Fill, Pool, Slot, fill_slot
from tiercache.memory.turns import Turns
from tiercache.memory.workers import Workers, once_ended, to_the_end
from tiercache.payloads import source_of
from tiercache.tiers.base import Tier, TierStatistics, Traits
from tiercache.tiers.leases import ONE, Entry, Lease
from tiercache.tiers.parked import Parked


class CpuTier(Tier):
    """Slots, residents, leases. `keep` is `local_cpu`: without it a chunk goes when its last lease ends."""

    name = "cpu"
    traits = Traits()
    on_device = False

    def __init__(self, pool: Pool, copiers: Workers, *, policy: str = "LRU", keep: bool = True) -> None:
        self.pool = pool
        self.copiers = copiers
        self.keep = keep
        self.budget = SlotBudget.for_arena(pool.count)
        self._entries: dict[ChunkKey, Entry] = {}
        self._order: Order[Entry] = make_order(policy)
        self._evictable = 0
        self._parked = Parked(self._order)
        self.under_way = UnderWay()
        """What will be a chunk here when it is filled, so that a forget reaches it."""
        self.turns = Turns(self._take_slot, self.abandon, by_tier=True)
        """Of those who wait for a slot."""
        self._readers: dict[Slot, str] = {}
        """Which tier reads into a slot that is not a chunk yet."""
        self._statistics = TierStatistics()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.on_use: Callable[[ChunkKey], None] | None = None
        """Called when a chunk is read that is held for somebody to come."""
        self.on_evict: Callable[[Sequence[ChunkKey]], None] | None = None
        """Called when chunks were evicted, and not when somebody removed them."""
        self.on_forget: Callable[[ChunkKey], None] | None = None
        """Called when a chunk was removed that is held for somebody to come."""
        self._on_change: Callable[[ChunkKey], None] | None = None

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        self.turns.close()

    # Memory

    def view(self, entry: Entry, length_bytes: int) -> Any:
        """As `Keeper.view`: uint8, read-only."""
        return self.pool.readable(entry.slot, length_bytes)

    # Residency

    def contains(self, key: ChunkKey) -> bool:
        return key in self._entries

    @property
    def residents(self) -> Collection[ChunkKey]:
        """As `contains`, for many: a look into it costs no call."""
        return self._entries

    def prefix(self, keys: Sequence[ChunkKey]) -> int:
        return prefix_in(self._entries, keys)

    def offered(self) -> Sequence[Container[ChunkKey]]:
        return (self._entries,) if self.traffic.refuses_none else super().offered()

    def tell(self, on_change: Callable[[ChunkKey], None]) -> None:
        self._on_change = on_change

    def lease(self, key: ChunkKey, *, writes: bool = False, noted: bool = False) -> Lease | None:
        """Hold a resident chunk; None when it is not here. A reader's lease counts as a use unless that use is `noted`
        already, a writer's does not."""
        if (entry := self._entries.get(key)) is None:
            return None
        return self.begin_lease(entry, WRITE) if writes else self.serve(entry, READ, noted=noted)

    def hold(self, key: ChunkKey) -> Lease | None:
        """Keep a resident chunk from eviction for a reader who may come; not a use. None when it is not here."""
        entry = self._entries.get(key)
        return None if entry is None else self.begin_lease(entry, PREFETCH)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Note a use of those of `keys` that are resident."""
        for entry in filter(None, map(self._entries.get, keys)):
            self._parked.note_use(entry)

    def touch_prefix(self, keys: Sequence[ChunkKey]) -> None:
        """Note one use of those of `keys` that are resident, so that the tail of the prefix is colder than its head."""
        self._order.touch_prefix(keys)
        self._parked.note_prefix(keys, self._entries)

    def renew(self, keys: Sequence[ChunkKey]) -> None:
        """`keys` are expected soon: those that are resident are as far from going as if they had been used, from the last of
        the prefix to the first. No use is counted."""
        for entry in map(self._entries.get, reversed(keys)):
            if entry is not None and not entry.parked:
                self._order.renew(entry.key)

    def follow(self, keys: Sequence[ChunkKey]) -> None:
        """Learn that `keys` follow one another in a prefix: the order evicts none of them before those behind it."""
        self._order.follow(keys)

    # Slots

    @property
    def most_slots(self) -> int:
        """What one tenant may hold."""
        return self.pool.count

    @property
    def obtainable(self) -> int:
        """Slots that are free or evictable now."""
        return self.pool.free + self._evictable

    def next_victim(self, key: ChunkKey | None = None) -> ChunkKey | None:
        """Which chunk would be evicted for a slot for `key` now; None where one is free, or none can be had."""
        while not self.pool.free and self._evictable:
            victim = self._order.coldest()
            assert victim is not None
            if not self._entries[victim].leases:
                return victim
            self._parked.park(self._order.pop_victim()[1])
        return None

    def spares(self, key: ChunkKey) -> bool:
        """Whether a resident may be kept from eviction for somebody who may come: reads and writes have enough."""
        return self.budget.allows(PREFETCH, self.obtainable)

    def try_reserve(self, purpose: Purpose, tier: str | None = None, key: ChunkKey | None = None) -> Slot | None:
        """A slot to fill, evicting the first victim when none is free; None when the budget says wait, or somebody waits
        already. `tier` is who reads into it, `key` what the chunk will be.

        The slot belongs to the caller until `publish` or `abandon`, which must get the same `purpose`.
        """
        if self.turns.waiting[purpose]:
            return None
        return self._take_slot(purpose, tier, key)

    def try_reserve_all(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, Slot]:
        """As `try_reserve` for the write of each of `keys`, all different, up to the first one that gets none."""
        if self.turns.waiting[WRITE]:
            return {}
        count = min(len(keys), self.budget.writes_allowed(self.obtainable))
        slots: list[Slot] = []
        while len(slots) < count and (slot := self.pool.take()) is not None:
            slots.append(slot)
        slots += self._evict(self._order.pop_victim, count - len(slots))
        self.budget.held[WRITE] += count
        return dict(zip(keys, slots, strict=False))

    async def reserve(self, purpose: Purpose, timeout_s: float, key: ChunkKey | None = None) -> Slot | None:
        """As `try_reserve`, waiting up to `timeout_s` for leases to end. Cancelled while waiting, it holds nothing.

        Raises CacheClosed when the cache is closed meanwhile.
        """
        slot = self.try_reserve(purpose, None, key)
        if slot is None:
            if timeout_s <= 0:
                await asyncio.sleep(0)  # a caller that is refused again and again must not keep the loop
            until_s = asyncio.get_running_loop().time() + timeout_s
            slot = await self.turns.wait(purpose, lambda: until_s, None, key)
            if slot is None and self.turns.closed:
                raise CacheClosed("the cache was closed while this waited for room")
        return slot

    def publish(
        self, key: ChunkKey, slot: Slot, payload_bytes: int, purpose: Purpose, parent: ChunkKey | None = None
    ) -> Lease:
        """Make a filled slot the chunk `key`, and hold it with a lease of that purpose. `parent` is the chunk before it.

        When the key became resident meanwhile the first copy stays and the slot is free again: whoever has a lease on the
        first copy keeps it, and equal keys have equal bytes.
        """
        tier = self._readers.pop(slot, None) if self._readers else None
        entry = self._entries.get(key)
        if entry is not None:
            self.budget.give_back(purpose, tier)
            self.pool.give_back(slot)
            lease = self.begin_lease(entry, purpose)
            self.turns.serve()
            return lease
        entry = self._entries[key] = Entry(key, slot, payload_bytes)
        entry.leases = ONE[purpose]
        self._order.insert(key, entry, parent)
        self._statistics.writes += 1
        self._statistics.written_bytes += payload_bytes
        self._changed(key)
        if tier is not None:
            self.budget.arrived(tier)
            self.turns.serve()  # it counts for reads now, and no longer for a tier that may have had its share
        return Lease(self, entry, purpose)

    def publish_all(self, fills: Mapping[ChunkKey, Fill], parents: Mapping[ChunkKey, ChunkKey]) -> None:
        """As `publish` of what a put has filled, with no lease: nobody writes it to another tier, so it may go at once."""
        new: dict[ChunkKey, Entry] = {}
        for key, (slot, payload_bytes, _) in fills.items():
            if key in self._entries:
                self.pool.give_back(slot)
            else:
                new[key] = Entry(key, slot, payload_bytes)
        self._order.insert_all(new, parents)
        self._entries.update(new)
        self._evictable += len(new)
        self.budget.held[WRITE] -= len(fills)
        self._statistics.writes += len(new)
        self._statistics.written_bytes += sum(entry.payload_bytes for entry in new.values())
        for key in new if self._on_change is not None else ():
            self._changed(key)
        self.turns.serve()

    def abandon(self, slot: Slot, purpose: Purpose) -> None:
        """Give back a reserved slot that was not filled, or whose chunk was forgotten meanwhile."""
        self.budget.give_back(purpose, self._readers.pop(slot, None))
        self.pool.give_back(slot)
        self.turns.serve()

    def forget(self, key: ChunkKey) -> bool:
        """Make `key` invisible at once, and what of it is under way by now when it arrives; its slot is free when its leases
        have ended."""
        self.under_way.forget(key)
        return self._drop(key)

    def _drop(self, key: ChunkKey) -> bool:
        if (entry := self._entries.pop(key, None)) is None:
            return False
        entry.hot = False
        self._parked.discard(entry)
        self._changed(key)
        if not entry.leases:
            self._evictable -= 1
            self.pool.give_back(entry.slot)
            self.turns.serve()
        elif entry.holds and self.on_forget is not None:
            self.on_forget(key)
        return True

    def clear(self) -> int:
        """Let every chunk go that is not being written; returns how many. What is on its way arrives."""
        clean = [key for key, entry in self._entries.items() if entry.held_for is not WRITE]
        for key in clean:
            self._drop(key)
        return len(clean)

    # The Tier interface, for whoever treats all tiers alike

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        if (lease := self.lease(key)) is None:
            self._statistics.read_misses += 1
            return None
        with lease:
            await to_the_end(self.copiers.submit(np.copyto, into[: lease.payload_bytes], lease.view))
            return lease.payload_bytes

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        if key in self._entries:
            return True
        slot = self.try_reserve(WRITE, None, key)
        if slot is None:
            return False
        passage, filling = self.under_way.begin([key]), []
        try:
            _, source = source_of(payload[:payload_bytes])
            filling = [self.copiers.submit(fill_slot, self.pool.view(slot), payload_bytes, source)]
            await to_the_end(filling[0])
        except BaseException:
            once_ended(filling, lambda: self.abandon(slot, WRITE))
            raise
        finally:
            self.under_way.end(passage)
        if passage.forgot(key):
            self.abandon(slot, WRITE)
            return False
        self.publish(key, slot, payload_bytes, WRITE).release()
        return True

    async def remove(self, key: ChunkKey) -> bool:
        return self.forget(key)

    def statistics(self) -> TierStatistics:
        occupied_bytes = (self.pool.count - self.pool.free) * self.pool.slot_bytes
        return replace(self._statistics, resident=len(self._entries), occupied_bytes=occupied_bytes)

    # Leases

    def serve(self, entry: Entry, purpose: Purpose, *, noted: bool) -> Lease:
        kept = entry.leases and entry.holds
        lease = self.begin_lease(entry, purpose)
        if purpose is READ:
            statistics = self._statistics
            statistics.reads += 1
            statistics.read_bytes += entry.payload_bytes
            if not noted:
                self._parked.note_use(entry)
            if kept and self.on_use is not None:
                self.on_use(entry.key)  # which ends the hold: by now the lease keeps it from whoever waits for a slot
        return lease

    def begin_lease(self, entry: Entry, purpose: Purpose) -> Lease:
        if not entry.leases:
            entry.leases = ONE[purpose]
            self._evictable -= 1
            self.budget.held[purpose] += 1
        else:
            self._count(entry, ONE[purpose])
        return Lease(self, entry, purpose)

    def end_lease(self, entry: Entry, purpose: Purpose) -> None:
        if entry.leases != ONE[purpose]:
            self._count(entry, -ONE[purpose])
            return
        entry.leases = 0
        self.budget.give_back(purpose)
        if not entry.hot:
            self.pool.give_back(entry.slot)
        elif not self.keep:
            del self._entries[entry.key]
            self._parked.discard(entry)
            self._changed(entry.key)
            self.pool.give_back(entry.slot)
        else:
            self._evictable += 1
            if entry.parked:
                self._parked.take_back(entry)
        if self.turns.waiters:
            self.turns.serve()

    def _count(self, entry: Entry, change: int) -> None:
        """A lease more or less on a chunk that others hold as well."""
        before = entry.held_for
        entry.leases += change
        after = entry.held_for
        if before is not after:
            assert before is not None and after is not None
            self.budget.give_back(before)
            self.budget.take(after)
            self.turns.serve()  # a slot that counts for another purpose leaves somebody one more

    def end_lease_from_anywhere(self, entry: Entry, purpose: Purpose) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.end_lease, entry, purpose)

    def _changed(self, key: ChunkKey) -> None:
        if self._on_change is not None:
            self._on_change(key)

    def _evict(self, pop_victim: Callable[[], tuple[ChunkKey, Entry] | None], most: int) -> list[Slot]:
        """The slots of the first victims that nobody holds, so many or as many as there are."""
        evicted: list[ChunkKey] = []
        slots: list[Slot] = []
        while len(slots) < most and (victim := pop_victim()) is not None:
            key, entry = victim
            if entry.leases:
                self._parked.park(entry)
                continue
            del self._entries[key]
            if self._on_change is not None:
                self._on_change(key)
            evicted.append(key)
            slots.append(entry.slot)
        self._evictable -= len(slots)
        self._statistics.evicted += len(slots)
        if evicted and self.on_evict is not None:
            self.on_evict(evicted)
        return slots

    def _take_slot(self, purpose: Purpose, tier: str | None, key: ChunkKey | None) -> Slot | None:
        free = self.pool.free
        if not self.budget.allows(purpose, free + self._evictable, tier):
            return None
        slot = self.pool.take() if free else self._evict(self._order.pop_victim, 1)[0]
        assert slot is not None
        self.budget.take(purpose, tier)
        if tier is not None and purpose is READ:
            self._readers[slot] = tier
        return slot
