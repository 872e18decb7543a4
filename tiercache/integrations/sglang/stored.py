"""The pools that are stored, and how their pages are called."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercache.core.keys import KEY_BYTES, ChunkKey, Tenant
from tiercache.integrations.sglang.pools import HostPool

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig


@dataclass(frozen=True)
class StoredPool:
    """A pool, and how its pages are called."""

    pool: HostPool
    namespace: bytes
    tenant: Tenant
    writes: bool
    """False where another rank writes the same pages."""

    def keys(self, hashes: Sequence[str]) -> list[ChunkKey]:
        """SGLang's hashes are chained SHA-256 over tokens, LoRA and cache salt, in hex."""
        namespace, tenant = self.namespace, self.tenant
        return [
            hashlib.blake2b(value.encode(), digest_size=KEY_BYTES, key=namespace).digest() + tenant for value in hashes
        ]


def stored_pool(
    pool: HostPool, storage: HiCacheStorageConfig, layout: bytes, tenant: Tenant, generation: bytes
) -> StoredPool:
    """Below the layout's namespace. `generation` is empty unless SGLang has cleared. Pools that tensor-parallel ranks have
    their own parts of are told apart by rank, all others by the layout."""
    apart = pool.by_heads and storage.is_mla_model
    meaning = pool.describe() + (f" tp {storage.tp_rank} of {storage.tp_size}" if apart else "")
    namespace = hashlib.blake2b(generation + meaning.encode(), digest_size=KEY_BYTES, key=layout).digest()
    writes = (storage.is_storage_writer or apart) and not (generation and shares_pages(storage))
    return StoredPool(pool, namespace, tenant, writes)


def shares_pages(storage: HiCacheStorageConfig) -> bool:
    """Whether other ranks read what one writes, which they cannot under names that are a process's own."""
    return bool(storage.is_mla_model and storage.tp_size > 1)


def pages_among(keys: Sequence[ChunkKey], chunks: int) -> int:
    """How many of `keys` from the first on there are when of the different ones among them the first `chunks` are there."""
    seen: set[ChunkKey] = set()
    for position, key in enumerate(keys):
        seen.add(key)
        if len(seen) > chunks:
            return position
    return len(keys)
