"""Look up pages for SGLang. Coroutines run on the cache's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tiercache.cache import TierCache
from tiercache.control.messages import ControlError, Prefix
from tiercache.control.naming import given_keys
from tiercache.control.served import ServedCache
from tiercache.core.keys import ChunkKey
from tiercache.errors import TierUnavailable
from tiercache.tiers.files.own_chunks import own_keys
from tiercache.tiers.files.tier import FileTier

_ASKED_TOGETHER = 32


async def prefix(cache: TierCache, keys: Sequence[ChunkKey], timeout_s: float) -> int:
    """Return the length of the prefix of `keys` that is known to be present after at most `timeout_s` seconds."""
    chunks, _ = await cache.parts.reader.lookup(keys, asyncio.get_running_loop().time() + timeout_s)
    return chunks


async def present(cache: TierCache, keys: Sequence[ChunkKey], timeout_s: float) -> list[bool]:
    """Return for each of `keys` if it is present. Keys without an answer in `timeout_s` seconds count as missing."""
    found = [False] * len(keys)

    async def ask(start: int) -> None:
        end = min(start + _ASKED_TOGETHER, len(keys))
        while start < end:
            run = await prefix(cache, keys[start:end], timeout_s)
            found[start : start + run] = [True] * run
            start += run + 1

    questions = [asyncio.create_task(ask(start)) for start in range(0, len(keys), _ASKED_TOGETHER)]
    try:
        done, _ = await asyncio.wait(questions, timeout=timeout_s) if questions else (set(), set())
    finally:
        for question in questions:
            question.cancel()
    for question in done:
        question.result()
    return found


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
                    keys |= await own_keys(tier)
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


@dataclass(frozen=True)
class PoolPages:
    """The pages of a prefix in a pool other than the KV pool.

    Without a `window` every page of a prefix is needed; otherwise the last `window` pages, so a state at the end has
    window 1.
    """

    name: str
    present: Sequence[bool]
    window: int | None = None

    def restorable(self, pages: int) -> list[int]:
        """Return the prefix lengths, in pages and ascending, for which the pool has all needed pages."""
        if self.window is None:
            first_gap = next((page for page in range(pages) if not self.present[page]), pages)
            return list(range(1, first_gap + 1))
        found, run = [], 0
        for page in range(pages):
            run = run + 1 if self.present[page] else 0
            if run >= min(self.window, page + 1):
                found.append(page + 1)
        return found


@dataclass(frozen=True)
class Restorable:
    """`pages` of KV can be used. `by_pool` is the reach of each pool alone, `prefixes` are all possible lengths."""

    pages: int
    by_pool: dict[str, int]
    prefixes: list[int]


def restorable(kv_pages: int, pools: Sequence[PoolPages]) -> Restorable:
    """Return the restorable prefixes if `kv_pages` pages of KV are present. `by_pool` leaves out pools without any page."""
    by_pool: dict[str, int] = {}
    prefixes = list(range(1, kv_pages + 1))
    for pool in pools:
        lengths = pool.restorable(kv_pages)
        if lengths:
            by_pool[pool.name] = lengths[-1]
        here = set(lengths)
        prefixes = [length for length in prefixes if length in here]
    return Restorable(prefixes[-1] if prefixes else 0, by_pool, prefixes)


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
