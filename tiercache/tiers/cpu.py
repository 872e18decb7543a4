"""The CPU tier: the hot cache, and the staging memory of all transfers.

Residency is decided synchronously on the loop. A chunk is resident while it has a slot. A lease keeps the slot from
being reused, and a write queue leases every chunk that it still has to write.

A tenant at its quota gets the next slot from its own coldest leaf, or waits, and other tenants do not wait for it. Pins
and prefetches use at most a part of each quota and of the whole hot cache, so that reads and writes find room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import replace
from heapq import nlargest
from operator import attrgetter
from typing import Any

import numpy as np

from tiercache.core.eviction import LeafLru, Resident
from tiercache.core.index import counts_in
from tiercache.core.keys import ChunkKey, Tenant, tenant_of
from tiercache.core.tenants import Shares, shown
from tiercache.core.tombstones import Tombstones
from tiercache.device.device import Device
from tiercache.device.driver import Tensor, host_tensor
from tiercache.errors import CacheClosed
from tiercache.memory.slots import (
    ONE,
    PREFETCH,
    READ,
    WRITE,
    Lease,
    LeaseOwner,
    Pool,
    Purpose,
    Slot,
    SlotBudget,
    SlotPool,
    WaitQueue,
    pins_in,
    purpose_of,
)
from tiercache.memory.workers import Workers, wait_shielded
from tiercache.tiers.base import Tier, TierStatistics

_AT_ONCE = 256
"""Chunks evicted in one iteration of the loop, after a limit was lowered."""


class SlotQuotas:
    """The slots of each tenant, including those being filled, and those of removed chunks that are still leased."""

    def __init__(self, quota_bytes: int, slots: int, slot_bytes: int, prefetch_share: float) -> None:
        """`quota_bytes` is every tenant's quota, and `prefetch_share` its part for pins and prefetches."""
        self.shares = Shares(quota_bytes)
        self._slot_bytes = slot_bytes
        self._owners: list[Tenant | None] = [None] * slots
        self._prefetch_share = prefetch_share
        self.limit(quota_bytes)
        self._pinned: dict[Tenant, int] = {}
        """Slots per tenant that are pinned, or being read into for a prefetch."""

    def limit(self, quota_bytes: int) -> None:
        """Set every tenant's quota."""
        self.shares.limit(quota_bytes)
        self.slots = quota_bytes // self._slot_bytes
        """Quota of a tenant in slots."""
        self._most_pinned = int(self._prefetch_share * self.slots)

    def owner(self, slot: Slot) -> Tenant | None:
        return self._owners[slot]

    def own(self, slot: Slot, tenant: Tenant | None) -> None:
        before = self._owners[slot]
        if before == tenant:
            return
        self._owners[slot] = tenant
        if before is not None:
            self.shares.hold(before, -self._slot_bytes, -1)
        if tenant is not None:
            self.shares.hold(tenant, self._slot_bytes, 1)

    def at_quota(self, tenant: Tenant) -> bool:
        return self.shares.lacking_bytes(tenant, self._slot_bytes) > 0

    def excess(self, tenant: Tenant) -> int:
        """Return the number of slots that the tenant has above its quota."""
        return -(-self.shares.lacking_bytes(tenant) // self._slot_bytes)

    def may_pin(self, tenant: Tenant) -> bool:
        return self._pinned.get(tenant, 0) < self._most_pinned

    def pin(self, tenant: Tenant | None, change: int) -> None:
        assert tenant is not None
        count = self._pinned.get(tenant, 0) + change
        if count:
            self._pinned[tenant] = count
        else:
            del self._pinned[tenant]


class CpuTier(LeaseOwner, Tier):
    """Slots, residents, leases. Chunks arrive by `publish`, so `write` declines them."""

    name = "cpu"

    def __init__(
        self,
        pool: Pool,
        copiers: Workers,
        *,
        policy: str = "LRU",
        keep: bool = True,
        quota_bytes: int = 0,
        prefetch_share: float = 1.0,
    ) -> None:
        """`keep` is `local_cpu`: without it a chunk is removed when its last lease ends.

        `quota_bytes` limits each tenant, 0 means no limit; pins and prefetches may use `prefetch_share` of a quota.
        """
        super().__init__()
        self.pool = pool
        self.copiers = copiers
        self.keep = keep
        self.budget = SlotBudget(pool.count)
        self._order = LeafLru(policy, by_tenant=quota_bytes > 0)
        self._entries = self._order.entries
        self._quotas: SlotQuotas | None = None
        if quota_bytes:
            self._quotas = SlotQuotas(quota_bytes, pool.count, pool.slot_bytes, prefetch_share)
        self.tombstones = Tombstones()
        """Chunks that were forgotten lately, perhaps while puts and reads of them were in flight."""
        self.wait_queue = WaitQueue(self._take_slot, self.abandon, self._blocks_only_itself)
        """Waiters for a slot."""
        self._statistics = TierStatistics()
        self._on_change: Callable[[ChunkKey], None] | None = None
        self._excess = False
        """True while there is more than limits allow that were lowered."""

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        self.wait_queue.close()
        self._excess = False  # leases may end later

    # Memory

    @property
    def capacity_bytes(self) -> int:
        return self.budget.slots * self.pool.slot_bytes

    def view(self, entry: Resident, length_bytes: int) -> Any:
        """Return the first bytes of a chunk: uint8, read-only."""
        return self.pool.readable(entry.slot, length_bytes)

    @property
    def slot_pool(self) -> SlotPool:
        assert isinstance(self.pool, SlotPool)
        return self.pool

    def limit(self, slots: int, populated: Sequence[Slot], quota_bytes: int) -> None:
        """Set the number of slots, with those that `SlotPool.populated` returned for it, and the quota of every tenant of
        a tier that has quotas; `evict_excess` follows.
        """
        self.slot_pool.resize(slots, populated)
        self.budget.resize(slots)
        if self._quotas is not None:
            self._quotas.limit(quota_bytes)
        self._evict_excess()
        self.wait_queue.serve()

    async def evict_excess(self) -> None:
        """Evict what is above limits that were lowered, the coldest leaves first, in short steps. Leased chunks go when
        their leases end.
        """
        while self._evict_excess():
            self.wait_queue.serve()
            await asyncio.sleep(0)

    def _evict_excess(self) -> bool:
        """Evict some of what is above limits that were lowered. Return True if it evicted any."""
        pool, quotas = self.slot_pool, self._quotas
        evicted = self._evict(min(pool.count - pool.most, _AT_ONCE))
        pool.withdraw(evicted)
        self._excess = pool.count > pool.most
        if quotas is not None:
            for tenant in list(quotas.shares.holdings):
                slots = self._evict(min(quotas.excess(tenant), _AT_ONCE), tenant)
                for slot in slots:
                    pool.give_back(slot)
                evicted += slots
            self._excess |= quotas.shares.over is not None
        return bool(evicted)

    # Residency

    def contains(self, key: ChunkKey) -> bool:
        return key in self._entries

    @property
    def residents(self) -> Collection[ChunkKey]:
        """The keys that `contains` is True for: a lookup in it costs no call."""
        return self._entries

    def prefix(self, keys: Sequence[ChunkKey]) -> int:
        return counts_in((self._entries,), keys)[0]

    def offered(self) -> Sequence[Container[ChunkKey]]:
        return (self._entries,)

    def tell(self, on_change: Callable[[ChunkKey], None]) -> None:
        self._on_change = on_change

    def lease(self, key: ChunkKey, *, writes: bool = False, counted: bool = False) -> Lease | None:
        """Return a lease on a resident chunk, or None.

        A reader's lease is an access unless that is `counted` already; a writer's is not.
        """
        if (entry := self._entries.get(key)) is None:
            return None
        return self.begin_lease(entry, WRITE) if writes else self.serve(entry, READ, counted=counted)

    def pin(self, key: ChunkKey) -> Lease | None:
        """Pin a resident chunk for a future reader, or return None. Not an access."""
        entry = self._entries.get(key)
        return None if entry is None else self.begin_lease(entry, PREFETCH)

    def access(self, keys: Sequence[ChunkKey], *, prefix: bool = True) -> int:
        """Refresh the residents among `keys`. `prefix`: each key follows the previous one in a prefix.

        Returns the time of the access, which `publish` needs for the missing chunks.
        """
        return self._order.access(keys, prefix=prefix)

    def access_for_put(self, keys: Sequence[ChunkKey], *, prefix: bool) -> dict[ChunkKey, int]:
        """Refresh the residents among distinct `keys` before a put makes room for the rest, so that it evicts none of them.

        Returns the time of each key, which `publish` needs. It decreases along a prefix.
        """
        latest_first = keys if prefix else keys[::-1]
        time = self._order.access(latest_first, prefix=prefix)
        return dict(zip(latest_first, range(time, time - len(keys), -1), strict=True))

    def renew(self, keys: Sequence[ChunkKey]) -> None:
        """Make the residents among `keys`, an expected prefix, as recent as an access would, without counting an access."""
        self._order.renew(keys)

    def hottest(self, most: int) -> list[ChunkKey]:
        """Return the keys of up to `most` residents, the last to be evicted first."""
        return [entry.key for entry in nlargest(most, self._entries.values(), key=attrgetter("rank"))]

    def link(self, keys: Sequence[ChunkKey], time: int | None = None) -> None:
        """Record that `keys` follow one another in a prefix: no key is evicted before its descendants.

        `time` is the result of `access` for them.
        """
        self._order.link(keys, time)

    # Slots

    @property
    def most_slots(self) -> int:
        """Limit of slots for a tenant."""
        return self.budget.slots if self._quotas is None else min(self.budget.slots, self._quotas.slots)

    @property
    def obtainable(self) -> int:
        """Number of slots that are free or evictable now."""
        return self.pool.free + self._order.evictable

    def spares(self, key: ChunkKey) -> bool:
        """Return True if a resident may be pinned: enough slots are left for reads and writes."""
        pinnable = self._quotas is None or self._quotas.may_pin(tenant_of(key))
        return pinnable and self.budget.allows(PREFETCH, self.obtainable)

    def has_free(self, key: ChunkKey) -> bool:
        """Return True if `key` can get a slot without an eviction."""
        return self.pool.free > 0 and self._tenant_at_quota(key) is None

    def try_reserve(self, purpose: Purpose, key: ChunkKey | None = None) -> Slot | None:
        """Return a slot to fill, evicting the first victim if none is free.

        Returns None if the budget does not allow it or others wait already. `key` is the key of the chunk to fill. The
        slot belongs to the caller until `publish` or `abandon`, which must get the same `purpose`.
        """
        waiting = self.wait_queue.waiting[purpose]
        if waiting and any(not self._blocks_only_itself(purpose, waiting_key) for _, waiting_key in waiting):
            return None
        return self._take_slot(purpose, key)

    def try_reserve_all(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, Slot]:
        """Reserve slots to write distinct `keys`, up to the first key without a slot; see `try_reserve`."""
        if self._quotas is not None:
            reserved: dict[ChunkKey, Slot] = {}
            for key in keys:
                slot = self.try_reserve(WRITE, key)
                if slot is None:
                    break
                reserved[key] = slot
            return reserved
        if self.wait_queue.waiting[WRITE]:
            return {}
        count = min(len(keys), self.budget.writes_allowed(self.obtainable))
        slots: list[Slot] = []
        while len(slots) < count and (slot := self.pool.take()) is not None:
            slots.append(slot)
        slots += self._evict(count - len(slots))
        self.budget.held[WRITE] += count
        return dict(zip(keys, slots, strict=False))

    async def reserve(self, purpose: Purpose, timeout_s: float, key: ChunkKey | None = None) -> Slot | None:
        """Reserve a slot as `try_reserve` does, waiting up to `timeout_s` for leases to end. Holds nothing if
        cancelled.

        Raises CacheClosed if the cache is closed meanwhile.
        """
        slot = self.try_reserve(purpose, key)
        if slot is None:
            if timeout_s <= 0:
                await asyncio.sleep(0)  # a caller that is refused repeatedly must not block the loop
            until_s = asyncio.get_running_loop().time() + timeout_s
            slot = await self.wait_queue.wait(purpose, lambda: until_s, key)
            if slot is None and self.wait_queue.closed:
                raise CacheClosed("the cache was closed while this waited for room")
        return slot

    def publish(
        self,
        key: ChunkKey,
        slot: Slot,
        payload_bytes: int,
        purpose: Purpose,
        parent: ChunkKey | None = None,
        time: int | None = None,
    ) -> Lease:
        """Publish a filled slot as the chunk `key`, and return a lease of that purpose.

        `parent` is the previous chunk in its prefix, `time` the time of its access. If the key is resident by now,
        the first copy stays and the slot is freed: leases on the first copy continue, and equal keys have equal bytes.
        """
        quotas = self._quotas
        if quotas is not None and purpose is PREFETCH:
            quotas.pin(quotas.owner(slot), -1)
        entry = self._entries.get(key)
        if entry is not None:
            self.budget.give_back(purpose)
            self._free(slot)
            lease = self.begin_lease(entry, purpose)
            self.wait_queue.serve()
            return lease
        entry = Resident(key, slot, payload_bytes)
        entry.leases = ONE[purpose]
        if quotas is not None:
            quotas.own(slot, tenant_of(key))
            if purpose is PREFETCH:
                quotas.pin(tenant_of(key), 1)
        self._order.insert(entry, parent, time, in_order=purpose is WRITE)
        self._statistics.writes += 1
        self._statistics.written_bytes += payload_bytes
        self._changed(key)
        return Lease(self, entry, purpose)

    def abandon(self, slot: Slot, purpose: Purpose) -> None:
        """Release a reserved slot that was not filled, or whose chunk was forgotten meanwhile."""
        if self._quotas is not None and purpose is PREFETCH:
            self._quotas.pin(self._quotas.owner(slot), -1)
        self.budget.give_back(purpose)
        self._free(slot)
        self.wait_queue.serve()

    def forget(self, key: ChunkKey) -> bool:
        """Make `key` invisible at once, and discard the results of operations in flight on it.

        Its slot is free when its leases have ended.
        """
        self.tombstones.forget(key)
        return self._drop(key)

    def _drop(self, key: ChunkKey) -> bool:
        if (entry := self._order.discard(key)) is None:
            return False
        entry.hot = False
        self._changed(key)
        if not entry.leases:
            self._free(entry.slot)
            self.wait_queue.serve()
        elif pins_in(entry.leases) and self.on_forget is not None:
            self.on_forget(key)
        return True

    def clear(self, keys: Iterable[ChunkKey] | None = None) -> int:
        """Remove the residents among `keys` (by default all) that are not being written, and return their number.

        Chunks in flight arrive later.
        """
        entries = self._entries
        wanted = entries if keys is None else [key for key in keys if key in entries]
        clean = [key for key in wanted if purpose_of(entries[key].leases) is not WRITE]
        return sum([self._drop(key) for key in clean])

    # The rest of the Tier interface

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        if (lease := self.lease(key)) is None:
            self._statistics.read_misses += 1
            return None
        with lease:
            await self._copy(into[: lease.payload_bytes], lease.view)
            return lease.payload_bytes

    async def _copy(self, into: np.ndarray, view: Any) -> None:
        """Copy a chunk to host memory."""
        await wait_shielded(self.copiers.submit(np.copyto, into, view))

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        return False

    async def remove(self, key: ChunkKey) -> bool:
        return self.forget(key)

    def statistics(self) -> TierStatistics:
        occupied_bytes = (self.pool.count - self.pool.free) * self.pool.slot_bytes
        counters = replace(self._statistics, resident=len(self._entries), occupied_bytes=occupied_bytes)
        if self._quotas is not None:
            counters.tenants = shown(self._quotas.shares.statistics())
        return counters

    # Leases

    def count_read(self, entry: Resident, counted: bool) -> None:
        statistics = self._statistics
        statistics.reads += 1
        statistics.read_bytes += entry.payload_bytes
        if not counted and entry.hot:
            self._order.access((entry.key,))

    def begin_lease(self, entry: Resident, purpose: Purpose) -> Lease:
        if purpose is PREFETCH and self._quotas is not None and not pins_in(entry.leases):
            self._quotas.pin(tenant_of(entry.key), 1)
        if not entry.leases:
            entry.leases = ONE[purpose]
            self._order.leased(entry)
            self.budget.held[purpose] += 1
        else:
            self._count(entry, ONE[purpose])
        return Lease(self, entry, purpose)

    def end_lease(self, entry: Resident, purpose: Purpose) -> None:
        if purpose is PREFETCH and self._quotas is not None and pins_in(entry.leases) == 1:
            self._quotas.pin(tenant_of(entry.key), -1)
        if entry.leases != ONE[purpose]:
            self._count(entry, -ONE[purpose])
            return
        self.budget.give_back(purpose)
        if entry.hot and self.keep:
            entry.leases = 0
            self._order.released(entry)
            if self._excess:
                self._evict_excess()
        else:
            if entry.hot:
                self._order.discard(entry.key)
                entry.hot = False
                self._changed(entry.key)
            entry.leases = 0
            self._free(entry.slot)
        self.wait_queue.serve()

    def _count(self, entry: Resident, change: int) -> None:
        """Change the number of leases on a chunk with further leases."""
        before = purpose_of(entry.leases)
        entry.leases += change
        after = purpose_of(entry.leases)
        if before is not after:
            assert before is not None and after is not None
            self.budget.give_back(before)
            self.budget.take(after)
        self.wait_queue.serve()  # a slot that counts for another purpose, or a pin less, may free another for a waiter

    def _changed(self, key: ChunkKey) -> None:
        if self._on_change is not None:
            self._on_change(key)

    def _free(self, slot: Slot) -> None:
        if self._quotas is not None:
            self._quotas.own(slot, None)
        self.pool.give_back(slot)

    def _evict(self, most: int, tenant: Tenant | None = None) -> list[Slot]:
        """Evict the coldest leaves, of `tenant` if given. Return at most `most` slots."""
        slots: list[Slot] = []
        while len(slots) < most and (victim := self._order.pop_victim(tenant)) is not None:
            victim.hot = False
            if self._on_change is not None:
                self._on_change(victim.key)
            if self._quotas is not None:
                self._quotas.shares.note_evicted(tenant_of(victim.key))
                self._quotas.own(victim.slot, None)
            slots.append(victim.slot)
        self._statistics.evicted += len(slots)
        return slots

    def _take_slot(self, purpose: Purpose, key: ChunkKey | None) -> Slot | None:
        if not self.budget.allows(purpose, self.obtainable):
            return None
        quotas, owner = self._quotas, b"" if key is None else tenant_of(key)
        if quotas is not None and purpose is PREFETCH and not quotas.may_pin(owner):
            return None
        tenant = self._tenant_at_quota(key)
        slot = self.pool.take() if tenant is None else None
        if slot is None:
            slot = next(iter(self._evict(1, tenant)), None)
            if slot is None:
                return None
        if quotas is not None:
            quotas.own(slot, owner)
            if purpose is PREFETCH:
                quotas.pin(owner, 1)
        self.budget.take(purpose)
        return slot

    # Quotas

    def _tenant_at_quota(self, key: ChunkKey | None) -> Tenant | None:
        """Return the tenant of `key` if it has to evict its own chunk for `key`."""
        if self._quotas is None:
            return None
        tenant = b"" if key is None else tenant_of(key)
        return tenant if self._quotas.at_quota(tenant) else None

    def _blocks_only_itself(self, purpose: Purpose, key: ChunkKey | None) -> bool:
        """Return True if a waiter is blocked only by its own quota, so that others do not wait for it."""
        if self._quotas is None:
            return False
        tenant = b"" if key is None else tenant_of(key)
        return self._quotas.at_quota(tenant) or (purpose is PREFETCH and not self._quotas.may_pin(tenant))


class StagingTier(CpuTier):
    """Chunks on their way between device memory and device tiers: the same code over slots of device memory.

    A chunk is resident while it is leased and can be read meanwhile, so a chunk in a write queue is not a miss.
    """

    name = "device"
    on_device = True

    def __init__(self, device: Device, copiers: Workers) -> None:
        super().__init__(device.pool, copiers, keep=False)
        self.device = device

    def describe(self) -> str:
        pool = self.device.pool
        return f"device ({pool.count * pool.slot_bytes / 2**20:.0f} MiB of {self.device.driver.name} in {pool.count} slots)"

    async def _copy(self, into: np.ndarray, view: Tensor) -> None:
        device, lane = self.device, self.device.storing
        # Without a deadline, since the caller reuses the memory after this.
        await wait_shielded(device.run(lane, device.driver.copy, host_tensor(into), view, lane.stream))
