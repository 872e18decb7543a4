"""The CPU tier where tenants have quotas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from tiercache.core.budget import PREFETCH, READ, WRITE, Purpose
from tiercache.core.eviction import ORDERS, TenantOrder
from tiercache.core.keys import ChunkKey, Tenant, tenant_of
from tiercache.core.tenants import Shares, shown
from tiercache.memory.slots import Fill, Pool, Slot
from tiercache.memory.workers import Workers
from tiercache.tiers.base import TierStatistics
from tiercache.tiers.cpu import CpuTier
from tiercache.tiers.leases import Entry, Lease
from tiercache.tiers.parked import Parked


class OwnedSlots:
    """A pool whose slots in use belong to tenants: also those that are being filled, and those of removed chunks that
    somebody still has a lease on."""

    def __init__(self, pool: Pool, shares: Shares) -> None:
        self.slot_bytes = pool.slot_bytes
        self.count = pool.count
        self.view = pool.view
        self.readable = pool.readable
        self.close = pool.close
        self._pool = pool
        self._shares = shares
        self._owners: list[Tenant | None] = [None] * pool.count

    @property
    def free(self) -> int:
        return self._pool.free

    def take(self) -> Slot | None:
        return self._pool.take()

    def give_back(self, slot: Slot) -> None:
        self.own(slot, None)
        self._pool.give_back(slot)

    def own(self, slot: Slot, tenant: Tenant | None) -> None:
        """From now on it is his."""
        before, self._owners[slot] = self._owners[slot], tenant
        if before is not None:
            self._shares.hold(before, -self.slot_bytes, -1)
        if tenant is not None:
            self._shares.hold(tenant, self.slot_bytes, 1)

    def owner(self, slot: Slot) -> Tenant | None:
        return self._owners[slot]


class TenantCpuTier(CpuTier):
    """A tenant who has as many slots as his quota allows gets the next one from his own least valuable chunk that nobody
    holds, else he waits, and the others do not wait for him. What is prefetched, pinned or claimed for a tenant takes a part
    of his quota at most, as all of it does of the hot cache, so that his reads and writes find room."""

    def __init__(
        self, pool: Pool, copiers: Workers, quota_bytes: int, ahead_share: float, *, policy: str = "LRU"
    ) -> None:
        """`quota_bytes` is every tenant's; `ahead_share` the part of it for what may only be wanted."""
        self._tenants: TenantOrder[Entry] = TenantOrder(ORDERS[policy.upper()], quota_bytes)
        self._slots = OwnedSlots(pool, self._tenants.shares)
        super().__init__(self._slots, copiers, policy=policy)
        self._order = self._tenants
        self._parked = Parked(self._tenants)
        self._most_ahead = int(ahead_share * (quota_bytes // pool.slot_bytes))
        self._ahead: dict[Tenant, int] = {}
        """Slots that are kept for somebody to come, or are read into for that."""
        self.turns.stands_aside = self._stands_aside

    def statistics(self) -> TierStatistics:
        counters = super().statistics()
        counters.tenants = shown(self._tenants.shares.statistics())
        return counters

    # Slots

    @property
    def most_slots(self) -> int:
        return min(self.pool.count, self._tenants.shares.most_bytes // self.pool.slot_bytes)

    def next_victim(self, key: ChunkKey | None = None) -> ChunkKey | None:
        tenant = _tenant_of(key)
        if not self._is_at_quota(tenant):
            return super().next_victim(key)
        while (victim := self._tenants.coldest_of(tenant)) is not None:
            if not self._entries[victim].leases:
                return victim
            self._pop_held(tenant)
        return None

    def spares(self, key: ChunkKey) -> bool:
        return super().spares(key) and self._may_come_ahead(tenant_of(key))

    def try_reserve(self, purpose: Purpose, tier: str | None = None, key: ChunkKey | None = None) -> Slot | None:
        if any(not self._stands_aside(purpose, turn.key) for turn in self.turns.waiting[purpose]):
            return None
        return self._take_slot(purpose, tier, key)

    def try_reserve_all(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, Slot]:
        reserved: dict[ChunkKey, Slot] = {}
        for key in keys:
            slot = self.try_reserve(WRITE, None, key)
            if slot is None:
                break
            reserved[key] = slot
        return reserved

    def abandon(self, slot: Slot, purpose: Purpose) -> None:
        if purpose is PREFETCH:
            self._count_ahead(self._slots.owner(slot), -1)
        super().abandon(slot, purpose)

    def publish(
        self, key: ChunkKey, slot: Slot, payload_bytes: int, purpose: Purpose, parent: ChunkKey | None = None
    ) -> Lease:
        if purpose is PREFETCH:
            self._count_ahead(self._slots.owner(slot), -1)
            if key not in self._entries:  # else a first copy stays, and is counted when its lease begins
                self._count_ahead(tenant_of(key), 1)
        self._own(slot, key)
        return super().publish(key, slot, payload_bytes, purpose, parent)

    def publish_all(self, fills: Mapping[ChunkKey, Fill], parents: Mapping[ChunkKey, ChunkKey]) -> None:
        for key, (slot, _, _) in fills.items():
            self._own(slot, key)
        super().publish_all(fills, parents)

    # Leases

    def begin_lease(self, entry: Entry, purpose: Purpose) -> Lease:
        if purpose is PREFETCH and not entry.holds:
            self._count_ahead(tenant_of(entry.key), 1)
        return super().begin_lease(entry, purpose)

    def end_lease(self, entry: Entry, purpose: Purpose) -> None:
        if purpose is PREFETCH and entry.holds == 1:
            self._count_ahead(tenant_of(entry.key), -1)
        super().end_lease(entry, purpose)

    # Quotas

    def _take_slot(self, purpose: Purpose, tier: str | None, key: ChunkKey | None) -> Slot | None:
        tenant = _tenant_of(key)
        if not self.budget.allows(purpose, self.obtainable, tier):
            return None
        if purpose is PREFETCH and not self._may_come_ahead(tenant):
            return None
        at_quota = self._is_at_quota(tenant)
        slot = None if at_quota else self.pool.take()
        if slot is None:
            pop_victim = partial(self._tenants.pop_victim_of, tenant) if at_quota else self._order.pop_victim
            slot = next(iter(self._evict(pop_victim, 1)), None)
        if slot is None:
            return None
        self._slots.own(slot, tenant)
        self.budget.take(purpose, tier)
        if tier is not None and purpose is READ:
            self._readers[slot] = tier
        if purpose is PREFETCH:
            self._count_ahead(tenant, 1)
        return slot

    def _evict(self, pop_victim: Callable[[], tuple[ChunkKey, Entry] | None], most: int) -> list[Slot]:
        slots = super()._evict(pop_victim, most)
        for owner in map(self._slots.owner, slots):
            if owner is not None:
                self._tenants.shares.note_evicted(owner)
        return slots

    def _own(self, slot: Slot, key: ChunkKey) -> None:
        """It is the chunk's tenant's, also where nobody had said what it was for."""
        tenant = tenant_of(key)
        if self._slots.owner(slot) != tenant:
            self._slots.own(slot, tenant)

    def _pop_held(self, tenant: Tenant) -> None:
        found = self._tenants.pop_victim_of(tenant)
        assert found is not None
        self._parked.park(found[1])

    def _stands_aside(self, purpose: Purpose, key: ChunkKey | None) -> bool:
        tenant = _tenant_of(key)
        return self._is_at_quota(tenant) or (purpose is PREFETCH and not self._may_come_ahead(tenant))

    def _is_at_quota(self, tenant: Tenant) -> bool:
        return self._tenants.shares.lacking_bytes(tenant, self.pool.slot_bytes) > 0

    def _may_come_ahead(self, tenant: Tenant) -> bool:
        return self._ahead.get(tenant, 0) < self._most_ahead

    def _count_ahead(self, tenant: Tenant | None, change: int) -> None:
        assert tenant is not None
        count = self._ahead.get(tenant, 0) + change
        if count:
            self._ahead[tenant] = count
        else:
            del self._ahead[tenant]


def _tenant_of(key: ChunkKey | None) -> Tenant:
    return b"" if key is None else tenant_of(key)
