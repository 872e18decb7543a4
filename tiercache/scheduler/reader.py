"""The cascade: hot cache, then each tier in order; one flight per key however many ask."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tiercache.core.budget import Purpose
from tiercache.core.estimate import worth_waiting_s
from tiercache.core.index import counts_in
from tiercache.core.keys import ChunkKey
from tiercache.memory.workers import Workers, once_ended
from tiercache.payloads import Sink
from tiercache.scheduler.deliverer import WithHeld, deliver
from tiercache.scheduler.flights import Flights
from tiercache.scheduler.reads import ReaderSettings, ReaderStatistics, TierReadStatistics
from tiercache.scheduler.tier_reader import TierReader
from tiercache.scheduler.together import call_off
from tiercache.scheduler.undelivered import Undelivered
from tiercache.tiers.base import MappedTier, Tier
from tiercache.tiers.cpu import CpuTier
from tiercache.tiers.leases import Lease

_LET_GO_S = 0.002
"""What a tier has to let go of a question at its deadline."""


@dataclass(frozen=True)
class Hit:
    """How far a contiguous prefix reaches, and where it lies. `tokens` is 0 where only keys were given."""

    chunks: int
    tokens: int
    by_tier: dict[str, int]
    """Chunks by the first tier of the cascade that has them; together `chunks`."""


class Reader:
    """All methods belong to the event loop. Deadlines are loop times (`loop.time()`) in seconds."""

    def __init__(
        self,
        cpu: CpuTier,
        tiers: Sequence[Tier],
        settings: ReaderSettings | None = None,
        *,
        maps: bool = False,
    ) -> None:
        """`cpu` is where chunks land: the hot cache, or the staging tier of a device. `maps`: but for those of tiers that
        can be mapped, which stay where they lie."""
        self.cpu = cpu
        self.settings = settings or ReaderSettings()
        self.mapped = [tier for tier in tiers if maps and isinstance(tier, MappedTier)]
        for tier in self.mapped:
            tier.maps_ahead = True
        cpu.budget.divide(tier.name for tier in tiers if tier not in self.mapped)
        self.counters = ReaderStatistics(hits=dict.fromkeys([cpu.name, *(tier.name for tier in tiers)], 0))
        self.undelivered = Undelivered(self.counters)
        self.tiers = [TierReader(tier, cpu, self.settings, self.counters, maps=maps) for tier in tiers]
        self.flights = Flights(cpu, self.tiers, self.counters)
        self._questions: set[asyncio.Task[Any]] = set()
        """Cancelled, and not over yet."""
        self.lanes = max([2, *(tier.traits.read_concurrency + 2 for tier in tiers)])

    @property
    def read_concurrency(self) -> int:
        """How many chunks all tiers together take on at a time."""
        return sum(tier.tier.traits.read_concurrency + 2 for tier in self.tiers)

    def reads(self) -> dict[str, TierReadStatistics]:
        return {tier.name: replace(tier.reads, seconds=tier.reads.seconds.copy()) for tier in self.tiers}

    def breakers(self) -> dict[str, str]:
        return {tier.name: tier.breaker.state.value for tier in self.tiers}

    def lease_now(self, key: ChunkKey, *, noted: bool = False) -> Lease | None:
        """The chunk if it is hot, or mapped. Does not count a miss, nor a use that is `noted` already."""
        lease = self.cpu.lease(key, noted=noted)
        if lease is not None:
            self.counters.hits[self.cpu.name] += 1
            return lease
        for tier in self.mapped:
            if (lease := tier.lease(key, noted=noted)) is not None:
                self.counters.hits[tier.name] += 1
                return lease
        return None

    def hold(self, key: ChunkKey) -> Lease | None:
        """Keep a chunk that is hot, or mapped, for a reader who may come; not a use. None when it is neither."""
        lease = self.cpu.hold(key)
        for tier in self.mapped:
            lease = lease or tier.hold(key)
        return lease

    def has_at_hand(self, key: ChunkKey) -> bool:
        """Whether it is hot, or mapped."""
        return self.cpu.contains(key) or any(key in tier.mappings for tier in self.mapped)

    def prefix_at_hand(self, keys: Sequence[ChunkKey]) -> int:
        """How many of `keys`, from the first on without a gap, are hot or mapped."""
        position = self.cpu.prefix(keys)
        while self.mapped and position < len(keys) and self.has_at_hand(keys[position]):
            position += 1
        return position

    async def fetch(
        self, key: ChunkKey, deadline_s: float, parent: ChunkKey | None = None, time: int | None = None
    ) -> Lease | None:
        """A lease on the chunk from whichever tier has it; None on a miss or at the deadline. `parent` is the chunk before
        it in its prefix, if that is known, and `time` the time of this access.

        Cancelled, it leaves the flight to the others who wait for it, and to the hot cache.
        """
        return self.lease_now(key) or await self.flights.fetch(key, deadline_s, parent=parent, time=time)

    async def promote(self, key: ChunkKey, deadline_s: float, parent: ChunkKey | None = None) -> Lease | None:
        """As `fetch`, for somebody who may come: any demand read goes first, and the lease is a hold, no use."""
        return self.hold(key) or await self.flights.fetch(key, deadline_s, Purpose.PREFETCH, parent)

    async def deliver(
        self,
        keys: Sequence[ChunkKey],
        sinks: Sequence[Sink],
        deadline_s: float,
        held: Mapping[ChunkKey, Lease] | None = None,
    ) -> int:
        """Hand each chunk to its sink on a worker thread; returns how many of the contiguous prefix were delivered.

        Hot chunks go in one hand-over for each copying thread; the others are read meanwhile. Sinks behind a gap may have
        run. No sink runs after this has returned or raised, but for one that hangs: TierUnavailable says so 30 s after the
        deadline. A sink that raises ends the prefix, and so does one that no thread was free for by the deadline. Chunks
        that are `held` are there whatever happened to them meanwhile, and worth waiting for.
        """
        landing = _Sinks(sinks, self.cpu.copiers, self.undelivered, deadline_s)
        if held is not None:
            return await deliver(WithHeld(self, held), keys, landing, deadline_s)
        if (wait_s := self.worth_waiting_s(keys)) is not None:
            deadline_s = min(deadline_s, asyncio.get_running_loop().time() + wait_s)
        return await deliver(self, keys, landing, deadline_s)

    def worth_waiting_s(self, keys: Sequence[ChunkKey]) -> float | None:
        """For the chunks that are not hot, before the engine had better compute what is not there. None: nobody knows what
        that takes, or no tier is known to have any of them."""
        recompute_s = self.settings.recompute_s
        if recompute_s is None:
            return None
        position, by_tier = self.where(keys)
        unknown = len(keys) - position
        expected: list[float | None] = []
        for tier in self.tiers:
            if chunks := by_tier[tier.name] + (unknown if tier.tier.traits.shared else 0):
                expected.append(tier.lasting_s(chunks))
        if not expected:
            return None
        known = [lasting_s for lasting_s in expected if lasting_s is not None]
        expected_s = sum(known) if len(known) == len(expected) else None
        return worth_waiting_s(expected_s, recompute_s * (len(keys) - by_tier[self.cpu.name]))

    async def warm(self, keys: Sequence[ChunkKey], deadline_s: float) -> int:
        """Promote chunks into the hot cache, or map them; returns how many of the prefix are there (or were, on arrival)."""
        return await deliver(_NotServed(self), keys, _HotCache(), deadline_s)

    def where(self, keys: Sequence[ChunkKey]) -> tuple[int, dict[str, int]]:
        """What memory knows of the contiguous prefix of `keys`: its length, and its chunks by tier."""
        by_tier = dict.fromkeys(self.counters.hits, 0)
        position = self.cpu.prefix(keys)
        by_tier[self.cpu.name] = position
        if position < len(keys) and self.tiers:
            left = len(keys) - position
            well = [tier.tier for tier in self.tiers if tier.would_serve(left)]
            places = [(tier.name, known) for tier in (self.cpu, *well) for known in tier.offered()]
            counts = counts_in([known for _, known in places], keys[position:])
            position += sum(counts)
            for (name, _), count in zip(places, counts, strict=True):
                by_tier[name] += count
        return position, by_tier

    async def lookup(self, keys: Sequence[ChunkKey], deadline_s: float | None = None) -> tuple[int, dict[str, int]]:
        """As `where`, asking shared tiers about what memory does not know, all at once and until the deadline.

        One that does not answer costs its own hits only. Tiers from which the engine would compute sooner are not asked.
        """
        position, by_tier = self.where(keys)
        if position == len(keys):
            return position, by_tier
        deadline_s = deadline_s or asyncio.get_running_loop().time() + self.settings.probe_deadline_s
        due = [tier for tier in self.tiers if tier.tier.traits.shared and deadline_s > asyncio.get_running_loop().time()]
        asked: dict[asyncio.Task[int | None], tuple[TierReader, int]] = {}
        try:
            while position < len(keys):
                for tier in due:
                    if tier.serves(len(keys) - position, question=True):
                        asked[tier.ask(keys[position:], deadline_s)] = tier, position
                if not asked:
                    break
                left_s = deadline_s + _LET_GO_S - asyncio.get_running_loop().time()
                done, _ = await asyncio.wait(asked, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                before = position
                position, by_tier = self.where(keys)
                answers = [(*asked.pop(task), task.result()) for task in done]
                # Where others have filled the gap at which a tier stopped, it may know more.
                ends = [(tier, start + found) for tier, start, found in answers if found is not None]
                due = [tier for tier, end in ends if before < position and end < position]
        finally:
            self._let_go(asked)
        return position, by_tier

    async def lookup_each(self, keys: Sequence[ChunkKey], deadline_s: float | None = None) -> list[bool]:
        """Which of `keys` there are, each by itself. Asks each shared tier once about all that memory does not know."""
        loop = asyncio.get_running_loop()
        deadline_s = deadline_s or loop.time() + self.settings.probe_deadline_s
        unknown = self._unknown(keys)
        due = [tier for tier in self.tiers if tier.tier.traits.shared] if unknown and deadline_s > loop.time() else []
        serving = [tier for tier in due if tier.serves(len(unknown), question=True)]
        asked = {tier.ask_each(unknown, deadline_s) for tier in serving}
        try:
            while asked and unknown:
                left_s = deadline_s + _LET_GO_S - loop.time()
                done, asked = await asyncio.wait(asked, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
                unknown = self._unknown(unknown)
                if not done:
                    break
        finally:
            self._let_go(asked)
        lacking = set(unknown)
        return [key not in lacking for key in keys]

    def _unknown(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Those that memory does not know to be in a tier that is well."""
        well = [tier.tier for tier in self.tiers if tier.would_serve(len(keys))]
        places = [known for tier in (self.cpu, *well) for known in tier.offered()]
        return [key for key in keys if not any(key in known for known in places)]

    def _let_go(self, asked: Iterable[asyncio.Task[Any]]) -> None:
        """Nobody waits for these: a tier that does not let go of a question would hold the look-up."""
        for task in call_off(asked):
            self._questions.add(task)
            task.add_done_callback(self._questions.discard)

    async def close(self) -> None:
        """End all flights; whoever waits gets a miss. Does not wait for hung reads."""
        await self.flights.close()


