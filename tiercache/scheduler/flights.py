"""One chunk through the cascade: one flight a key, however many ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tiercache.core.budget import Purpose
from tiercache.core.keys import ChunkKey
from tiercache.core.under_way import Passage
from tiercache.errors import CorruptChunk
from tiercache.memory.slots import Slot
from tiercache.scheduler.source import Source
from tiercache.tiers.base import Tier
from tiercache.tiers.cpu import CpuTier, Lease

logger = logging.getLogger("tiercache.reader")

ReadCall = Callable[[Any, ChunkKey, Any], Coroutine[Any, Any, int | None]]
"""Tier, key, room for the payload -> the payload's length; as `Tier.read`."""


@dataclass
class ReaderStatistics:
    """In chunks. `joined` asked for a key that was in flight already; `late` gave up at their deadline; `overtaken` are
    prefetches that still waited when somebody came for their chunk; `kept` came too late for who asked first, and is hot."""

    hits: dict[str, int] = field(default_factory=dict)
    misses: int = 0
    joined: int = 0
    overtaken: int = 0
    late: int = 0
    kept: int = 0
    corrupt: int = 0
    failed: int = 0
    sink_failures: int = 0


Arrival = asyncio.Future[Lease | None]


class _Flight:
    __slots__ = ("begun", "deadline_s", "key", "parent", "passage", "purpose", "task", "waiters")

    def __init__(
        self, key: ChunkKey, passage: Passage, purpose: Purpose, deadline_s: float, parent: ChunkKey | None
    ) -> None:
        self.key = key
        self.passage = passage
        self.purpose = purpose
        self.parent = parent
        self.deadline_s = deadline_s
        """The latest of those who wait for it; moves when somebody joins."""
        self.begun = False
        """Whether a tier has begun to read. Until then a prefetch can be overtaken."""
        self.waiters: list[tuple[Arrival, Purpose]] = []
        self.task: asyncio.Task[None] | None = None

    @property
    def forgotten(self) -> bool:
        """Its key was forgotten since it began: it must not land, and nobody who comes later may join it."""
        return self.passage.forgot(self.key)


@dataclass
class _Read:
    """A tier's read into a slot. It belongs to nobody who waits for it: the slot, and the place in the tier's concurrency,
    are taken until it has really ended, and what it brings then is kept."""

    source: Source
    key: ChunkKey
    slot: Slot
    purpose: Purpose
    parent: ChunkKey | None
    passage: Passage
    task: asyncio.Task[int | None]
    joined: int = 0
    """Flights that wait for it though the one that began it has left it behind."""
    landed: Lease | None = None
    """Keeps it until they have it."""


