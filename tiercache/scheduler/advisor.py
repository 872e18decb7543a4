"""Watch the requests of a cache, and say what another size would be worth and why chunks were missing.

A request is counted once: by its first lookup, or by its get in a cache without lookups. Each chunk that it missed is
missing for one reason, which is decided for the sampled chunks only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from tiercache.core.advice import EVICTED, REASONS, Advice, TierAdvice, Usage
from tiercache.core.header import file_bytes
from tiercache.core.keys import ChunkKey, Tenant, tenant_of
from tiercache.core.sampling import Access, Curve, Sample
from tiercache.core.tenants import DEFAULT
from tiercache.scheduler.reads import Reader
from tiercache.tiers.base import Tier
from tiercache.tiers.cpu import CpuTier

_MOST_TENANTS = 16
"""Tenants with figures of their own: those with most accesses."""
_FARTHEST = 16
"""Largest size of interest, in multiples of the largest tier."""
_ANYWHERE = float(1 << 30)
"""The distance of chunks that another process stored, in a tier of unknown size."""
_POWERS = range(-3, 5)
"""Sizes with predicted hits, in multiples of the hot cache, as powers of two."""


class _Tally:
    """Counts of one tenant, in chunks. The dictionary keeps its size, since other threads may read it."""

    def __init__(self) -> None:
        self.curve = Curve()
        self.asked = 0.0
        self.found = 0
        self.missed = dict.fromkeys(REASONS, 0.0)


class Advisor:
    """Bound to the event loop. Every call is synchronous and bounded; see `Sample`."""

    def __init__(self, reader: Reader, chunk_bytes: int, chunk_tokens: int) -> None:
        self._reader = reader
        self._chunk_bytes = chunk_bytes
        self._chunk_tokens = chunk_tokens
        self._loop = asyncio.get_running_loop()
        self._opened_s = self._loop.time()
        self._sample = Sample()
        self._whole = _Tally()
        self._tenants: dict[Tenant, _Tally] = {}
        self._slow = {reader.tier.name: 0.0 for reader in reader.tiers}
        """Chunks that were missed because their tier was too slow, by tier."""
        self._requests = 0
        self._loaded = 0
        self._looks_up = False

    # Requests

    def looked_up(self, keys: Sequence[ChunkKey], found: int, deadline_s: float) -> None:
        """Count a request that found the first `found` chunks of the prefix `keys` by the loop time `deadline_s`."""
        self._looks_up = True
        self._asked(keys, found, deadline_s)

    def got(self, keys: Sequence[ChunkKey], delivered: int, deadline_s: float) -> None:
        """Count what a get delivered. It is a request of its own unless requests are looked up first."""
        self._loaded += delivered
        if not self._looks_up:
            self._asked(keys, delivered, deadline_s)
        elif (late := len(keys) - delivered) and self._loop.time() >= deadline_s:
            for tally in self._tallies(keys):
                tally.found = max(0, tally.found - late)
                tally.missed["deadline"] += late

    def asked_partial(self, keys: Sequence[ChunkKey], tokens: int) -> None:
        """Count the tokens that a request has after its last whole chunk, if all its chunks `keys` were found."""
        for tally in self._tallies(keys):
            tally.asked += tokens / self._chunk_tokens
            tally.missed["partial_chunk"] += tokens / self._chunk_tokens

    def stored(self, keys: Iterable[ChunkKey]) -> None:
        """Record that chunks were put."""
        self._sample.stored(keys, self._loop.time())

    def forgotten(self, keys: Sequence[ChunkKey]) -> None:
        """Record that chunks were removed from every tier."""
        self._sample.forgotten(keys)

    def _asked(self, keys: Sequence[ChunkKey], found: int, deadline_s: float) -> None:
        if not keys:
            return
        now_s, tallies = self._loop.time(), self._tallies(keys)
        self._requests += 1
        for tally in tallies:
            tally.asked += len(keys)
            tally.found += found
        largest = max((tier.capacity_bytes for tier in self._below()), default=0) // file_bytes(self._chunk_bytes)
        self._sample.farthest = _FARTHEST * max(largest, self._slots)
        # Chunks that an earlier process stored are assumed to be within the largest tier.
        for access in self._sample.asked(keys, found, 0.9 * largest or _ANYWHERE, now_s):
            reason = self._reason(access, now_s, late=now_s >= deadline_s) if access.place >= found else None
            for tally in tallies:
                tally.curve.add(access.weight, access.distance)
                if reason is not None:
                    tally.missed[reason] += access.weight

    def _reason(self, access: Access, now_s: float, *, late: bool) -> str:
        """Return why a chunk was not found, a name in `REASONS`, and count it for a tier that was too slow."""
        key, readers = access.key, self._reader.tiers
        for reader in readers:
            tier, holds = reader.tier, reader.tier.contains(key)
            if holds or (access.was_stored and tier.traits.shared):
                if tier.traffic.detached or not reader.breaker.would_allow(now_s):
                    return "tier_down"
                if holds and not reader.would_serve(1):
                    self._slow[tier.name] += access.weight
                    return "too_slow"
                if late or holds:
                    return "deadline" if late else "gap"
        if self._reader.cpu.contains(key):
            return "deadline" if late else "gap"
        if not access.was_stored:
            return "never_stored"
        if any(reader.tier.admission and not reader.tier.admission.admits(key) for reader in readers):
            return "declined"
        return next(reason for reason, most_s in EVICTED.items() if now_s - access.used_s < most_s)

    def _tallies(self, keys: Sequence[ChunkKey]) -> tuple[_Tally, _Tally]:
        """Return the counts of all tenants and of the tenant of `keys`. A new one replaces that with the fewest accesses."""
        tenants, tenant = self._tenants, tenant_of(keys[0]) if keys else b""
        if tenant not in tenants:
            if len(tenants) >= _MOST_TENANTS:
                del tenants[min(tenants, key=lambda name: tenants[name].asked)]
            tenants[tenant] = _Tally()
        return self._whole, tenants[tenant]

    # Figures

    @property
    def _slots(self) -> int:
        """The present size of the hot cache in chunks."""
        return self._reader.cpu.budget.slots

    def _below(self) -> list[Tier]:
        """Return the tiers in use below the hot cache whose size is known."""
        tiers = [reader.tier for reader in self._reader.tiers if not isinstance(reader.tier, CpuTier)]
        return [tier for tier in tiers if tier.capacity_bytes and not tier.traffic.detached]

    def advice(self) -> Advice:
        """Return the figures since the cache was opened."""
        tenants = list(self._tenants.items()) if len(self._tenants) > 1 else []
        chunk_s, cpu = self._reader.settings.recompute_s, self._reader.cpu
        return Advice(
            span_s=self._loop.time() - self._opened_s,
            requests=self._requests,
            loaded_tokens=self._loaded * self._chunk_tokens,
            saved_s=None if chunk_s is None else self._loaded * chunk_s,
            sampled_chunks=len(self._sample),
            rate=self._sample.rate,
            usage=self._usage(self._whole),
            tenants={tenant.hex() or DEFAULT: self._usage(tally) for tenant, tally in tenants},
            tiers={tier.name: self._tier(tier) for tier in ([cpu] if cpu.keep else []) + self._below()},
        )

    def _usage(self, tally: _Tally) -> Usage:
        tokens = self._chunk_tokens
        sizes = {max(1, int(self._slots * 2.0**power)) for power in _POWERS}
        return Usage(
            asked_tokens=round(tally.asked * tokens),
            found_tokens=tally.found * tokens,
            missed_tokens={reason: chunks * tokens for reason, chunks in tally.missed.items()},
            sampled_tokens=tally.curve.accesses * tokens,
            hit_tokens={str(size * self._chunk_bytes): tally.curve.hits(size) * tokens for size in sorted(sizes)},
        )

    def _tier(self, tier: Tier) -> TierAdvice:
        """Return the advice for a tier, from the size that its chunks have there."""
        curve, known, chunks = self._whole.curve, tier.statistics(), float(self._slots)
        if tier is not self._reader.cpu:
            chunks = tier.capacity_bytes / (known.occupied_bytes / max(1, known.resident) or self._chunk_bytes)
        return TierAdvice(
            capacity_bytes=tier.capacity_bytes,
            hit_rate=curve.hit_rate(chunks),
            hit_rate_halved=curve.hit_rate(chunks / 2),
            hit_rate_doubled=curve.hit_rate(chunks * 2),
            written_bytes=known.stored_bytes or known.written_bytes,
            read_bytes=known.read_bytes,
            admits_all=tier.admission is None or tier.admission.policy == "all",
            slow_tokens=self._slow.get(tier.name, 0.0) * self._chunk_tokens,
        )