class _Sinks:
    """The landing in host memory. A failure of a sink ends the prefix, and is counted."""

    def __init__(self, sinks: Sequence[Sink], copiers: Workers, undelivered: Undelivered, deadline_s: float) -> None:
        self._sinks = sinks
        self._copiers = copiers
        self._undelivered = undelivered
        self._deadline_s = deadline_s

    def part_of(self, chunks: int) -> int:
        """One part for each copying thread; small batches are not worth a second one."""
        return max(1, -(-chunks // max(1, min(self._copiers.threads, chunks // 4))))

    async def take(self, part: Sequence[tuple[int, Lease]], delivered: bytearray) -> None:
        copying: list[asyncio.Future[None]] = []

        def release() -> None:
            for _, lease in part:
                lease.release()

        try:
            todo = [(position, lease.view, self._sinks[position]) for position, lease in part]
            copying.append(self._copiers.submit(_run_sinks, todo, delivered))
            await self._copiers.ended_by(copying[0], self._deadline_s)
        except Exception as error:
            if not all(copy.done() for copy in copying):  # it hangs, and still writes to the caller's memory
                raise
            self._undelivered.note(error)
        finally:
            once_ended(copying, release)


def _run_sinks(todo: Sequence[tuple[int, np.ndarray, Sink]], delivered: bytearray) -> None:
    for position, view, sink in todo:
        sink(view)
        delivered[position] = 1


class _NotServed:
    """A cascade of whose hot chunks nobody gets the bytes: they are no hits."""

    def __init__(self, reader: Reader) -> None:
        self.cpu, self.lanes, self.fetch = reader.cpu, reader.lanes, reader.fetch
        self._mapped = reader.mapped

    def lease_now(self, key: ChunkKey, *, noted: bool = False) -> Lease | None:
        lease = self.cpu.lease(key, noted=noted)
        for tier in self._mapped:
            lease = lease or tier.lease(key, noted=noted)
        return lease


class _HotCache:
    """The landing of a promotion: nobody wants the bytes yet."""

    def part_of(self, chunks: int) -> int:
        return max(1, chunks)

    async def take(self, part: Sequence[tuple[int, Lease]], delivered: bytearray) -> None:
        for position, lease in part:
            lease.release()
            delivered[position] = 1
