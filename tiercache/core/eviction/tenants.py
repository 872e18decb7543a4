"""An eviction order that can also say what of one tenant goes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic

from tiercache.core.eviction.base import EvictionOrder, V
from tiercache.core.keys import ChunkKey, Tenant, tenant_of
from tiercache.core.tenants import Shares


class TenantOrder(Generic[V]):
    """The order of all residents, and one of the same policy for each tenant, which is told of his chunks alone.

    So a tenant at his quota loses what he would lose in a cache of that size that he had to himself, at the cost of one
    eviction; and who makes room for anything else evicts as if there were no tenants. The price is a second order.
    Chunks of different tenants do not follow one another, so the orders agree on what follows what. Methods are those of
    `EvictionOrder`.
    """

    def __init__(self, policy: type[EvictionOrder[V]], most_bytes: int) -> None:
        """`most_bytes`: of a tenant. The accounts, `shares`, are kept by whoever evicts."""
        self.shares = Shares(most_bytes)
        self.whole = policy()
        self.entries = self.whole.entries
        self.victims_parent: ChunkKey | None = None
        self._policy = policy
        self._own: dict[Tenant, EvictionOrder[V]] = {}

    def insert(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        self.whole.insert(key, value, parent)
        self._of(key).insert(key, value, parent)

    def insert_all(self, residents: Mapping[ChunkKey, V], parents: Mapping[ChunkKey, ChunkKey]) -> None:
        for key, value in residents.items():
            self.insert(key, value, parents.get(key))

    def insert_cold(self, key: ChunkKey, value: V) -> None:
        self.whole.insert_cold(key, value)
        self._of(key).insert_cold(key, value)

    def age(self, key: ChunkKey) -> None:
        self.whole.age(key)
        own = self._own.get(tenant_of(key))
        if own is not None:
            own.age(key)

    def touch(self, key: ChunkKey) -> None:
        self.whole.touch(key)
        self._own[tenant_of(key)].touch(key)

    def touch_prefix(self, keys: Sequence[ChunkKey]) -> None:
        self.whole.touch_prefix(keys)
        for order in self._orders_of(keys):
            order.touch_prefix(keys)

    def follow(self, keys: Sequence[ChunkKey]) -> None:
        self.whole.follow(keys)
        for order in self._orders_of(keys):
            order.follow(keys)

    def renew(self, key: ChunkKey) -> None:
        self.whole.renew(key)
        self._own[tenant_of(key)].renew(key)

    def coldest(self) -> ChunkKey | None:
        return self.whole.coldest()

    def coldest_of(self, tenant: Tenant) -> ChunkKey | None:
        """As `coldest`, of what he has."""
        own = self._own.get(tenant)
        return None if own is None else own.coldest()

    def discard(self, key: ChunkKey) -> V | None:
        own = self._own.get(tenant_of(key))
        if own is not None:
            own.discard(key)
            self._forget_if_empty(tenant_of(key), own)
        return self.whole.discard(key)

    def pop_victim(self) -> tuple[ChunkKey, V]:
        key, value = self.whole.pop_victim()
        self.victims_parent = self.whole.victims_parent
        tenant = tenant_of(key)
        own = self._own[tenant]
        own.evict(key)
        self._forget_if_empty(tenant, own)
        return key, value

    def pop_victim_of(self, tenant: Tenant) -> tuple[ChunkKey, V] | None:
        """As `pop_victim`, of what he has; None where that is nothing."""
        own = self._own.get(tenant)
        if own is None:
            return None
        key, _ = own.pop_victim()
        self.victims_parent = own.victims_parent
        self._forget_if_empty(tenant, own)
        return key, self.whole.evict(key)

    def readmit(self, key: ChunkKey, value: V, parent: ChunkKey | None = None) -> None:
        self.whole.readmit(key, value, parent)
        self._of(key).readmit(key, value, parent)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, key: object) -> bool:
        return key in self.entries

    def _of(self, key: ChunkKey) -> EvictionOrder[V]:
        tenant = tenant_of(key)
        own = self._own.get(tenant)
        if own is None:
            own = self._own[tenant] = self._policy()
        return own

    def _orders_of(self, keys: Sequence[ChunkKey]) -> list[EvictionOrder[V]]:
        """Nearly always one. To an order, the chunks of others are not there."""
        return [self._own[tenant] for tenant in dict.fromkeys(map(tenant_of, keys)) if tenant in self._own]

    def _forget_if_empty(self, tenant: Tenant, own: EvictionOrder[V]) -> None:
        """So that tenants who come and go leave nothing behind."""
        if not own.entries:
            del self._own[tenant]


class QuotaOrder(TenantOrder[int]):
    """Of a tier on files, where the value of a chunk is the bytes that it occupies: keeps the accounts itself. Chunks of a
    tenant who has more than his quota go before those of others."""

    def insert(self, key: ChunkKey, value: int, parent: ChunkKey | None = None) -> None:
        super().insert(key, value, parent)
        self.shares.hold(tenant_of(key), value, 1)

    def insert_cold(self, key: ChunkKey, value: int) -> None:
        super().insert_cold(key, value)
        self.shares.hold(tenant_of(key), value, 1)

    def discard(self, key: ChunkKey) -> int | None:
        value = super().discard(key)
        if value is not None:
            self.shares.hold(tenant_of(key), -value, -1)
        return value

    def pop_victim(self) -> tuple[ChunkKey, int]:
        tenant = self.shares.over
        found = super().pop_victim() if tenant is None else super().pop_victim_of(tenant)
        assert found is not None, "who holds bytes has chunks"
        self._has_gone(*found)
        return found

    def pop_victim_of(self, tenant: Tenant) -> tuple[ChunkKey, int] | None:
        found = super().pop_victim_of(tenant)
        if found is not None:
            self._has_gone(*found)
        return found

    def _has_gone(self, key: ChunkKey, occupied_bytes: int) -> None:
        self.shares.note_evicted(tenant_of(key))
        self.shares.hold(tenant_of(key), -occupied_bytes, -1)
