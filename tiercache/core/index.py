"""The in-memory index of a capped tier: which chunks lie there and what each really occupies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence

from tiercache.core.keys import ChunkKey, Tenant, tenant_of
from tiercache.core.tenants import Shares, TenantStatistics

_STEP = 128
"""Keys that are looked for together: after the first that is nowhere, so many are looked for in vain at most."""


def prefix_in(entries: Container[ChunkKey], keys: Sequence[ChunkKey]) -> int:
    """Return the length of the prefix of `keys` whose chunks are all in `entries`."""
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
    """Keys and occupied bytes of the chunks in a directory, least recently used first.

    Methods return what the caller has to delete; they never wait and never touch the tier. With a quota, chunks of a tenant
    that has more than it go before those of others, and what is being written for a tenant counts from `expect` on.
    """

    def __init__(self, quota_bytes: int = 0) -> None:
        """`quota_bytes` limits each tenant; 0 for none."""
        self.entries: OrderedDict[ChunkKey, int] = OrderedDict()
        """Occupied bytes by key, coldest first."""
        self.used_bytes = 0
        """The sum of them."""
        self._shares = Shares(quota_bytes) if quota_bytes else None
        self._of_tenant: dict[Tenant, OrderedDict[ChunkKey, None]] = {}
        """The keys of each tenant in the same order; only with a quota."""
        self._sizes: dict[int, int] = {}
        """One integer object for each size, which most chunks share."""
        self.on_change: Callable[[ChunkKey], None] | None = None
        """Called when a key has come or gone."""

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self.entries

    @property
    def keys(self) -> Container[ChunkKey]:
        return self.entries

    def prefix(self, keys: Sequence[ChunkKey]) -> int:
        """Return the length of the prefix of `keys` whose chunks are all resident."""
        return prefix_in(self.entries, keys)

    def add(self, key: ChunkKey, occupied_bytes: int, *, cold: bool = False) -> None:
        """Make `key` resident, or correct its size when it is. A `cold` one, of unknown age, is the first to go."""
        occupied_bytes = self._sizes.setdefault(occupied_bytes, occupied_bytes)
        if len(self._sizes) > 4096:
            self._sizes.clear()
        before = self.entries.get(key)
        self.entries[key] = occupied_bytes
        self.used_bytes += occupied_bytes - (before or 0)
        if self._shares is not None:
            tenant = tenant_of(key)
            self._shares.hold(tenant, occupied_bytes - (before or 0), before is None)
            self._of_tenant.setdefault(tenant, OrderedDict())[key] = None
        if before is None and cold:
            self._move(key, last=False)
        elif before is not None and not cold:
            self._move(key, last=True)
        if before is None and self.on_change is not None:
            self.on_change(key)

    def touch(self, key: ChunkKey) -> None:
        """Note an access."""
        if key in self.entries:
            self._move(key, last=True)

    def touch_prefix(self, keys: Sequence[ChunkKey]) -> None:
        """Note an access to the residents among `keys`, a prefix whose head is to stay longest."""
        for key in reversed(keys):
            if key in self.entries:
                self._move(key, last=True)

    def remove(self, key: ChunkKey) -> int | None:
        """Forget `key`; return the bytes that it occupied, None when it was not resident."""
        occupied = self.entries.pop(key, None)
        if occupied is not None:
            self._removed(key, occupied)
        return occupied

    def age(self, keys: Sequence[ChunkKey]) -> None:
        """Move resident `keys` behind all others, the last of them to go first."""
        for key in keys:
            if key in self.entries:
                self._move(key, last=False)

    def all_keys(self) -> list[ChunkKey]:
        """The resident keys, in no particular order: an OrderedDict takes ten times as long to list them in its own."""
        return list(dict.keys(self.entries))

    def evict(self, needed_bytes: int, most: int | None = None) -> list[tuple[ChunkKey, int]]:
        """Choose victims of together at least `needed_bytes` (or all there are, or `most` in number) and forget them, first
        those of tenants that have more than their quota.

        Return their keys and the bytes that each occupies; the caller deletes them.
        """
        victims: list[tuple[ChunkKey, int]] = []
        while needed_bytes > 0 and self.entries and len(victims) != most:
            tenant = None if self._shares is None else self._shares.over
            order = self.entries if tenant is None else self._of_tenant[tenant]
            victims.append(self._evict(next(iter(order))))
            needed_bytes -= victims[-1][1]
        return victims

    def _evict(self, key: ChunkKey) -> tuple[ChunkKey, int]:
        occupied = self.entries.pop(key)
        if self._shares is not None:
            self._shares.note_evicted(tenant_of(key))
        self._removed(key, occupied)
        return key, occupied

    def _move(self, key: ChunkKey, *, last: bool) -> None:
        self.entries.move_to_end(key, last=last)
        if self._shares is not None:
            self._of_tenant[tenant_of(key)].move_to_end(key, last=last)

    def _removed(self, key: ChunkKey, occupied_bytes: int) -> None:
        self.used_bytes -= occupied_bytes
        if self._shares is not None:
            tenant = tenant_of(key)
            keys = self._of_tenant[tenant]
            del keys[key]
            if not keys:
                del self._of_tenant[tenant]
            self._shares.hold(tenant, -occupied_bytes, -1)
        if self.on_change is not None:
            self.on_change(key)

    # Tenants

    @property
    def excess_bytes(self) -> int:
        """Bytes above their quotas that tenants have, after a quota was lowered or another process has written."""
        return self._shares.excess_bytes if self._shares is not None else 0

    def expect(self, key: ChunkKey, needed_bytes: int) -> None:
        """Count bytes that are being written for the tenant of `key`; a negative number ends that."""
        if self._shares is not None:
            self._shares.expect(tenant_of(key), needed_bytes)

    def lacking_bytes(self, key: ChunkKey, needed_bytes: int = 0) -> int:
        """Return the bytes that the tenant of `key` has to give up to be within its quota with `needed_bytes` more."""
        return self._shares.lacking_bytes(tenant_of(key), needed_bytes) if self._shares is not None else 0

    def fits(self, key: ChunkKey, needed_bytes: int) -> bool:
        """Return True if the tenant of `key` can have so many bytes more by giving up what it has."""
        if self._shares is None:
            return True
        tenant = tenant_of(key)
        return self._shares.lacking_bytes(tenant, needed_bytes) <= self._shares.held_bytes(tenant)

    def evict_own(self, key: ChunkKey, needed_bytes: int) -> list[tuple[ChunkKey, int]]:
        """As `evict`, of what the tenant of `key` has."""
        victims: list[tuple[ChunkKey, int]] = []
        while self._shares is not None and needed_bytes > 0 and (order := self._of_tenant.get(tenant_of(key))):
            victims.append(self._evict(next(iter(order))))
            needed_bytes -= victims[-1][1]
        return victims

    def tenant_statistics(self) -> dict[Tenant, TenantStatistics]:
        """Return what each tenant holds; empty without quotas."""
        return self._shares.statistics() if self._shares is not None else {}
