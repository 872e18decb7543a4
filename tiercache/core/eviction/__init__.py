"""Eviction orders: which resident goes first.

An order is also the map from key to value, so that a million residents cost one container. Everything is O(1) an
operation (LFU, S3-FIFO: O(1) amortised). The caller decides whether a victim may really go; one that may not (it is
leased) is handed back by `readmit` when it may, so it is met at most once per lease however many are held.
"""

from __future__ import annotations

from tiercache.core.eviction.base import EvictionOrder, V
from tiercache.core.eviction.cost import CostAware
from tiercache.core.eviction.frequency import Lfu
from tiercache.core.eviction.recency import Fifo, Lru, Mru
from tiercache.core.eviction.segmented import S3Fifo, Slru
from tiercache.core.eviction.tenants import QuotaOrder, TenantOrder

ORDERS: dict[str, type[EvictionOrder]] = {  # type: ignore[type-arg]
    "LRU": Lru,
    "LFU": Lfu,
    "FIFO": Fifo,
    "MRU": Mru,
    "SLRU": Slru,
    "S3FIFO": S3Fifo,
    "COST": CostAware,
}


Order = EvictionOrder[V] | TenantOrder[V]


def make_order(policy: str) -> EvictionOrder[V]:
    """The order called `policy` in the configuration (`cache_policy`)."""
    return ORDERS[policy.upper()]()


def make_byte_order(policy: str, tenant_bytes: int) -> EvictionOrder[int] | QuotaOrder:
    """As `make_order`, of bytes that chunks occupy. A tenant may have `tenant_bytes` of them; 0: as many as he likes."""
    return QuotaOrder(ORDERS[policy.upper()], tenant_bytes) if tenant_bytes else make_order(policy)


__all__ = [
    "ORDERS",
    "CostAware",
    "EvictionOrder",
    "Fifo",
    "Lfu",
    "Lru",
    "Mru",
    "Order",
    "QuotaOrder",
    "S3Fifo",
    "Slru",
    "TenantOrder",
    "make_byte_order",
    "make_order",
]
