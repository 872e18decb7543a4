"""The bytes that tenants hold in a tier, and their quota.

A tenant is known by the tag in its keys (`core/keys.py`); all keys without a tag are one tenant as well. The quota is the
most bytes that a tenant may hold, the same for all. A tenant at its quota makes room from its own chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import nlargest

from tiercache.core.keys import Tenant

DEFAULT = "default"
"""The name of the tenant without a salt in statistics."""
OTHERS = "others"
MOST_SHOWN = 64
"""Number of tenants named in statistics, those with most bytes; the rest is summed up as `OTHERS`."""


@dataclass(slots=True)
class Holding:
    """The bytes and chunks of one tenant."""

    held_bytes: int = 0
    coming_bytes: int = 0
    """Bytes being written for the tenant."""
    chunks: int = 0
    evicted: int = 0


@dataclass(slots=True)
class TenantStatistics:
    """The bytes and chunks of a tenant in a tier, and its evictions since it has held any."""

    held_bytes: int = 0
    chunks: int = 0
    evicted: int = 0

    def include(self, other: TenantStatistics) -> None:
        self.held_bytes += other.held_bytes
        self.chunks += other.chunks
        self.evicted += other.evicted


class Shares:
    """The holdings of all tenants in a tier. A tenant without bytes, held or being written, is dropped."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes` is the quota of each tenant."""
        self.most_bytes = most_bytes
        self.holdings: dict[Tenant, Holding] = {}
        self._over: dict[Tenant, None] = {}

    def limit(self, most_bytes: int) -> None:
        """Set the quota of each tenant."""
        self.most_bytes = most_bytes
        self._over = {tenant: None for tenant, holding in self.holdings.items() if holding.held_bytes > most_bytes}

    def hold(self, tenant: Tenant, more_bytes: int, more_chunks: int = 0) -> None:
        """Change the tenant's holding; negative numbers subtract."""
        holding = self.holdings.get(tenant)
        if holding is None:
            holding = self.holdings[tenant] = Holding()
        holding.held_bytes += more_bytes
        holding.chunks += more_chunks
        if holding.held_bytes > self.most_bytes:
            self._over[tenant] = None
        elif tenant in self._over:
            del self._over[tenant]
        self._forget_if_empty(tenant, holding)

    def expect(self, tenant: Tenant, more_bytes: int) -> None:
        """Change the bytes being written for the tenant; a negative number subtracts."""
        holding = self.holdings.get(tenant)
        if holding is None:
            holding = self.holdings[tenant] = Holding()
        holding.coming_bytes += more_bytes
        self._forget_if_empty(tenant, holding)

    def lacking_bytes(self, tenant: Tenant, more_bytes: int = 0) -> int:
        """Return the bytes that the tenant has to evict for `more_bytes` besides those being written; 0 if they fit."""
        holding = self.holdings.get(tenant)
        if holding is None:
            return max(0, more_bytes - self.most_bytes)
        return max(0, holding.held_bytes + holding.coming_bytes + more_bytes - self.most_bytes)

    def held_bytes(self, tenant: Tenant) -> int:
        holding = self.holdings.get(tenant)
        return 0 if holding is None else holding.held_bytes

    def note_evicted(self, tenant: Tenant) -> None:
        """Count an eviction; called before `hold` subtracts the chunk."""
        self.holdings[tenant].evicted += 1

    @property
    def over(self) -> Tenant | None:
        """A tenant above its quota, after the quota was lowered or another process wrote for it; None if there is none."""
        return next(iter(self._over), None)

    @property
    def excess_bytes(self) -> int:
        """Bytes above the quota, of all tenants together."""
        return sum(self.holdings[tenant].held_bytes - self.most_bytes for tenant in self._over)

    def statistics(self) -> dict[Tenant, TenantStatistics]:
        """Return the statistics of every tenant. `shown` makes them readable. Other threads may call this."""
        return {
            tenant: TenantStatistics(holding.held_bytes, holding.chunks, holding.evicted)
            for tenant, holding in self.holdings.copy().items()
        }

    def _forget_if_empty(self, tenant: Tenant, holding: Holding) -> None:
        if not holding.held_bytes and not holding.coming_bytes and not holding.chunks:
            del self.holdings[tenant]


def added_up(parts: Iterable[Mapping[Tenant, TenantStatistics]]) -> dict[Tenant, TenantStatistics]:
    """Sum up the statistics of several directories."""
    found: dict[Tenant, TenantStatistics] = {}
    for part in parts:
        for tenant, statistics in part.items():
            found.setdefault(tenant, TenantStatistics()).include(statistics)
    return found


def shown(found: dict[Tenant, TenantStatistics]) -> dict[str, TenantStatistics]:
    """Return statistics by tag in hex: at most `MOST_SHOWN` tenants, largest first, the rest as `OTHERS`."""
    named = nlargest(MOST_SHOWN, found, key=lambda tenant: (found[tenant].held_bytes, tenant))
    statistics = {tenant.hex() or DEFAULT: found[tenant] for tenant in named}
    if rest := found.keys() - set(named):
        others = statistics[OTHERS] = TenantStatistics()
        for tenant in rest:
            others.include(found[tenant])
    return statistics
