"""A tier as the cascade reads it: whether it is well and quick enough, how many reads it takes on, and what they bring."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tiercache.core.breaker import Breaker, BreakerSettings
from tiercache.core.budget import PREFETCH, READ, Purpose
from tiercache.core.estimate import TransferEstimate
from tiercache.core.keys import ChunkKey
from tiercache.core.tombstones import Operation
from tiercache.errors import CorruptChunk
from tiercache.memory.slots import Slot, zero_padding
from tiercache.memory.turns import Turns, done_by
from tiercache.scheduler.flight import Flight
from tiercache.scheduler.reads import ReaderSettings, ReaderStatistics, TierReadStatistics
from tiercache.tiers.base import DeviceTier, MappedTier, Tier
from tiercache.tiers.cpu import CpuTier
from tiercache.tiers.leases import Lease

logger = logging.getLogger("tiercache.reader")

_LEAST_S = 1.0
_Answer = TypeVar("_Answer")


_Outcome = int | Lease | None
"""The length of what was read into a slot, the lease on what was mapped, or a miss."""


@dataclass
class _Read:
    """Into a slot. It belongs to nobody who waits for it: the slot, and the place at the tier, are taken until it has really
    ended, and what it brings then is kept."""

    key: ChunkKey
    slot: Slot | None
    """None: the chunk is mapped where it lies."""
    purpose: Purpose
    parent: ChunkKey | None
    time: int | None
    operation: Operation
    task: asyncio.Task[_Outcome]
    joined: int = 0
    """Flights that wait for it since it was left behind."""
    landed: Lease | None = None
    """Keeps what it brought until they have their own."""


class TierReader:
    """Health of its own: a tier that is down, hung or slow costs its own hits and no others.

    Its places go to demand reads first. While a demand read has one, no more than one prefetch at a time begins: what a tier
    has to give is shared by all that it reads at a time, so each one that runs makes the demand read longer. (Measured with
    six in flight: a demand read takes half as long as among prefetches that go on. Fewer prefetches at all times cost
    throughput and gained little.) Where prefetches are apart, those that run give way, and reads have places of their own.
    """

    def __init__(
        self, tier: Tier, cpu: CpuTier, settings: ReaderSettings, counters: ReaderStatistics, *, maps: bool = False
    ) -> None:
        """`cpu` is where it reads to: how much of that its reads may fill at a time, or hang in, bounds them. `maps`: the
        tier's chunks are mapped instead."""
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
        """Places."""
        self.turns = Turns(self._take_place, lambda _, purpose: self._leave(purpose))
        """Of those who wait for a place."""
        self.reads = TierReadStatistics()
        self._begun: dict[asyncio.Task[_Outcome], float] = {}
        """Reads under way, the oldest first, and since when. Not those that stand still for others: what they take says
        nothing about the tier."""
        self._late: dict[ChunkKey, _Read] = {}
        """Those that nobody waited for to the end."""
        self._stuck: set[asyncio.Task[_Outcome]] = set()
        self._closed = False

    @property
    def abandoned(self) -> Sequence[asyncio.Task[_Outcome]]:
        """Reads that outlived their deadline and still hold a slot."""
        return list(self._stuck)

    def close(self) -> None:
        """What still comes is not kept."""
        self._closed = True

    # Whether to go there

    def may_have(self, key: ChunkKey) -> bool:
        """Not while a chunk is being removed from it."""
        return not self.tier.traffic.refuses(key) and (self.tier.traits.shared or self.tier.contains(key))

    def would_serve(self, chunks: int) -> bool:
        """Whether the tier is well, and quicker than the engine for so many chunks."""
        now_s = asyncio.get_running_loop().time()
        return self._worthwhile(chunks, now_s) and self.breaker.would_allow(now_s)

    def serves(self, chunks: int, *, question: bool = False) -> bool:
        """As `would_serve`, of somebody who goes there now, to read or with a question: if he is let through to find out
        whether the tier is well, the breaker has to hear of it."""
        now_s = asyncio.get_running_loop().time()
        return self._worthwhile(chunks, now_s) and self.breaker.allows(now_s, question=question)

    def _worthwhile(self, chunks: int, now_s: float) -> bool:
        oldest_s = now_s - next(iter(self._begun.values()), now_s)
        return self.estimate.worthwhile(chunks, self.settings.recompute_s, now_s, oldest_s)

    def lasting_s(self, chunks: int) -> float | None:
        """What a demand read of so many chunks should take as it is now, behind those that are there; None: not known."""
        return self.estimate.lasting_s(chunks, self.taken[READ] + len(self.turns.waiting[READ]))

    def _until_s(self, deadline_s: float, began_s: float) -> float:
        """When to go on with the next tier, having begun then."""
        return min(deadline_s, began_s + self.patience_s)

    def _timed_out(self, began_s: float, enough_s: float = _LEAST_S, *, question: bool = False) -> None:
        """No answer since `began_s`; `enough_s` is the wait that counts where it is shorter than the usual least. Shorter
        ones do not count against the tier: a caller who gives up soon says nothing about it."""
        now_s = asyncio.get_running_loop().time()
        least_s = min(enough_s, _LEAST_S, self.patience_s)
        if now_s - began_s >= 0.99 * least_s:  # a timer may be early by its resolution
            self.breaker.failed(now_s, began_s=began_s, question=question)
        else:
            self._called_off(began_s)

    def _called_off(self, began_s: float) -> None:
        """Whoever went there then never came to it, or gave up soon: another one may find out whether the tier is well."""
        self.breaker.abandoned(asyncio.get_running_loop().time(), began_s)

    # Asking

    def ask(self, keys: Sequence[ChunkKey], deadline_s: float) -> asyncio.Task[int | None]:
        """As `Tier.probe`, by the deadline; None when there was no answer. The breaker hears of it.

        Cancelled, also before its first step, it leaves it to the next one to find out whether the tier is well.
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

    async def read(self, flight: Flight) -> Lease | None:
        """Bring the chunk if the tier has it, as long as the tier and those who wait are patient. Then, and when this is
        cancelled, the read goes on alone."""
        if flight.forgotten or not self.may_have(flight.key):
            return None
        late = self._late.get(flight.key)
        if late is not None and not late.operation.forgot(flight.key):
            landed = await self._join_late(late, flight)
        else:
            landed = await self._read(flight)
        if landed is not None:
            self.counters.hits[self.name] += 1
        return landed

    async def _read(self, flight: Flight) -> Lease | None:
        if not self.serves(self.estimate.concurrency):
            return None
        began_s = asyncio.get_running_loop().time()
        read = None
        try:
            read = await self._begin(flight)
        finally:
            if read is None:
                self._called_off(began_s)
        return None if read is None else await self._land(read, flight)

    async def _begin(self, flight: Flight) -> _Read | None:
        """Once there is a place at the tier and a slot to read into; None when there is none in time."""
        key, purpose, tier = flight.key, flight.purpose, self.tier
        slot, placed, needs_slot = None, False, self.mapped is None
        try:
            if purpose is PREFETCH and needs_slot:
                # Before the place: while it waits for room it must not hold up demand reads.
                slot = await self._slot(flight)
                if slot is None:
                    return None
            placed = await self._place(flight)
            if placed and slot is None and needs_slot:
                slot = self.cpu.try_reserve(purpose, self.name, key)
                if slot is None and self.cpu.turns.stands_aside(purpose, key):
                    # A tenant at his quota waits for himself, and others do not wait for the place that he would have.
                    self._leave(purpose)
                    placed = False
                    slot = await self._slot(flight)
                    placed = slot is not None and await self._place(flight)
                elif slot is None:
                    slot = await self._slot(flight)
            if not placed or (slot is None and needs_slot) or flight.forgotten or not self.may_have(key):
                return None
            task = asyncio.create_task(self._bring(key, slot, purpose))
            if purpose is READ or not self._apart:
                self._begun[task] = asyncio.get_running_loop().time()
            begun = _Read(key, slot, purpose, flight.parent, flight.time, self.cpu.tombstones.begin(), task)
            slot, placed = None, False
        finally:
            if slot is not None:
                self.cpu.abandon(slot, purpose)
            if placed:
                self._leave(purpose)
        tier.traffic.begin(key)
        self.reads.reading += 1
        flight.begun = True
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

    async def _slot(self, flight: Flight) -> Slot | None:
        slot = self.cpu.try_reserve(flight.purpose, self.name, flight.key)
        if slot is None:
            slot = await self.cpu.turns.wait(flight.purpose, lambda: flight.deadline_s, self.name, flight.key)
        return slot

    async def _place(self, flight: Flight) -> bool:
        began_s = asyncio.get_running_loop().time()
        came = await self.turns.wait(flight.purpose, lambda: self._until_s(flight.deadline_s, began_s))
        if came is None and flight.purpose is READ and self._is_full:
            # All places taken for a whole deadline: the tier hangs, though this read never reached it. A prefetch proves
            # nothing: others go before it. Nor does a place whose owner waits for memory.
            self._timed_out(began_s)
        return came is not None

    @property
    def _is_full(self) -> bool:
        """Whether it is busy with as many reads as it takes on."""
        return len(self._begun) >= self.places or self.reads.reading >= self.cpu.budget.reads_at_once

    def _take_place(self, purpose: Purpose, *_: object) -> bool | None:
        """True if there is one for that purpose by now."""
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

    async def _land(self, read: _Read, flight: Flight) -> Lease | None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            in_time = await done_by(read.task, lambda: self._until_s(flight.deadline_s, began_s))
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

    async def _join_late(self, late: _Read, flight: Flight) -> Lease | None:
        """Somebody's read that he did not wait for is still under way: one more would take one more slot and place."""
        if not self.would_serve(self.estimate.concurrency):
            return None
        began_s = asyncio.get_running_loop().time()
        late.joined += 1
        try:
            if not await done_by(late.task, lambda: self._until_s(flight.deadline_s, began_s)):
                self._timed_out(began_s)
                return None
            self._late_ended(late)
            return None if flight.forgotten else (self.mapped or self.cpu).hold(flight.key)
        finally:
            late.joined -= 1
            if not late.joined and late.landed is not None:
                late.landed.release()

    def _leave_behind(self, read: _Read) -> None:
        self._stuck.add(read.task)
        self._late[read.key] = read
        read.task.add_done_callback(lambda _: self._late_ended(read))

    def _late_ended(self, read: _Read) -> None:
        """By whoever comes to it first: those who wait for its task may run before its callbacks do."""
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
        """What it brought; or why it failed, which is counted."""
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
        """Give back what a read took that has ended, and make what it brought a hot chunk, unless it was forgotten."""
        self._leave(read.purpose)
        self.reads.reading -= 1
        now_s = asyncio.get_running_loop().time()
        began_s = self._begun.pop(read.task, None)
        lease = came if isinstance(came, Lease) else None
        if came is not None and began_s is not None:
            self.estimate.add(now_s - began_s, now_s)  # also of one that nobody waited for to its end
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
