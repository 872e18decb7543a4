"""What look-ups have promised, kept hot (or mapped) until it is loaded.

A load of several groups that fails in part sends its request back to the first token, so a look-up promises what has been
read and verified, and holds it. Only so much of the hot cache is held: what comes on top of that was found and verified,
and may have to be read a second time.

A synchronous load must not fail at all: requests that share its blocks go on with them (see `SchedulerSide`). So only what
is held to the last chunk is loaded like that, and from these leases, whatever happens to the chunks meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tiercache.cache import TierCache
from tiercache.core.keys import ChunkKey
from tiercache.integrations.vllm.grouped import HitSearch, keys_of, names_of, needed_chunks
from tiercache.integrations.vllm.planning import BlockGeometry, Match
from tiercache.memory.slots import Lease

_MOST_OF_THE_HOT_CACHE = 0.5
_LONGEST_S = 60.0
"""For a request that waits for blocks, or of whose end nobody told."""
_OVER_FOR_S = 10.0
"""So long after its release a look-up may come to claim; what is claimed later yet expires as above."""
HELD_FOR_S = 30.0
"""For so long after the question what was held is there, and as long again for the load to begin."""


@dataclass
class _Claim:
    keys: list[ChunkKey]
    expiry: asyncio.TimerHandle


class Claims:
    """All methods belong to the cache's event loop."""

    def __init__(self, cache: TierCache, geometry: BlockGeometry) -> None:
        self._cache = cache
        self._reader = cache.parts.reader
        self._geometry = geometry
        self._claims: dict[str, _Claim] = {}
        self._over: dict[str, float] = {}
        """Names that were released, until when that is remembered, oldest first."""
        self._times: dict[ChunkKey, int] = {}
        """How many claims there are on each chunk."""
        self.leases: dict[ChunkKey, Lease] = {}
        self._most = int(cache.cpu.pool.count * _MOST_OF_THE_HOT_CACHE)

    @property
    def held(self) -> int:
        """Chunks."""
        return len(self.leases)

    async def claim_prefix(self, name: str, keys: Sequence[ChunkKey], until_s: float) -> int | None:
        """Bring these chunks, which follow one another, into the hot cache and hold them for the request. Returns how many
        of the first ones are held; that is fewer where one cannot be read, or computing is quicker by now. None, and nothing
        is held, where there is no room to hold them all, or no time until `until_s` (a loop time), or when it is cancelled
        or `name` was released, even before this was called.
        """
        self._drop(name)
        if len(self.leases) + sum(key not in self.leases for key in keys) > self._most:
            return None
        loop = asyncio.get_running_loop()
        if self._reader.prefix_at_hand(keys) < len(keys):
            wait_s = self._reader.worth_waiting_s(keys)
            worth_s = until_s if wait_s is None else min(until_s, loop.time() + wait_s)
            await self._cache.warm(keys, deadline_s=max(0.0, worth_s - loop.time()))
        taken: list[ChunkKey] = []
        for key in keys:
            if not self._hold(key):
                break
            taken.append(key)
        if len(taken) < len(keys) and (self._reader.has_at_hand(keys[len(taken)]) or loop.time() >= until_s):
            self._let_go(taken)
            return None
        return len(taken) if self._remember(name, taken) else None

    async def claim(self, name: str, names: Sequence[bytes], match: Match, until_s: float) -> Match:
        """Bring the chunks of `match` into the hot cache and hold them for the request; what is not there by `until_s` (a
        loop time) makes the hit shorter. Cancelled, or after `name` was released, it holds nothing."""
        self._drop(name)
        geometry = self._geometry
        search = HitSearch(match.blocks // geometry.blocks_per_chunk, geometry)
        taken: list[ChunkKey] = []
        try:
            while search.question:
                keys = keys_of(self._cache.namespace, names_of(search.question, names, geometry), geometry)
                search.answer(await self._take(keys, taken, until_s))
        except BaseException:
            self._let_go(taken)
            raise
        needed = set(
            keys_of(
                self._cache.namespace, names_of(needed_chunks(search.chunks, geometry), names, geometry), geometry
            )
        )
        self._let_go([key for key in taken if key not in needed])
        self._remember(name, [key for key in taken if key in needed])
        return match.shortened(search.chunks * geometry.blocks_per_chunk, geometry)

    def release(self, *names_of_claims: str) -> None:
        """Nothing is held under these names from now on, nor by look-ups that come to it later: a name has one look-up."""
        now_s = asyncio.get_running_loop().time()
        while self._over and next(iter(self._over.values())) <= now_s:
            del self._over[next(iter(self._over))]
        for name in names_of_claims:
            self._drop(name)
            self._over.setdefault(name, now_s + _OVER_FOR_S)

    def close(self) -> None:
        for name in list(self._claims):
            self._drop(name)

    def _remember(self, name: str, taken: list[ChunkKey]) -> bool:
        """False: the name was released meanwhile, and nothing is held."""
        if name in self._over:
            self._let_go(taken)
            return False
        if taken:
            expiry = asyncio.get_running_loop().call_later(_LONGEST_S, self._drop, name)
            self._claims[name] = _Claim(taken, expiry)
        return True

    def _drop(self, name: str) -> None:
        claim = self._claims.pop(name, None)
        if claim is not None:
            claim.expiry.cancel()
            self._let_go(claim.keys)

    async def _take(self, keys: Sequence[ChunkKey], taken: list[ChunkKey], until_s: float) -> int:
        """How many of `keys` may be promised, up to the first that may not. Adds to `taken` what is held."""
        room = max(0, self._most - len(self.leases))
        new = [key for key in keys if key not in self.leases][:room]
        left_s = until_s - asyncio.get_running_loop().time()
        await self._cache.warm(new, deadline_s=max(0.0, left_s))
        tried = set(new)
        had = set(taken)
        for position, key in enumerate(keys):
            if key in had:
                continue
            if self._hold(key):
                had.add(key)
                taken.append(key)
            elif key in tried and not self._reader.has_at_hand(key):
                return position
        return len(keys)

    def _hold(self, key: ChunkKey) -> bool:
        lease = self.leases.get(key)
        if lease is None and (len(self.leases) >= self._most or not self._cache.cpu.spares(key)):
            return False
        if lease is None or not lease.findable:
            found = self._reader.pin(key)
            if found is None:
                return False
            if lease is not None:
                lease.release()  # it was removed, and is there again
            self.leases[key] = found
        self._times[key] = self._times.get(key, 0) + 1
        return True

    def _let_go(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self._times[key] -= 1
            if not self._times[key]:
                del self._times[key]
                self.leases.pop(key).release()
