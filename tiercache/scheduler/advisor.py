"""Watch the requests of a cache, and say what another size would be worth and why chunks were missing.

A request is counted once: by its first lookup, or by its get in a cache without lookups. Each chunk that it missed is
missing for one reason, which is decided for the sampled chunks only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from tiercache.core.advice import AGES, REASONS, Advice, TierAdvice, Usage
from tiercache.core.header import file_bytes
from tiercache.core.keys import ChunkKey, Tenant, tenant_of
from tiercache.core.sampling import Access, Curve, Sample
from tiercache.core.tenants import DEFAULT, OTHERS
from tiercache.scheduler.reads import Reader
from tiercache.tiers.base import Tier, TierStatistics
from tiercache.tiers.cpu import CpuTier

_MOST_TENANTS = 16
"""Tenants with figures of their own: those with most accesses. The others are summed up."""
_FARTHEST = 16
"""Largest size of interest, in multiples of the largest tier."""
_ANYWHERE = 1 << 30
"""The distance of chunks that another process stored, in a tier of unknown size."""
_POWERS = range(-3, 5)
"""Sizes with predicted hits, in multiples of the hot cache, as powers of two."""


class _Tally:
    """Counts of one tenant, in chunks. Dictionaries keep their size, since other threads may read them."""

    def __init__(self) -> None:
        self.curve = Curve()
        self.asked = 0.0
        self.found = 0
        self.missed = dict.fromkeys(REASONS, 0.0)
        self.evicted = dict.fromkeys(AGES, 0.0)

    def include(self, other: _Tally) -> None:
        self.curve.include(other.curve)
        self.asked += other.asked
        self.found += other.found
        for mine, others in ((self.missed, other.missed), (self.evicted, other.evicted)):
            for name, chunks in others.items():
                mine[name] += chunks


class Advisor:
    """Bound to the event loop. Every call is synchronous and bounded; see `Sample`."""

    def __init__(self, reader: Reader, slots: int, chunk_bytes: int, chunk_tokens: int) -> None:
        """`slots` is the size of the hot cache in chunks."""
        self._reader = reader
        self._slots = slots
        self._chunk_bytes = chunk_bytes
        self._chunk_tokens = chunk_tokens
        self._loop = asyncio.get_running_loop()
        self._opened_s = self._loop.time()
        self._sizes = [int(slots * 2.0**power) for power in _POWERS]
        sizes = [known.capacity_bytes // file_bytes(chunk_bytes) for _, known in self._flash()]
        self._coldest = int(0.9 * max(sizes)) if sizes else _ANYWHERE
        """The assumed distance of chunks that an earlier process stored: within the largest tier."""
        self._sample = Sample(farthest=_FARTHEST * max([slots, *sizes]))
        self._tallies: dict[Tenant | None, _Tally] = {}
        """By tenant; None for the sum of tenants without their own."""
        self._requests = 0
        self._loaded = 0
        self._looks_up = False
        self._failed = 0
        """Failures of the reader at the last get that was not served."""

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
        elif lost := len(keys) - delivered:
            reader = self._reader.counters
            before, self._failed = self._failed, reader.failed + reader.corrupt + reader.sink_failures
            is_late = self._loop.time() >= deadline_s
            if is_late or self._failed > before:
                tally = self._tally(tenant_of(keys[0]))
                tally.found = max(0, tally.found - lost)
                tally.missed["deadline" if is_late else "failed"] += lost

    def asked_partial(self, keys: Sequence[ChunkKey], tokens: int) -> None:
        """Count the tokens that a request has after its last whole chunk, if all its chunks `keys` were found."""
        tally = self._tally(tenant_of(keys[0]) if keys else b"")
        tally.asked += (chunks := tokens / self._chunk_tokens)
        tally.missed["partial_chunk"] += chunks

    def stored(self, keys: Iterable[ChunkKey]) -> None:
        """Record that chunks were put."""
        self._sample.stored(keys, self._loop.time())

    def forgotten(self, keys: Sequence[ChunkKey]) -> None:
        """Record that chunks were removed from every tier."""
        self._sample.forgotten(keys)

    def _asked(self, keys: Sequence[ChunkKey], found: int, deadline_s: float) -> None:
        if not keys:
            return
        now_s = self._loop.time()
        tally = self._tally(tenant_of(keys[0]))
        self._requests += 1
        tally.asked += len(keys)
        tally.found += found
        for access in self._sample.asked(keys, found, self._coldest, now_s):
            tally.curve.add(access.weight, access.distance)
            if access.place >= found:
                reason = self._reason(access, late=now_s >= deadline_s)
                tally.missed[reason] += access.weight
                if reason == "evicted" and access.used_s is not None:
                    ago_s = now_s - access.used_s
                    tally.evicted[next(age for age, most_s in AGES.items() if ago_s < most_s)] += access.weight

    def _reason(self, access: Access, *, late: bool) -> str:
        """Return why a chunk was not found, a name in `REASONS`."""
        key, reader = access.key, self._reader
        for tier in reader.tiers:
            holds = tier.tier.contains(key)
            if holds or (access.was_stored and tier.tier.traits.shared):
                if not tier.breaker.would_allow(self._loop.time()):
                    return "tier_down"
                if holds and not tier.would_serve(1):
                    return "too_slow"
                if late:
                    return "deadline"
            if holds:
                return "gap"
        if reader.cpu.contains(key):
            return "deadline" if late else "gap"
        if not access.was_stored:
            return "never_stored"
        return "declined" if any(_declines(tier.tier, key) for tier in reader.tiers) else "evicted"

    def _tally(self, tenant: Tenant | None) -> _Tally:
        """Return the counts of a tenant. A new one replaces the tenant with the fewest accesses."""
        tallies = self._tallies
        tally = tallies.get(tenant)
        if tally is None:
            if len(tallies) > _MOST_TENANTS:
                least = min((name for name in tallies if name is not None), key=lambda name: tallies[name].asked)
                tallies.setdefault(None, _Tally()).include(tallies.pop(least))
            tally = tallies[tenant] = _Tally()
        return tally

    # Figures

    def advice(self) -> Advice:
        """Return the figures since the cache was opened."""
        whole = _Tally()
        tallies = list(self._tallies.items())
        for _, tally in tallies:
            whole.include(tally)
        named = {OTHERS if tenant is None else tenant.hex() or DEFAULT: tally for tenant, tally in tallies}
        chunk_s = self._reader.settings.recompute_s
        return Advice(
            span_s=self._loop.time() - self._opened_s,
            requests=self._requests,
            loaded_tokens=self._loaded * self._chunk_tokens,
            saved_s=None if chunk_s is None else self._loaded * chunk_s,
            sampled_chunks=len(self._sample),
            rate=self._sample.rate,
            usage=self._usage(whole),
            tenants={name: self._usage(tally) for name, tally in named.items()} if len(named) > 1 else {},
            tiers=self._tiers(whole.curve),
        )

    def _usage(self, tally: _Tally) -> Usage:
        tokens = self._chunk_tokens
        return Usage(
            asked_tokens=round(tally.asked * tokens),
            found_tokens=tally.found * tokens,
            missed_tokens={reason: chunks * tokens for reason, chunks in tally.missed.items()},
            evicted_tokens={age: chunks * tokens for age, chunks in tally.evicted.items()},
            sampled_tokens=tally.curve.accesses * tokens,
            hit_tokens={str(size * self._chunk_bytes): tally.curve.hits(size) * tokens for size in self._sizes},
        )

    def _tiers(self, curve: Curve) -> dict[str, TierAdvice]:
        cpu = self._reader.cpu
        found = {cpu.name: _advice_for(curve, cpu, cpu.statistics(), self._slots)}
        for tier, statistics in self._flash():
            chunk_bytes = statistics.occupied_bytes / max(1, statistics.resident) or self._chunk_bytes
            found[tier.name] = _advice_for(curve, tier, statistics, statistics.capacity_bytes / chunk_bytes)
        return found

    def _flash(self) -> list[tuple[Tier, TierStatistics]]:
        """Return the tiers below the hot cache whose size is known."""
        tiers = [tier.tier for tier in self._reader.tiers if not isinstance(tier.tier, CpuTier)]
        return [(tier, known) for tier in tiers if (known := tier.statistics()).capacity_bytes]


def _declines(tier: Tier, key: ChunkKey) -> bool:
    return tier.admission is not None and not tier.admission.admits(key)


def _advice_for(curve: Curve, tier: Tier, statistics: TierStatistics, chunks: float) -> TierAdvice:
    """Return the advice for a tier that has room for `chunks` chunks."""
    return TierAdvice(
        capacity_bytes=statistics.capacity_bytes,
        hit_rate=curve.hit_rate(chunks),
        hit_rate_halved=curve.hit_rate(chunks / 2),
        hit_rate_doubled=curve.hit_rate(chunks * 2),
        written_bytes=statistics.stored_bytes or statistics.written_bytes,
        read_bytes=statistics.read_bytes,
        admits_all=tier.admission is None or tier.admission.policy == "all",
    )
