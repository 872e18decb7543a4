"""What tenants hold of a tier, and how much each may hold. Pure.

A tenant is known by the tag in his keys (`core/keys.py`); all that has no tag is one tenant as well. A quota is the most
bytes that any tenant may hold, the same for all: who is at his makes room for himself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import nlargest

from tiercache.core.keys import Tenant

DEFAULT = "default"
"""What the tenant without a salt is called."""
OTHERS = "others"
MOST_SHOWN = 64
"""Tenants that statistics name, those that hold most; the rest is one, `OTHERS`."""


@dataclass(slots=True)
class Holding:
    """Of one tenant."""

    held_bytes: int = 0
    coming_bytes: int = 0
    """What is being written for him, and will be held."""
    chunks: int = 0
    evicted: int = 0


@dataclass(slots=True)
class TenantStatistics:
    """What a tenant holds of a tier, and how many chunks of his were evicted since he has held any."""

    held_bytes: int = 0
    chunks: int = 0
    evicted: int = 0

    def include(self, other: TenantStatistics) -> None:
        self.held_bytes += other.held_bytes
        self.chunks += other.chunks
        self.evicted += other.evicted


class Shares:
    """The accounts of a tier. A tenant that holds nothing, and for whom nothing comes, is forgotten."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes`: the quota."""
        self.most_bytes = most_bytes
        self.holdings: dict[Tenant, Holding] = {}
        self._over: dict[Tenant, None] = {}

    def hold(self, tenant: Tenant, more_bytes: int, more_chunks: int = 0) -> None:
        """He holds so much more, or less."""
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
        """So much more is coming for him, or less."""
        holding = self.holdings.get(tenant)
        if holding is None:
            holding = self.holdings[tenant] = Holding()
        holding.coming_bytes += more_bytes
        self._forget_if_empty(tenant, holding)

    def lacking_bytes(self, tenant: Tenant, more_bytes: int = 0) -> int:
        """What he has to give up for `more_bytes` besides what is coming; 0 where it fits into his quota."""
        holding = self.holdings.get(tenant)
        if holding is None:
            return max(0, more_bytes - self.most_bytes)
        return max(0, holding.held_bytes + holding.coming_bytes + more_bytes - self.most_bytes)

    def held_bytes(self, tenant: Tenant) -> int:
        holding = self.holdings.get(tenant)
        return 0 if holding is None else holding.held_bytes

    def note_evicted(self, tenant: Tenant) -> None:
        """A chunk of his goes; called before `hold` says so."""
        self.holdings[tenant].evicted += 1

    @property
    def over(self) -> Tenant | None:
        """One who holds more than his quota: it was lowered, or others have written for him."""
        return next(iter(self._over), None)

    @property
    def excess_bytes(self) -> int:
        """What all of those hold too much."""
        return sum(self.holdings[tenant].held_bytes - self.most_bytes for tenant in self._over)

    def statistics(self) -> dict[Tenant, TenantStatistics]:
        """Of every tenant; `shown` is what people get."""
        return {
            tenant: TenantStatistics(holding.held_bytes, holding.chunks, holding.evicted)
            for tenant, holding in self.holdings.items()
        }

    def _forget_if_empty(self, tenant: Tenant, holding: Holding) -> None:
        if not holding.held_bytes and not holding.coming_bytes and not holding.chunks:
            del self.holdings[tenant]


def added_up(parts: Iterable[Mapping[Tenant, TenantStatistics]]) -> dict[Tenant, TenantStatistics]:
    """Of several directories."""
    found: dict[Tenant, TenantStatistics] = {}
    for part in parts:
        for tenant, statistics in part.items():
            found.setdefault(tenant, TenantStatistics()).include(statistics)
    return found


def shown(found: dict[Tenant, TenantStatistics]) -> dict[str, TenantStatistics]:
    """By their tags in hex: at most `MOST_SHOWN` tenants, those that hold most first, and the rest as `OTHERS`."""
    named = nlargest(MOST_SHOWN, found, key=lambda tenant: (found[tenant].held_bytes, tenant))
    statistics = {tenant.hex() or DEFAULT: found[tenant] for tenant in named}
    if rest := found.keys() - set(named):
        others = statistics[OTHERS] = TenantStatistics()
        for tenant in rest:
            others.include(found[tenant])
    return statistics
