"""Look up and remove pages for SGLang, on the cache's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from tiercache.cache import TierCache
from tiercache.control.messages import ControlError, Prefix
from tiercache.control.naming import given_keys
from tiercache.control.served import ServedCache
from tiercache.core.keys import ChunkKey
from tiercache.errors import TierUnavailable
from tiercache.tiers.files.tier import FileTier


class PoolPages(NamedTuple):
    """A pool other than the KV pool. A prefix can be restored if the pool has its last `window` pages."""

    name: str
    keys: Sequence[ChunkKey]
    """The names of the pages of the whole prompt; empty if the pool is not stored."""
    window: int


class Restorable(NamedTuple):
    """Lengths of prefixes, in pages."""

    kv_pages: int
    """The prefix that is in the KV pool."""
    by_pool: dict[str, int]
    """The longest prefix that each other pool can restore; leaves out pools without any page."""
    prefixes: list[int]
    """All prefixes that the pools can restore together, ascending."""


async def look_up(
    cache: TierCache, pages: int, kv: Sequence[ChunkKey] | None, pools: Sequence[PoolPages], limit_s: float
) -> Restorable:
    """Return the restorable prefixes of a prompt of `pages` pages, as far as known after `limit_s` seconds in all.

    `kv` are the names of its pages; if it is None, the KV pool counts as having all of them.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + limit_s
    if kv is not None:
        pages = (await cache.lookup_keys(kv, deadline_s=limit_s)).chunks
    by_pool: dict[str, int] = {}
    prefixes = list(range(1, pages + 1))
    for pool in pools:
        present = await cache.lookup_each(pool.keys[:pages], deadline_s=max(0.0, until_s - loop.time()))
        lengths = restorable(present, pool.window)
        if lengths:
            by_pool[pool.name] = lengths[-1]
        prefixes = sorted(set(prefixes).intersection(lengths))
    return Restorable(pages, by_pool, prefixes)


def restorable(present: Sequence[bool], window: int) -> list[int]:
    """Return the lengths of the prefixes, in pages and ascending, whose last `window` pages are all present."""
    lengths, run = [], 0
    for length, is_here in enumerate(present, 1):
        run = run + 1 if is_here else 0
        if run >= min(window, length):
            lengths.append(length)
    return lengths


async def forget_all(cache: TierCache, deadline_s: float) -> int:
    """Remove every chunk of the cache's layout from every tier, and return their number.

    Raises TierUnavailable after `deadline_s` seconds, and if a tier cannot list its chunks: a server's chunks are
    removed only if they are known here.
    """
    until_s = asyncio.get_running_loop().time() + deadline_s
    keys = set(cache.cpu.residents)
    unlisted = []
    try:
        async with asyncio.timeout_at(until_s):
            for tier in cache.tiers:
                if isinstance(tier, FileTier) and tier.directories.is_open:
                    keys |= await tier.own_keys()
                elif tier.writes:
                    unlisted.append(tier.name)
    except TimeoutError:
        raise TierUnavailable(f"clear: what lies in the tiers could not be listed within {deadline_s:.0f} s") from None
    await cache.forget(list(keys), deadline_s=max(0.0, until_s - asyncio.get_running_loop().time()))
    if unlisted:
        raise TierUnavailable(
            f"clear: {', '.join(unlisted)} cannot say what it holds; {len(keys)} chunks that are known here are gone from "
            "it, others may be left, which this process does not find any more, and the next start may: empty it yourself, "
            "or choose another model_id"
        )
    return len(keys)


class PageNaming:
    """Map prefixes in SGLang's cache by chunk keys alone.

    Token ids are refused: SGLang's hashes of tokens depend on speculation, LoRA and salt.
    """

    async def keys(self, cache: ServedCache, prefix: Prefix) -> list[ChunkKey]:
        if (given := given_keys(prefix)) is None:
            raise ControlError(
                "refused", "a cache in SGLang names pages by SGLang's hashes: expected keys, found tokens"
            )
        return given

    async def all_keys(self, cache: ServedCache, prefix: Prefix) -> list[ChunkKey]:
        return await self.keys(cache, prefix)