class Flights:
    """All methods belong to the event loop. Deadlines are loop times (`loop.time()`) in seconds.

    Purposes are READ, for somebody who waits, and PREFETCH, for somebody who may come; the lease that one gets is of the
    purpose that one came with.
    """

    def __init__(self, cpu: CpuTier, sources: Sequence[Source], read: ReadCall) -> None:
        self.cpu = cpu
        self.sources = sources
        self.counters = ReaderStatistics(hits={cpu.name: 0} | {source.tier.name: 0 for source in sources})
        self._read = read
        self._flights: dict[ChunkKey, _Flight] = {}
        self._late: dict[tuple[str, ChunkKey], _Read] = {}
        self._stuck: set[asyncio.Task[int | None]] = set()
        self._closed = False
        self.on_demand: Callable[[ChunkKey], None] | None = None
        """Called when somebody comes for a chunk that is only being prefetched."""

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def stuck(self) -> int:
        """Reads that outlived their deadline and still hold a slot."""
        return len(self._stuck)

    @property
    def lingering(self) -> Sequence[asyncio.Task[int | None]]:
        """Those reads."""
        return list(self._stuck)

    async def fetch(
        self,
        key: ChunkKey,
        deadline_s: float,
        purpose: Purpose = Purpose.READ,
        parent: ChunkKey | None = None,
    ) -> Lease | None:
        """A lease on a chunk that is not hot, from whichever tier has it; None on a miss or at the deadline. `parent` is the
        chunk before it in its prefix, if that is known.

        Cancelled, it leaves the flight to the others who wait for it, and to the hot cache.
        """
        if self._closed:  # a batch that was copying then comes for its next chunk
            self.counters.misses += 1
            return None
        flight = self._flights.get(key)
        if flight is not None and flight.forgotten:
            flight = None
        if (
            flight is not None
            and flight.purpose is Purpose.PREFETCH
            and purpose is Purpose.READ
            and self.on_demand is not None
        ):
            self.on_demand(key)
        if flight is not None and (flight.begun or purpose is Purpose.PREFETCH or flight.purpose is Purpose.READ):
            self.counters.joined += 1
            flight.deadline_s = max(flight.deadline_s, deadline_s)
        elif not any(source.may_have(key) for source in self.sources):
            self.counters.misses += 1
            return None
        else:
            flight = self._take_off(key, purpose, deadline_s, parent, overtaken=flight)
        arrival: Arrival = asyncio.get_running_loop().create_future()
        flight.waiters.append((arrival, purpose))
        try:
            async with asyncio.timeout_at(deadline_s):
                lease = await arrival
        except TimeoutError:
            if not arrival.done() or arrival.cancelled():
                self.counters.late += 1
                return None
            lease = arrival.result()  # it came at this very moment
        except BaseException:
            if not arrival.done():
                if not arrival.get_loop().is_closed():
                    arrival.cancel()  # this was closed and not cancelled: it could still come
            elif not arrival.cancelled() and (landed := arrival.result()) is not None:
                landed.release()
            raise
        if lease is None:
            self.counters.misses += 1
        return lease

    async def close(self) -> None:
        """End all flights; whoever waits gets a miss. Does not wait for hung reads."""
        self._closed = True
        flights = list(self._flights.values())
        tasks = [flight.task for flight in flights if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for flight in flights:
            _tell(flight, None, self.cpu)
        self._flights.clear()

    def _take_off(
        self, key: ChunkKey, purpose: Purpose, deadline_s: float, parent: ChunkKey | None, overtaken: _Flight | None
    ) -> _Flight:
        flight = _Flight(key, self.cpu.under_way.begin([key]), purpose, deadline_s, parent)
        if overtaken is not None:
            # It holds nothing yet; who waits for it waits for this one.
            self.counters.overtaken += 1
            flight.deadline_s = max(deadline_s, overtaken.deadline_s)
            flight.waiters, overtaken.waiters = overtaken.waiters, []
            assert overtaken.task is not None
            overtaken.task.cancel()
        self._flights[key] = flight
        flight.task = asyncio.create_task(self._fly(flight), name="tiercache-read")
        flight.task.add_done_callback(lambda _: self.cpu.under_way.end(flight.passage))
        return flight

    async def _fly(self, flight: _Flight) -> None:
        landed: Lease | None = None
        try:
            landed = await self._from_tiers(flight)
        except Exception:
            logger.exception("a read failed in a way that nobody foresaw")
        finally:
            if self._flights.get(flight.key) is flight:
                del self._flights[flight.key]
            _tell(flight, flight.key if landed is not None else None, self.cpu)
            if landed is not None:
                landed.release()

    async def _from_tiers(self, flight: _Flight) -> Lease | None:
        """One tier after the other; then those to which the chunk has come since they were asked, as somebody may have
        joined who came after that."""
        lacked = []
        for source in self.sources:
            if not source.contains(flight.key):
                lacked.append(source)
            if (landed := await self._from_tier(source, flight)) is not None:
                return landed
        for source in lacked:
            if source.contains(flight.key) and (landed := await self._from_tier(source, flight)) is not None:
                return landed
        return None

    async def _from_tier(self, source: Source, flight: _Flight) -> Lease | None:
        landed = None if flight.forgotten else await self._read_from(source, flight)
        if landed is not None:
            self.counters.hits[source.tier.name] += 1
        return landed

    async def _read_from(self, source: Source, flight: _Flight) -> Lease | None:
        key = flight.key
        if not source.may_have(key):
            return None
        late = self._late.get((source.tier.name, key))
        if late is not None and not late.passage.forgot(key):
            return await self._join_late(late, flight)
        if not source.serves(source.estimate.concurrency):
            return None
        began_s = asyncio.get_running_loop().time()
        read = None
        try:
            read = await self._begin_read(source, flight)
        finally:
            if read is None:
                source.called_off(began_s)
        return None if read is None else await self._land(read, flight)

    async def _begin_read(self, source: Source, flight: _Flight) -> _Read | None:
        """Once there is a place in the tier and a slot to read into; None when there is none in time."""
        purpose = flight.purpose
        slot = None
        placed = False
        try:
            if purpose is Purpose.PREFETCH:
                # Before the place: while it waits for room it must not hold up demand reads.
                slot = await self._slot(source, flight)
                if slot is None:
                    return None
            placed = await self._place(source, flight, purpose)
            if placed and slot is None:
                slot = await self._slot(source, flight)
            if not placed or slot is None or flight.forgotten or not source.may_have(flight.key):
                return None
            read = _Read(
                source,
                flight.key,
                slot,
                purpose,
                flight.parent,
                self.cpu.under_way.begin([flight.key]),
                asyncio.create_task(self._read(source.tier, flight.key, self.cpu.pool.view(slot))),
            )
            slot, placed = None, False
        finally:
            if slot is not None:
                self.cpu.abandon(slot, purpose)
            if placed:
                source.places.release(purpose)
        source.tier.traffic.begin(flight.key)
        source.reading += 1
        flight.begun = True
        return read

    async def _place(self, source: Source, flight: _Flight, purpose: Purpose) -> bool:
        began_s = asyncio.get_running_loop().time()
        turn = source.places.request(purpose)
        came = False
        try:
            came = await _came(turn, lambda: source.until_s(flight.deadline_s, began_s))
        finally:
            if not came:
                source.places.withdraw(purpose, turn)
        if not came and purpose is Purpose.READ and source.reading >= source.places.count:
            # All places taken for a whole deadline: the tier hangs, though this read never reached it. A prefetch proves
            # nothing: others go before it. Nor does a place whose owner waits for memory.
            source.waited_in_vain(began_s)
        return came

    async def _slot(self, source: Source, flight: _Flight) -> Slot | None:
        purpose = flight.purpose
        slot = self.cpu.try_reserve(purpose, source.tier.name)
        if slot is not None:
            return slot
        requested = self.cpu.request(purpose, source.tier.name)
        came = False
        try:
            came = await _came(requested, lambda: flight.deadline_s)
        finally:
            if not came:
                self.cpu.withdraw(purpose, requested)
        return requested.result() if came else None

    async def _land(self, read: _Read, flight: _Flight) -> Lease | None:
        """Wait for `read`, as long as the tier and those who wait are patient; then it goes on alone."""
        source, loop = read.source, asyncio.get_running_loop()
        began_s = loop.time()
        try:
            came = await _came(read.task, lambda: source.until_s(flight.deadline_s, began_s))
        except BaseException:
            self._leave_behind(read)  # also where it has ended by now
            source.called_off(began_s)
            raise
        if not came:
            self._leave_behind(read)
            source.waited_in_vain(began_s)
            self.counters.failed += 1
            return None
        error = _error_of(read.task)
        length = self._outcome(read)
        if error is None:
            took_s = loop.time() - began_s
            source.breaker.succeeded(loop.time(), took_s)
            if length is not None:
                source.estimate.add(took_s, loop.time())
        elif isinstance(error, CorruptChunk):
            source.called_off(began_s)  # an answer, which says nothing about the tier's health
        else:
            source.breaker.failed(loop.time(), began_s=began_s)
        return self._end(read, length)

    async def _join_late(self, late: _Read, flight: _Flight) -> Lease | None:
        """Somebody's read that he did not wait for is still under way: one more would take one more slot and place."""
        source = late.source
        if not source.would_serve(source.estimate.concurrency):
            return None
        began_s = asyncio.get_running_loop().time()
        late.joined += 1
        try:
            if not await _came(late.task, lambda: source.until_s(flight.deadline_s, began_s)):
                source.waited_in_vain(began_s)
                return None
            self._late_ended(late)
            return None if flight.forgotten else self.cpu.hold(flight.key)
        finally:
            late.joined -= 1
            if not late.joined and late.landed is not None:
                late.landed.release()

    def _leave_behind(self, read: _Read) -> None:
        self._stuck.add(read.task)
        self._late[read.source.tier.name, read.key] = read
        read.task.add_done_callback(lambda _: self._late_ended(read))

    def _late_ended(self, read: _Read) -> None:
        """By whoever comes to it first: those who wait for its task may run before its callbacks do."""
        if read.task not in self._stuck:
            return
        self._stuck.remove(read.task)
        where = (read.source.tier.name, read.key)
        if self._late.get(where) is read:
            del self._late[where]
        read.landed = self._end(read, self._outcome(read))
        if read.landed is not None:
            self.counters.kept += 1
            if not read.joined:
                read.landed.release()

    def _outcome(self, read: _Read) -> int | None:
        """The payload's length; None on a miss and on a failure, which is counted."""
        error = _error_of(read.task)
        if error is None:
            return read.task.result()
        if isinstance(error, CorruptChunk):
            self.counters.corrupt += 1
        else:
            self.counters.failed += 1
            logger.warning("%s: a read failed: %s", read.source.tier.name, error)
        return None

    def _end(self, read: _Read, length: int | None) -> Lease | None:
        """Give back what a read took that has ended, and make what it brought a hot chunk, unless it was forgotten."""
        read.source.places.release(read.purpose)
        read.source.reading -= 1
        self.cpu.under_way.end(read.passage)
        lease = None
        if length is None or self._closed or read.passage.forgot(read.key):
            self.cpu.abandon(read.slot, read.purpose)
        else:
            lease = self.cpu.publish(read.key, read.slot, length, read.purpose, read.parent)
        read.source.tier.traffic.end(read.key)
        return lease


async def _came(awaited: asyncio.Future[Any], until_s: Callable[[], float]) -> bool:
    """Whether `awaited` is done by a time that may move while one waits. Cancelled, it leaves it alone."""
    loop = asyncio.get_running_loop()
    while not awaited.done() and (left_s := until_s() - loop.time()) > 0:
        await asyncio.wait([awaited], timeout=left_s)
    return awaited.done()


def _error_of(task: asyncio.Task[Any]) -> BaseException | None:
    return asyncio.CancelledError("cancelled") if task.cancelled() else task.exception()


def read_into_host(tier: Tier, key: ChunkKey, into: np.ndarray) -> Coroutine[Any, Any, int | None]:
    """How chunks get into the hot cache."""
    return tier.read(key, into)


def _tell(flight: _Flight, key: ChunkKey | None, cpu: CpuTier) -> None:
    """Give everybody who waits a lease of their own on the chunk, or None.

    What was read because somebody asked came in with that use: it is not counted a second time.
    """
    noted = flight.purpose is Purpose.READ
    for arrival, purpose in flight.waiters:
        if not arrival.done():
            lease = None
            if key is not None:
                if purpose is Purpose.PREFETCH:
                    lease = cpu.hold(key)
                else:
                    lease = cpu.lease(key, noted=noted)
                    noted = False
            arrival.set_result(lease)
