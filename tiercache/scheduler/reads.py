"""Read chunks through the cascade: the hot cache, then each tier in order, with one read in flight per key.

A read in flight is a task that belongs to none of its waiters. It walks the tiers, reads into a slot of the hot cache,
verifies, and publishes; each waiter has a deadline of its own. A tier that is down, hung or slow costs no more than its own
hits: each has a `TierReader`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from tiercache.core.breaker import Breaker, BreakerSettings
from tiercache.core.budget import PREFETCH, READ, Purpose
from tiercache.core.distribution import SECONDS, Distribution
from tiercache.core.estimate import TransferEstimate, worth_waiting_s
from tiercache.core.index import counts_in
from tiercache.core.keys import ChunkKey
from tiercache.core.tombstones import Operation
from tiercache.errors import CorruptChunk
from tiercache.memory.slots import Slot, zero_padding
from tiercache.memory.turns import Turns, done_by
from tiercache.memory.workers import cancel_all
from tiercache.payloads import Sink
from tiercache.scheduler.batch import HostMemory, HotCache, deliver, or_held
from tiercache.tiers.base import DeviceTier, MappedTier, Tier
from tiercache.tiers.cpu import CpuTier
from tiercache.tiers.leases import Lease

logger = logging.getLogger("tiercache.reader")

_LEAST_S = 1.0
"""A shorter wait for an answer does not count against a tier."""
_LET_GO_S = 0.002
"""The time that a tier has to let go of a look-up at its deadline."""
_Answer = TypeVar("_Answer")

_Outcome = int | Lease | None
"""The length of what was read into a slot, the lease on what was mapped, or None for a miss."""


@dataclass
class ReaderSettings:
    deadline_s: float = 10.0
    """The deadline of a caller that names none."""
    probe_deadline_s: float = 3.0
    """The longest wait of a look-up for a shared tier."""
    recompute_s: float | None = None
    """The time that the engine takes to compute one chunk: what takes longer to load is left to the engine. None where it is
    not known. It changes as the engine is measured."""


@dataclass
class ReaderStatistics:
    """Counts of chunks. `joined`: the key was in flight already. `late`: the caller gave up at its deadline. `overtaken`: a
    prefetch still waited when a demand read came for its chunk. `kept`: the read outlived its callers; the chunk is hot."""

    hits: dict[str, int] = field(default_factory=dict)
    misses: int = 0
    joined: int = 0
    overtaken: int = 0
    late: int = 0
    kept: int = 0
    corrupt: int = 0
    failed: int = 0
    sink_failures: int = 0


@dataclass
class TierReadStatistics:
    """Counts of one tier. `failed`: reads that failed, failed verification, or were given up."""

    seconds: Distribution = field(default_factory=lambda: Distribution.of(SECONDS))
    """Durations of reads that found their chunk, or were given up."""
    failed: int = 0
    reading: int = 0
    """Reads that the tier has begun and not ended."""


class InFlight:
    """The read of one chunk through the cascade, and its waiters."""

    __slots__ = ("begun", "deadline_s", "key", "operation", "parent", "purpose", "task", "time", "waiters")

    def __init__(
        self,
        key: ChunkKey,
        operation: Operation,
        purpose: Purpose,
        deadline_s: float,
        parent: ChunkKey | None,
        time: int | None,
    ) -> None:
        self.key = key
        self.operation = operation
        self.purpose = purpose
        self.parent = parent
        """The chunk before it in its prefix; None where that is not known."""
        self.time = time
        """The time of the access that it serves, as the hot cache counts it."""
        self.deadline_s = deadline_s
        """The latest deadline of its waiters. It moves when one joins."""
        self.begun = False
        """True once a tier has begun to read. Until then a demand read overtakes a prefetch."""
        self.waiters: list[tuple[asyncio.Future[Lease | None], Purpose]] = []
        self.task: asyncio.Task[None] | None = None

    @property
    def forgotten(self) -> bool:
        """True if the key was forgotten since this began: nothing is published, and later callers do not join."""
        return self.operation.forgot(self.key)

    async def arrival(self, purpose: Purpose, deadline_s: float) -> Lease | None:
        """Wait for a lease on the chunk; None on a miss. Raises TimeoutError at the deadline; holds nothing if cancelled."""
        arrival: asyncio.Future[Lease | None] = asyncio.get_running_loop().create_future()
        self.waiters.append((arrival, purpose))
        try:
            async with asyncio.timeout_at(deadline_s):
                return await arrival
        except TimeoutError:
            if not arrival.done() or arrival.cancelled():
                raise
            return arrival.result()  # it came at this very moment
        except BaseException:
            if not arrival.done():
                if not arrival.get_loop().is_closed():
                    arrival.cancel()  # this was closed and not cancelled: it could still come
            elif not arrival.cancelled() and (landed := arrival.result()) is not None:
                landed.release()
            raise

    def end(self, landed: Lease | None) -> None:
        """Give each waiter a lease of its own on the chunk that has `landed`, or None.

        A demand read has counted its access already: it is not counted a second time.
        """
        noted = self.purpose is Purpose.READ
        for arrival, purpose in self.waiters:
            if not arrival.done():
                lease = None
                if landed is not None:
                    lease = landed.another(purpose, noted=noted)
                    noted = noted and purpose is not Purpose.READ
                arrival.set_result(lease)


@dataclass
class _Read:
    """A read that one tier has begun. The slot, and the place at the tier, are taken until it has really ended, also when
    every caller has given up; what it brings then is kept."""

    key: ChunkKey
    slot: Slot | None
    """None where the chunk is mapped."""
    purpose: Purpose
    parent: ChunkKey | None
    time: int | None
    operation: Operation
    task: asyncio.Task[_Outcome]
    joined: int = 0
    """Callers that wait for it since it was abandoned."""
    landed: Lease | None = None
    """Keeps what it brought until they have leases of their own."""


class TierReader:
    """Reads from one tier: whether it is well and quick enough, how many reads it takes on, and what they bring.

    Its places go to demand reads first. While a demand read has a place, no more than one prefetch at a time begins: all
    reads share the tier's bandwidth, so each prefetch makes the demand read longer. Where a tier keeps prefetches apart,
    those that run give way, and reads have places of their own.
    """

    def __init__(
        self, tier: Tier, cpu: CpuTier, settings: ReaderSettings, counters: ReaderStatistics, *, maps: bool = False
    ) -> None:
        """`cpu` is the tier that it reads into; its budget bounds the slots that reads may fill at a time, or hang in. With
        `maps`, chunks are mapped instead."""
        self.tier = tier
        self.mapped = tier if maps and isinstance(tier, MappedTier) else None
        self.name = tier.name
        self.cpu = cpu
        self.settings = settings
        self.counters = counters
        self.patience_s = min(tier.patience_s or settings.deadline_s, settings.deadline_s)
        self.breaker = Breaker(BreakerSettings(slow_s=settings.deadline_s))
        self.estimate = TransferEstimate(tier.traits.read_concurrency)
        places = tier.traits.read_concurrency
        self.places = places if self.mapped is not None else min(places, cpu.budget.reads_at_once)
        self._apart = tier.traits.prefetches_apart and not cpu.on_device and self.mapped is None
        self.taken = {READ: 0, PREFETCH: 0}
        """Places that are taken, by purpose."""
        self.turns = Turns(self._take_place, lambda _, purpose: self._leave(purpose))
        """Waiters for a place."""
        self.reads = TierReadStatistics()
        self._begun: dict[asyncio.Task[_Outcome], float] = {}
        """Reads in flight and the times at which they began, the oldest first; without prefetches that give way, since
        their duration says nothing about the tier."""
        self._late: dict[ChunkKey, _Read] = {}
        """Reads that outlived all callers, by key."""
        self._stuck: set[asyncio.Task[_Outcome]] = set()
        self._closed = False

    @property
    def abandoned(self) -> Sequence[asyncio.Task[_Outcome]]:
        """Reads that outlived their deadline and still hold a slot."""
        return list(self._stuck)

    def close(self) -> None:
        """Keep nothing of what still comes."""
        self._closed = True

    # Whether to go there

    def may_have(self, key: ChunkKey) -> bool:
        """Return True if the tier may have the chunk, and it is not being removed there."""
        return not self.tier.traffic.refuses(key) and (self.tier.traits.shared or self.tier.contains(key))

    def would_serve(self, chunks: int) -> bool:
        """Return True if the tier is well, and loading so many chunks is quicker than computing them."""
        now_s = asyncio.get_running_loop().time()
        return self._worthwhile(chunks, now_s) and self.breaker.would_allow(now_s)

    def serves(self, chunks: int, *, question: bool = False) -> bool:
        """As `would_serve`, of a read or a look-up that begins now. If it is the probe of an open breaker, the breaker must
        hear of its end."""
        now_s = asyncio.get_running_loop().time()
        return self._worthwhile(chunks, now_s) and self.breaker.allows(now_s, question=question)

    def _worthwhile(self, chunks: int, now_s: float) -> bool:
        oldest_s = now_s - next(iter(self._begun.values()), now_s)
        return self.estimate.worthwhile(chunks, self.settings.recompute_s, now_s, oldest_s)

    def lasting_s(self, chunks: int) -> float | None:
        """Return the seconds that a demand read of so many chunks should take, behind those in flight; None: not known."""
        return self.estimate.lasting_s(chunks, self.taken[READ] + len(self.turns.waiting[READ]))

    def _until_s(self, deadline_s: float, began_s: float) -> float:
        """Return the time at which to go on with the next tier."""
        return min(deadline_s, began_s + self.patience_s)

    def _timed_out(self, began_s: float, enough_s: float = _LEAST_S, *, question: bool = False) -> None:
        """Count that there was no answer since `began_s`. A wait that is shorter than a second (or `enough_s`, where that is
        less) does not count against the tier: a caller that gives up soon says nothing about it."""
        now_s = asyncio.get_running_loop().time()
        least_s = min(enough_s, _LEAST_S, self.patience_s)
        if now_s - began_s >= 0.99 * least_s:  # a timer may be early by its resolution
            self.breaker.failed(now_s, began_s=began_s, question=question)
        else:
            self._called_off(began_s)

    def _called_off(self, began_s: float) -> None:
        """Tell the breaker that what began then proved nothing: the next operation may be the probe."""
        self.breaker.abandoned(asyncio.get_running_loop().time(), began_s)

    # Asking

    def ask(self, keys: Sequence[ChunkKey], deadline_s: float) -> asyncio.Task[int | None]:
        """Ask as `Tier.probe`, by the deadline; None when there was no answer. The breaker hears of it.

        A cancelled question, also one that has not begun, leaves the probe to the next one.
        """
        return self._asking(partial(self.tier.probe, keys), deadline_s)

    def ask_each(self, keys: Sequence[ChunkKey], deadline_s: float) -> asyncio.Task[list[bool] | None]:
        """As `ask`, of each key by itself (`Tier.probe_each`)."""
        return self._asking(partial(self.tier.probe_each, keys), deadline_s)

    def _asking(self, question: Callable[[], Awaitable[_Answer]], deadline_s: float) -> asyncio.Task[_Answer | None]:
        began_s = asyncio.get_running_loop().time()
        task = asyncio.create_task(self._ask(question, deadline_s), name="tiercache-ask")
        task.add_done_callback(lambda ended: self._called_off(began_s) if ended.cancelled() else None)
        return task

    async def _ask(self, question: Callable[[], Awaitable[_Answer]], deadline_s: float) -> _Answer | None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        asking = asyncio.current_task()
        self.tier.traffic.asks(asking)
        try:
            async with asyncio.timeout_at(self._until_s(deadline_s, began_s)):
                found = await question()
        except TimeoutError:
            # Every look-up ends at this deadline: where it is short, nothing longer would ever count.
            self._timed_out(began_s, self.settings.probe_deadline_s, question=True)
            return None
        except Exception as error:
            self.breaker.failed(loop.time(), began_s=began_s, question=True)
            logger.warning("%s: could not be asked what it has: %s", self.name, error)
            return None
        finally:
            self.tier.traffic.asked(asking)
        self.breaker.answered(loop.time())
        return found

    # Reading

    async def read(self, request: InFlight) -> Lease | None:
        """Bring the chunk if the tier has it, by the deadlines of the tier and of the waiters. After those, and when this is
        cancelled, the read goes on alone."""
        if request.forgotten or not self.may_have(request.key):
            return None
        late = self._late.get(request.key)
        if late is not None and not late.operation.forgot(request.key):
            landed = await self._join_late(late, request)
        else:
            landed = await self._read(request)
        if landed is not None:
            self.counters.hits[self.name] += 1
        return landed

    async def _read(self, request: InFlight) -> Lease | None:
        if not self.serves(self.estimate.concurrency):
            return None
        began_s = asyncio.get_running_loop().time()
        read = None
        try:
            read = await self._begin(request)
        finally:
            if read is None:
                self._called_off(began_s)
        return None if read is None else await self._land(read, request)

    async def _begin(self, request: InFlight) -> _Read | None:
        """Begin to read once there is a place at the tier and a slot to read into; None when there is none in time."""
        key, purpose, tier = request.key, request.purpose, self.tier
        slot, placed, needs_slot = None, False, self.mapped is None
        try:
            if purpose is PREFETCH and needs_slot:
                # Before the place: while it waits for room it must not hold up demand reads.
                slot = await self._slot(request)
                if slot is None:
                    return None
            placed = await self._place(request)
            if placed and slot is None and needs_slot:
                slot = self.cpu.try_reserve(purpose, self.name, key)
                if slot is None and self.cpu.turns.stands_aside(purpose, key):
                    # A tenant at its quota waits for itself, and others do not wait for the place that it would have.
                    self._leave(purpose)
                    placed = False
                    slot = await self._slot(request)
                    placed = slot is not None and await self._place(request)
                elif slot is None:
                    slot = await self._slot(request)
            if not placed or (slot is None and needs_slot) or request.forgotten or not self.may_have(key):
                return None
            task = asyncio.create_task(self._bring(key, slot, purpose))
            if purpose is READ or not self._apart:
                self._begun[task] = asyncio.get_running_loop().time()
            begun = _Read(key, slot, purpose, request.parent, request.time, self.cpu.tombstones.begin(), task)
            slot, placed = None, False
        finally:
            if slot is not None:
                self.cpu.abandon(slot, purpose)
            if placed:
                self._leave(purpose)
        tier.traffic.begin(key)
        self.reads.reading += 1
        request.begun = True
        return begun

    def _bring(self, key: ChunkKey, slot: Slot | None, purpose: Purpose) -> Coroutine[Any, Any, _Outcome]:
        tier = self.tier
        if slot is None:
            assert self.mapped is not None
            return self.mapped.map(key, purpose)
        view = self.cpu.pool.view(slot)
        if self.cpu.on_device and isinstance(tier, DeviceTier):
            return tier.read_device(key, view)
        return tier.prefetch(key, view) if purpose is PREFETCH else tier.read(key, view)

    async def _slot(self, request: InFlight) -> Slot | None:
        slot = self.cpu.try_reserve(request.purpose, self.name, request.key)
        if slot is None:
            slot = await self.cpu.turns.wait(request.purpose, lambda: request.deadline_s, self.name, request.key)
        return slot

    async def _place(self, request: InFlight) -> bool:
        began_s = asyncio.get_running_loop().time()
        came = await self.turns.wait(request.purpose, lambda: self._until_s(request.deadline_s, began_s))
        if came is None and request.purpose is READ and self._is_full:
            # All places taken for a whole deadline: the tier hangs, though this read never reached it. A prefetch proves
            # nothing: others go before it. Nor does a place whose owner waits for memory.
            self._timed_out(began_s)
        return came is not None

    @property
    def _is_full(self) -> bool:
        """True if it is busy with as many reads as it takes on."""
        return len(self._begun) >= self.places or self.reads.reading >= self.cpu.budget.reads_at_once

    def _take_place(self, purpose: Purpose, *_: object) -> bool | None:
        """Return True if there was a place for that purpose, which is taken now."""
        demand = self.taken[READ] or self.turns.waiting[READ]
        places, taken = self.places, sum(self.taken.values())
        if purpose is READ and self._apart:
            if taken >= self.cpu.budget.reads_at_once:
                return None
            taken = self.taken[READ]
        if taken >= places or (purpose is PREFETCH and demand and self.taken[PREFETCH]):
            return None
        self.taken[purpose] += 1
        return True

    def _leave(self, purpose: Purpose) -> None:
        """Give a place back."""
        self.taken[purpose] -= 1
        self.turns.serve()

    async def _land(self, read: _Read, request: InFlight) -> Lease | None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            in_time = await done_by(read.task, lambda: self._until_s(request.deadline_s, began_s))
        except BaseException:
            self._leave_behind(read)  # also where it has ended by now
            self._called_off(began_s)
            raise
        if not in_time:
            self._leave_behind(read)
            self._timed_out(began_s)
            self.counters.failed += 1
            self.reads.failed += 1
            self.reads.seconds.add(loop.time() - began_s)
            return None
        came, error = self._outcome(read)
        if error is None:
            took_s = loop.time() - began_s
            self.breaker.succeeded(loop.time(), took_s)
            if came is not None:
                self.reads.seconds.add(took_s)
        elif isinstance(error, CorruptChunk):
            self._called_off(began_s)  # an answer, which says nothing about the tier's health
        else:
            self.breaker.failed(loop.time(), began_s=began_s)
        return self._end(read, came)

    async def _join_late(self, late: _Read, request: InFlight) -> Lease | None:
        """Wait for an abandoned read of the same key: a second one would take one more slot and place."""
        if not self.would_serve(self.estimate.concurrency):
            return None
        began_s = asyncio.get_running_loop().time()
        late.joined += 1
        try:
            if not await done_by(late.task, lambda: self._until_s(request.deadline_s, began_s)):
                self._timed_out(began_s)
                return None
            self._late_ended(late)
            return None if request.forgotten else (self.mapped or self.cpu).hold(request.key)
        finally:
            late.joined -= 1
            if not late.joined and late.landed is not None:
                late.landed.release()

    def _leave_behind(self, read: _Read) -> None:
        self._stuck.add(read.task)
        self._late[read.key] = read
        read.task.add_done_callback(lambda _: self._late_ended(read))

    def _late_ended(self, read: _Read) -> None:
        """Called by its callback, or by a waiter of its task, which may run before the callback does."""
        if read.task not in self._stuck:
            return
        self._stuck.remove(read.task)
        if self._late.get(read.key) is read:
            del self._late[read.key]
        came, _ = self._outcome(read)
        read.landed = self._end(read, came)
        if read.landed is not None:
            self.counters.kept += 1
            if not read.joined:
                read.landed.release()

    def _outcome(self, read: _Read) -> tuple[_Outcome, BaseException | None]:
        """Return what it brought; or why it failed, which is counted."""
        cancelled = read.task.cancelled()
        error = asyncio.CancelledError("cancelled") if cancelled else read.task.exception()
        if error is None:
            return read.task.result(), None
        self.reads.failed += 1
        if isinstance(error, CorruptChunk):
            self.counters.corrupt += 1
        else:
            self.counters.failed += 1
            logger.warning("%s: a read failed: %s", self.name, error)
        return None, error

    def _end(self, read: _Read, came: _Outcome) -> Lease | None:
        """Give back what a read took, and publish what it brought unless it was forgotten."""
        self._leave(read.purpose)
        self.reads.reading -= 1
        now_s = asyncio.get_running_loop().time()
        began_s = self._begun.pop(read.task, None)
        lease = came if isinstance(came, Lease) else None
        if came is not None and began_s is not None:
            self.estimate.add(now_s - began_s, now_s)  # also of a read that outlived its callers
        unwanted = self._closed or read.operation.forgot(read.key)
        self.cpu.tombstones.end(read.operation)
        if lease is not None and unwanted:
            lease.release()
            lease = None
        if read.slot is not None and isinstance(came, int) and not unwanted:
            if not self.cpu.on_device:
                zero_padding(self.cpu.pool.view(read.slot), came)  # tiers leave there what the slot held before
            lease = self.cpu.publish(read.key, read.slot, came, read.purpose, read.parent, read.time)
        elif read.slot is not None:
            self.cpu.abandon(read.slot, read.purpose)
        self.tier.traffic.end(read.key)
        return lease


EVERY_S = 60.0


class Undelivered:
    """Counts chunks that a caller's memory did not take. Logs the first one at once, and the others once a minute with their
    number, since a caller that is wrong once is wrong again."""

    def __init__(self, counters: ReaderStatistics) -> None:
        self._counters = counters
        self._unsaid = 0
        self._said_s: float | None = None

    def note(self, error: Exception, where: str = "") -> None:
        """Count one chunk, or a part of a batch that failed as a whole. `where` is a phrase for the log line."""
        self._counters.sink_failures += 1
        self._unsaid += 1
        now_s = asyncio.get_running_loop().time()
        if self._said_s is not None and now_s < self._said_s + EVERY_S:
            return
        more = f" ({self._unsaid} times since this was said last)" if self._unsaid > 1 else ""
        logger.warning("a chunk could not be delivered%s: %r%s", where, error, more)
        self._said_s, self._unsaid = now_s, 0


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
        """`cpu` is the tier that chunks are read into: the hot cache, or the staging tier of a device. With `maps`, chunks
        of tiers that can be mapped stay where they are."""
        self.cpu = cpu
        self.settings = settings or ReaderSettings()
        self.mapped = [tier for tier in tiers if maps and isinstance(tier, MappedTier)]
        for tier in self.mapped:
            tier.maps_ahead = True
        cpu.budget.divide(tier.name for tier in tiers if tier not in self.mapped)
        self.counters = ReaderStatistics(hits=dict.fromkeys([cpu.name, *(tier.name for tier in tiers)], 0))
        self.undelivered = Undelivered(self.counters)
        self.tiers = [TierReader(tier, cpu, self.settings, self.counters, maps=maps) for tier in tiers]
        self.in_flight: dict[ChunkKey, InFlight] = {}
        self.on_demand: Callable[[ChunkKey], None] | None = None
        """Called when a caller comes for a chunk that is only being prefetched."""
        self.lanes = max([2, *(tier.traits.read_concurrency + 2 for tier in tiers)])
        """Chunks of one batch that are fetched at a time."""
        self._questions: set[asyncio.Task[Any]] = set()
        """Look-ups that were cancelled and have not ended."""
        self._closed = False

    @property
    def read_concurrency(self) -> int:
        """Chunks that all tiers together take on at a time."""
        return sum(tier.tier.traits.read_concurrency + 2 for tier in self.tiers)

    @property
    def abandoned(self) -> Sequence[asyncio.Task[Any]]:
        """Reads that outlived their deadline and still hold a slot."""
        return [read for tier in self.tiers for read in tier.abandoned]

    def reads(self) -> dict[str, TierReadStatistics]:
        return {tier.name: replace(tier.reads, seconds=tier.reads.seconds.copy()) for tier in self.tiers}

    def breakers(self) -> dict[str, str]:
        return {tier.name: tier.breaker.state.value for tier in self.tiers}

    async def close(self) -> None:
        """End all reads in flight; their waiters get a miss. Does not wait for reads that hang."""
        self._closed = True
        for tier in self.tiers:
            tier.close()
        reads = list(self.in_flight.values())
        tasks = [read.task for read in reads if read.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for read in reads:
            read.end(None)
        self.in_flight.clear()

    # What is in memory

    def lease_now(self, key: ChunkKey, *, noted: bool = False) -> Lease | None:
        """Return a lease on the chunk if it is hot, or mapped. Counts a hit and the access, unless that is `noted` already;
        a miss is not counted."""
        lease = self.cpu.lease(key, noted=noted)
        if lease is not None:
            self.counters.hits[self.cpu.name] += 1
            return lease
        for tier in self.mapped:
            if (lease := tier.lease(key, noted=noted)) is not None:
                self.counters.hits[tier.name] += 1
                return lease
        return None

    def _lease_unserved(self, key: ChunkKey) -> Lease | None:
        """As `lease_now`, of a chunk whose bytes no caller gets, and whose access is counted: no hit."""
        lease = self.cpu.lease(key, noted=True)
        for tier in self.mapped:
            lease = lease or tier.lease(key, noted=True)
        return lease

    def hold(self, key: ChunkKey) -> Lease | None:
        """Pin a chunk that is hot, or mapped, for a future reader; not an access. None when it is neither."""
        lease = self.cpu.hold(key)
        for tier in self.mapped:
            lease = lease or tier.hold(key)
        return lease

    def has_at_hand(self, key: ChunkKey) -> bool:
        """Return True if the chunk is hot, or mapped."""
        return self.cpu.contains(key) or any(key in tier.mappings for tier in self.mapped)

    def prefix_at_hand(self, keys: Sequence[ChunkKey]) -> int:
        """Return how many of `keys`, from the first on without a gap, are hot or mapped."""
        position = self.cpu.prefix(keys)
        while self.mapped and position < len(keys) and self.has_at_hand(keys[position]):
            position += 1
        return position

    # One chunk

    async def fetch(
        self, key: ChunkKey, deadline_s: float, parent: ChunkKey | None = None, time: int | None = None
    ) -> Lease | None:
        """Return a lease on the chunk from whichever tier has it; None on a miss or at the deadline. `parent` is the chunk
        before it in its prefix, if that is known, and `time` the time of this access.

        Cancellation leaves the read to its other waiters, and what it brings to the hot cache.
        """
        return self.lease_now(key) or await self.fetch_cold(key, deadline_s, parent=parent, time=time)

    async def promote(self, key: ChunkKey, deadline_s: float, parent: ChunkKey | None = None) -> Lease | None:
        """As `fetch`, for a future reader: demand reads go first, and the lease is a pin and no access."""
        return self.hold(key) or await self.fetch_cold(key, deadline_s, PREFETCH, parent)

    async def fetch_cold(
        self,
        key: ChunkKey,
        deadline_s: float,
        purpose: Purpose = READ,
        parent: ChunkKey | None = None,
        time: int | None = None,
    ) -> Lease | None:
        """As `fetch`, of a chunk that is not hot."""
        if self._closed:  # a batch that was copying then comes for its next chunk
            self.counters.misses += 1
            return None
        read = self.in_flight.get(key)
        if read is not None and read.forgotten:
            read = None
        if read is not None and read.purpose is PREFETCH and purpose is READ:
            if self.on_demand is not None:
                self.on_demand(key)
            if read.begun:
                for tier in self.tiers:
                    tier.tier.hurry(key)
        if read is not None and (read.begun or purpose is PREFETCH or read.purpose is READ):
            self.counters.joined += 1
            read.deadline_s = max(read.deadline_s, deadline_s)
        elif not any(tier.may_have(key) for tier in self.tiers):
            self.counters.misses += 1
            return None
        else:
            overtaken = read
            read = InFlight(key, self.cpu.tombstones.begin(), purpose, deadline_s, parent, time)
            if overtaken is not None:
                self._overtake(overtaken, read)
            self._begin(read)
        try:
            lease = await read.arrival(purpose, deadline_s)
        except TimeoutError:
            self.counters.late += 1
            return None
        if lease is None:
            self.counters.misses += 1
        return lease

    def _overtake(self, prefetch: InFlight, read: InFlight) -> None:
        """Let `read` take the place of a prefetch that holds nothing yet, and its waiters."""
        self.counters.overtaken += 1
        read.deadline_s = max(read.deadline_s, prefetch.deadline_s)
        read.waiters, prefetch.waiters = prefetch.waiters, []
        assert prefetch.task is not None
        prefetch.task.cancel()

    def _begin(self, read: InFlight) -> None:
        self.in_flight[read.key] = read
        read.task = asyncio.create_task(self._read(read), name="tiercache-read")
        read.task.add_done_callback(lambda _: self.cpu.tombstones.end(read.operation))

    async def _read(self, read: InFlight) -> None:
        landed: Lease | None = None
        try:
            landed = await self._from_tiers(read)
        except Exception:
            logger.exception("a read failed unexpectedly")
        finally:
            if self.in_flight.get(read.key) is read:
                del self.in_flight[read.key]
            read.end(landed)
            if landed is not None:
                landed.release()

    async def _from_tiers(self, read: InFlight) -> Lease | None:
        """Ask one tier after the other. Then ask those to which the chunk has come since they were asked, as a waiter may
        have joined after that."""
        lacked = []
        for tier in self.tiers:
            if not tier.tier.offers(read.key):
                lacked.append(tier)
            if (landed := await tier.read(read)) is not None:
                return landed
        for tier in lacked:
            if tier.tier.offers(read.key) and (landed := await tier.read(read)) is not None:
                return landed
        return None

    # Many chunks

    async def deliver(
        self,
        keys: Sequence[ChunkKey],
        sinks: Sequence[Sink],
        deadline_s: float,
        held: Mapping[ChunkKey, Lease] | None = None,
    ) -> int:
        """Hand each chunk to its sink on a worker thread; return how many of the contiguous prefix were delivered.

        Hot chunks go in one hand-over for each copying thread; the others are read meanwhile. Sinks behind a gap may have
        run. No sink runs after this has returned or raised, but for one that hangs: TierUnavailable says so 30 s after the
        deadline. A sink that raises ends the prefix, and so does one that no thread was free for by the deadline. Chunks
        that are `held` are there whatever happened to them meanwhile, and worth waiting for.
        """
        if held is None and (wait_s := self.worth_waiting_s(keys)) is not None:
            deadline_s = min(deadline_s, asyncio.get_running_loop().time() + wait_s)
        landing = HostMemory(sinks, self.cpu.copiers, self.undelivered.note, deadline_s)
        lease_hot = or_held(partial(self.lease_now, noted=True), held)
        return await deliver(self.cpu, keys, landing, deadline_s, lease_hot, self.fetch, self.lanes)

    async def warm(self, keys: Sequence[ChunkKey], deadline_s: float) -> int:
        """Promote chunks into the hot cache, or map them; return how many of the prefix are there (or were, on arrival)."""
        return await deliver(self.cpu, keys, HotCache(), deadline_s, self._lease_unserved, self.fetch, self.lanes)

    def worth_waiting_s(self, keys: Sequence[ChunkKey]) -> float | None:
        """Return how long to wait for the chunks that are not hot before the engine had better compute what is not there.

        None: nobody knows what computing takes, or no tier is known to have any of them.
        """
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

    # Look-ups

    def where(self, keys: Sequence[ChunkKey]) -> tuple[int, dict[str, int]]:
        """Return what memory knows of the contiguous prefix of `keys`: its length, and its chunks by tier."""
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

        A tier that does not answer costs its own hits only. Tiers from which the engine would compute sooner are not asked.
        """
        position, by_tier = self.where(keys)
        if position == len(keys):
            return position, by_tier
        deadline_s = deadline_s or asyncio.get_running_loop().time() + self.settings.probe_deadline_s
        due = [
            tier for tier in self.tiers if tier.tier.traits.shared and deadline_s > asyncio.get_running_loop().time()
        ]
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
        """Return which of `keys` there are, each by itself. Asks each shared tier once about what memory does not know."""
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
        """Return the keys that memory does not know to be in a tier that is well."""
        well = [tier.tier for tier in self.tiers if tier.would_serve(len(keys))]
        places = [known for tier in (self.cpu, *well) for known in tier.offered()]
        return [key for key in keys if not any(key in known for known in places)]

    def _let_go(self, asked: Iterable[asyncio.Task[Any]]) -> None:
        """Cancel look-ups without waiting: a tier that does not let go of a question would hold its caller."""
        for task in cancel_all(asked):
            self._questions.add(task)
            task.add_done_callback(self._questions.discard)
