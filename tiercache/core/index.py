"""The in-memory index of a capped tier: which chunks lie there and what each really occupies."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from tiercache.core.keys import ChunkKey, Tenant, tenant_of
from tiercache.core.lru import LruMap
from tiercache.core.tenants import Shares, TenantStatistics

_STEP = 128
"""Keys that are looked up together: at most so many are looked up in vain behind the first that is nowhere."""


def prefix_in(entries: Container[ChunkKey], keys: Sequence[ChunkKey]) -> int:
    """Return the length of the prefix of `keys` whose chunks are all in `entries`."""
    if isinstance(entries, LruMap):
        parts = entries.parts
        for position, key in enumerate(keys):
            if key not in parts[key[0]]:
                return position
    else:
        for position, key in enumerate(keys):
            if key not in entries:
                return position
    return len(keys)


def counts_in(places: Sequence[Container[ChunkKey]], keys: Sequence[ChunkKey]) -> list[int]:
    """Return how many of `keys`, from the first on without a gap, are in each of `places`; each counts where it is found
    first. Each place is searched for a step of keys in one loop, which is faster than key by key."""
    counts = [0] * len(places)
    for start in range(0, len(keys), _STEP):
        step = left = keys[start : start + _STEP]
        found = []
        for place in places:
            if isinstance(place, LruMap):
                parts = place.parts
                lacking = [key for key in left if key not in parts[key[0]]]
            else:
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
    that has more than it are evicted before those of others, and bytes being written for a tenant count from `expect` on.
    """

    def __init__(self, quota_bytes: int = 0) -> None:
        """`quota_bytes` limits each tenant; 0 for none."""
        self.keys = LruMap()
        """The resident keys and the bytes that each occupies."""
        self._parts = self.keys.parts
        self.used_bytes = 0
        """The bytes that all resident keys occupy."""
        self._shares = Shares(quota_bytes) if quota_bytes else None
        self._of_tenant: dict[Tenant, LruMap] = {}
        """The keys of each tenant in the same order; only with a quota."""
        self.on_change: Callable[[ChunkKey], None] | None = None
        """Called when a key has come or gone."""

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: Any) -> bool:
        return key in self._parts[key[0]]

    def prefix(self, keys: Sequence[ChunkKey]) -> int:
        """Return the length of the prefix of `keys` whose chunks are all resident."""
        return prefix_in(self.keys, keys)

    def add(self, key: ChunkKey, occupied_bytes: int, *, cold: bool = False) -> None:
        """Make `key` resident, or correct its size if it is. A `cold` key, of unknown age, is evicted first."""
        before = self.keys.put(key, occupied_bytes, cold=cold)
        self.used_bytes += occupied_bytes - (before or 0)
        if self._shares is not None:
            tenant = tenant_of(key)
            self._shares.hold(tenant, occupied_bytes - (before or 0), before is None)
            if (own := self._of_tenant.get(tenant)) is None:
                own = self._of_tenant[tenant] = LruMap()
            own.put(key, occupied_bytes, cold=cold)
        if before is None and self.on_change is not None:
            self.on_change(key)

    def touch(self, key: ChunkKey) -> None:
        """Record an access."""
        if self.keys.touch(key) and self._shares is not None:
            self._of_tenant[tenant_of(key)].touch(key)

    def touch_prefix(self, keys: Sequence[ChunkKey]) -> None:
        """Record an access to the residents among `keys`, a prefix whose head stays longest."""
        for key in reversed(keys):
            self.touch(key)

    def remove(self, key: ChunkKey) -> int | None:
        """Forget `key`; return the bytes that it occupied, None when it was not resident."""
        occupied = self.keys.pop(key)
        if occupied is not None:
            self._removed(key, occupied)
        return occupied

    def age(self, keys: Sequence[ChunkKey]) -> None:
        """Make resident `keys` the coldest of all; the last of them is evicted first."""
        for key in keys:
            if self.keys.age(key) and self._shares is not None:
                self._of_tenant[tenant_of(key)].age(key)

    def evict(self, needed_bytes: int, most: int | None = None) -> list[tuple[ChunkKey, int]]:
        """Choose victims that occupy at least `needed_bytes` together, at most `most`, and forget them. Chunks of tenants
        above their quota go first. Return their keys and the bytes that each occupies; the caller deletes them."""
        victims: list[tuple[ChunkKey, int]] = []
        while needed_bytes > 0 and len(victims) != most:
            tenant = None if self._shares is None else self._shares.over
            key = (self.keys if tenant is None else self._of_tenant[tenant]).coldest()
            if key is None:
                break
            victims.append(self._evict(key))
            needed_bytes -= victims[-1][1]
        return victims

    def _evict(self, key: ChunkKey) -> tuple[ChunkKey, int]:
        occupied = self.keys.pop(key)
        assert occupied is not None
        if self._shares is not None:
            self._shares.note_evicted(tenant_of(key))
        self._removed(key, occupied)
        return key, occupied

    def _removed(self, key: ChunkKey, occupied_bytes: int) -> None:
        self.used_bytes -= occupied_bytes
        if self._shares is not None:
            tenant = tenant_of(key)
            own = self._of_tenant[tenant]
            own.pop(key)
            if not own:
                del self._of_tenant[tenant]
            self._shares.hold(tenant, -occupied_bytes, -1)
        if self.on_change is not None:
            self.on_change(key)

    # Tenants

    @property
    def excess_bytes(self) -> int:
        """Bytes that tenants have above their quotas, after a quota was lowered or another process has written."""
        return self._shares.excess_bytes if self._shares is not None else 0

    def expect(self, key: ChunkKey, needed_bytes: int) -> None:
        """Count bytes that are being written for the tenant of `key`; a negative number ends that."""
        if self._shares is not None:
            self._shares.expect(tenant_of(key), needed_bytes)

    def lacking_bytes(self, key: ChunkKey, needed_bytes: int = 0) -> int:
        """Return the bytes that the tenant of `key` has to give up to be within its quota with `needed_bytes` more."""
        return self._shares.lacking_bytes(tenant_of(key), needed_bytes) if self._shares is not None else 0

    def fits(self, key: ChunkKey, needed_bytes: int) -> bool:
        """Return True if the tenant of `key` can have `needed_bytes` more by giving up what it has."""
        if self._shares is None:
            return True
        tenant = tenant_of(key)
        return self._shares.lacking_bytes(tenant, needed_bytes) <= self._shares.held_bytes(tenant)

    def evict_own(self, key: ChunkKey, needed_bytes: int) -> list[tuple[ChunkKey, int]]:
        """Evict as `evict` does, from the chunks of the tenant of `key`."""
        victims: list[tuple[ChunkKey, int]] = []
        while self._shares is not None and needed_bytes > 0 and (own := self._of_tenant.get(tenant_of(key))):
            victim = own.coldest()
            assert victim is not None
            victims.append(self._evict(victim))
            needed_bytes -= victims[-1][1]
        return victims

    def tenant_statistics(self) -> dict[Tenant, TenantStatistics]:
        """Return what each tenant holds; empty without quotas."""
        return self._shares.statistics() if self._shares is not None else {}
