"""What look-ups have promised, kept hot until it is loaded.

A load of several groups that fails in part sends its request back to the first token, so a look-up promises what has been
read and verified, and holds it. Only so much of the hot cache is held: what comes on top of that was found and verified,
and may have to be read a second time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tiercache.cache import TierCache
from tiercache.core.keys import ChunkKey, keys_from_hashes
from tiercache.integrations.vllm.grouped import HitSearch, names_of, needed_chunks
from tiercache.integrations.vllm.planning import BlockGeometry, Match
from tiercache.tiers.leases import Lease

_MOST_OF_THE_HOT_CACHE = 0.5
_LONGEST_S = 60.0
"""For a request that waits for blocks, or of whose end nobody told."""


@dataclass
class _Claim:
    keys: list[ChunkKey]
    expiry: asyncio.TimerHandle


@dataclass
class _Held:
    lease: Lease
    claims: int


class Claims:
    """All methods belong to the cache's event loop."""

    def __init__(self, cache: TierCache, geometry: BlockGeometry) -> None:
        self._cache = cache
        self._geometry = geometry
        self._claims: dict[str, _Claim] = {}
        self._held: dict[ChunkKey, _Held] = {}
        self._most = int(cache.cpu.pool.count * _MOST_OF_THE_HOT_CACHE)

    @property
    def held(self) -> int:
        """Chunks."""
        return len(self._held)

    async def claim(self, request_id: str, names: Sequence[bytes], match: Match, until_s: float) -> Match:
        """Bring the chunks of `match` into the hot cache and hold them for the request; what is not there by `until_s` (a
        loop time) makes the hit shorter. Cancelled, it holds nothing."""
        self.release(request_id)
        geometry = self._geometry
        search = HitSearch(match.blocks // geometry.blocks_per_chunk, geometry)
        taken: list[ChunkKey] = []
        try:
            while search.question:
                keys = keys_from_hashes(self._cache.namespace, names_of(search.question, names, geometry))
                search.answer(await self._take(keys, taken, until_s))
        except BaseException:
            self._let_go(taken)
            raise
        needed = set(
            keys_from_hashes(
                self._cache.namespace, names_of(needed_chunks(search.chunks, geometry), names, geometry)
            )
        )
        self._let_go([key for key in taken if key not in needed])
        kept = [key for key in taken if key in needed]
        if kept:
            loop = asyncio.get_running_loop()
            self._claims[request_id] = _Claim(kept, loop.call_later(_LONGEST_S, self.release, request_id))
        return match.shortened(search.chunks * geometry.blocks_per_chunk, geometry)

    def release(self, request_id: str) -> None:
        """Idempotent."""
        claim = self._claims.pop(request_id, None)
        if claim is not None:
            claim.expiry.cancel()
            self._let_go(claim.keys)

    def close(self) -> None:
        for request_id in list(self._claims):
            self.release(request_id)

    async def _take(self, keys: Sequence[ChunkKey], taken: list[ChunkKey], until_s: float) -> int:
        """How many of `keys` may be promised, up to the first that may not. Adds to `taken` what is held."""
        room = max(0, self._most - len(self._held))
        new = [key for key in keys if key not in self._held][:room]
        left_s = until_s - asyncio.get_running_loop().time()
        await self._cache.warm(new, deadline_s=max(0.0, left_s))
        tried = set(new)
        had = set(taken)
        for position, key in enumerate(keys):
            if key in had:
                continue
            if self._hold(key, had):
                taken.append(key)
            elif key in tried and not self._cache.cpu.contains(key):
                return position
        return len(keys)

    def _hold(self, key: ChunkKey, had: set[ChunkKey]) -> bool:
        held = self._held.get(key)
        if held is not None and held.lease.findable:
            held.claims += 1
        elif held is None and len(self._held) < self._most and self._cache.cpu.spare:
            lease = self._cache.cpu.hold(key)
            if lease is None:
                return False
            self._held[key] = _Held(lease, 1)
        else:
            return False
        had.add(key)
        return True

    def _let_go(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            held = self._held[key]
            held.claims -= 1
            if not held.claims:
                del self._held[key]
                held.lease.release()
