"""The in-memory index of a capped tier: which chunks lie there and what each really occupies."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from tiercache.core.eviction import EvictionOrder, QuotaOrder
from tiercache.core.keys import ChunkKey, Tenant, tenant_of
from tiercache.core.tenants import TenantStatistics

_STEP = 128
"""Keys that are looked for together: after the first that is nowhere, so many are looked for in vain at most."""


def prefix_in(entries: Container[ChunkKey], keys: Sequence[ChunkKey]) -> int:
    """How many of `keys`, from the first on, are there without a gap."""
    for position, key in enumerate(keys):
        if key not in entries:
            return position
    return len(keys)


def counts_in(places: Sequence[Container[ChunkKey]], keys: Sequence[ChunkKey]) -> list[int]:
    """How many of `keys`, from the first on without a gap, are in each of `places`; each counts where it is found first.

    Key by key is slower by a third: what is looked for step by step is looked for in one loop a place.
    """
    counts = [0] * len(places)
    for start in range(0, len(keys), _STEP):
        step = left = keys[start : start + _STEP]
        found = []
        for place in places:
            lacking = [key for key in left if key not in place]
            found.append(len(left) - len(lacking))
            if not (left := lacking):
                break
        if left:
            found = counts_in(places, step[: step.index(left[0])])
        for number, count in enumerate(found):
            counts[number] += count
        if left:
            break
    return counts


class CappedIndex:
    """Keys, occupied bytes and the order of eviction.

    Methods return what the caller has to delete; they never wait and never touch the tier. `used_bytes` counts what
    is resident. About 150 bytes an entry with LRU (one ordered map; equal sizes share one integer).

    With a QuotaOrder tenants have a quota. What is being written for one counts as his from `expect` on.
    """

    def __init__(self, order: EvictionOrder[int] | QuotaOrder) -> None:
        self.order = order
        self.tenants = order if isinstance(order, QuotaOrder) else None
        self.used_bytes = 0
        self._sizes: dict[int, int] = {}
        self.on_change: Callable[[ChunkKey], None] | None = None
        """Called when a key has come or gone."""

    def __len__(self) -> int:
        return len(self.order.entries)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self.order.entries

    @property
    def keys(self) -> Container[ChunkKey]:
        return self.order.entries

    def prefix(self, keys: Sequence[ChunkKey]) -> int:
        """How many of `keys`, from the first on, are resident without a gap."""
        return prefix_in(self.order.entries, keys)

    def add(
        self, key: ChunkKey, occupied_bytes: int, *, cold: bool = False, parent: ChunkKey | None = None
    ) -> None:
        """Make `key` resident, or correct its size when it is. `parent` as for `EvictionOrder.insert`."""
        occupied_bytes = self._sizes.setdefault(occupied_bytes, occupied_bytes)
        entries = self.order.entries
        before = entries.get(key)
        if before is not None:
            entries[key] = occupied_bytes
            self.used_bytes += occupied_bytes - before
            if occupied_bytes != before and self.tenants is not None:
                self.tenants.shares.hold(tenant_of(key), occupied_bytes - before)
            if not cold:
                self.order.touch(key)
            return
        if cold:
            self.order.insert_cold(key, occupied_bytes)
        else:
            self.order.insert(key, occupied_bytes, parent)
        self.used_bytes += occupied_bytes
        if self.on_change is not None:
            self.on_change(key)
        if len(self._sizes) > 4096:
            self._sizes.clear()

    def touch(self, key: ChunkKey) -> None:
        if key in self.order.entries:
            self.order.touch(key)

    def touch_prefix(self, keys: Sequence[ChunkKey]) -> None:
        """Note a use of those of `keys` that are resident; they are a prefix, of which the head is to stay longest."""
        self.order.touch_prefix(keys)

    def remove(self, key: ChunkKey) -> int | None:
        """Forget `key`; returns the bytes that it occupied, None when it was not resident."""
        occupied = self.order.discard(key)
        if occupied is not None:
            self.used_bytes -= occupied
            if self.on_change is not None:
                self.on_change(key)
        return occupied

    def age(self, keys: Sequence[ChunkKey]) -> None:
        """Move resident `keys` behind all others, the last of them to go first."""
        for key in keys:
            self.order.age(key)

    def all_keys(self) -> list[ChunkKey]:
        """Those that are resident, in no particular order: an OrderedDict takes ten times as long to say them in its own."""
        return list(dict.keys(self.order.entries))

    def evict(self, needed_bytes: int, most: int | None = None) -> list[tuple[ChunkKey, int]]:
        """Choose victims of together at least `needed_bytes` (or all there are, or `most` in number) and forget them. First
        those of tenants who have more than their quota.

        Returns their keys and the bytes that each occupies; the caller deletes them.
        """
        victims: list[tuple[ChunkKey, int]] = []
        while needed_bytes > 0 and self.order.entries and len(victims) != most:
            key, occupied = self.order.pop_victim()
            self.used_bytes -= occupied
            needed_bytes -= occupied
            victims.append((key, occupied))
            if self.on_change is not None:
                self.on_change(key)
        return victims

    # Tenants

    @property
    def excess_bytes(self) -> int:
        """What tenants have beyond their quotas: these were lowered, or others have written."""
        return self.tenants.shares.excess_bytes if self.tenants is not None else 0

    def expect(self, key: ChunkKey, needed_bytes: int) -> None:
        """So many bytes are being written for the tenant of `key`, or so many less."""
        if self.tenants is not None:
            self.tenants.shares.expect(tenant_of(key), needed_bytes)

    def lacking_bytes(self, key: ChunkKey, needed_bytes: int = 0) -> int:
        """What the tenant of `key` has to give up to be within his quota when `needed_bytes` more have come."""
        return self.tenants.shares.lacking_bytes(tenant_of(key), needed_bytes) if self.tenants is not None else 0

    def fits(self, key: ChunkKey, needed_bytes: int) -> bool:
        """Whether the tenant of `key` can have so many bytes more by giving up what he has."""
        if self.tenants is None:
            return True
        tenant = tenant_of(key)
        return self.tenants.shares.lacking_bytes(tenant, needed_bytes) <= self.tenants.shares.held_bytes(tenant)

    def evict_own(self, key: ChunkKey, needed_bytes: int) -> list[tuple[ChunkKey, int]]:
        """As `evict`, of what the tenant of `key` has."""
        victims: list[tuple[ChunkKey, int]] = []
        while self.tenants is not None and needed_bytes > 0:
            found = self.tenants.pop_victim_of(tenant_of(key))
            if found is None:
                break
            victim, occupied = found
            self.used_bytes -= occupied
            needed_bytes -= occupied
            victims.append((victim, occupied))
            if self.on_change is not None:
                self.on_change(victim)
        return victims

    def tenant_statistics(self) -> dict[Tenant, TenantStatistics]:
        """Of every tenant; empty where there are no quotas."""
        return self.tenants.shares.statistics() if self.tenants is not None else {}
