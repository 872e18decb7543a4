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
    prefetches that still waited when somebody came for their chunk."""

    hits: dict[str, int] = field(default_factory=dict)
    misses: int = 0
    joined: int = 0
    overtaken: int = 0
    late: int = 0
    corrupt: int = 0
    failed: int = 0
    sink_failures: int = 0


Arrival = asyncio.Future[Lease | None]


class _Flight:
    __slots__ = ("begun", "deadline_s", "parent", "purpose", "task", "waiters")

    def __init__(self, purpose: Purpose, deadline_s: float, parent: ChunkKey | None) -> None:
        self.purpose = purpose
        self.parent = parent
        self.deadline_s = deadline_s
        self.begun = False
        """Whether a tier has begun to read. Until then a prefetch can be overtaken."""
        self.waiters: list[tuple[Arrival, Purpose]] = []
        self.task: asyncio.Task[None] | None = None


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
        self._stuck: set[asyncio.Task[int | None]] = set()
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
        flight = self._flights.get(key)
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
            if arrival.done() and not arrival.cancelled() and (landed := arrival.result()) is not None:
                landed.release()
            raise
        if lease is None:
            self.counters.misses += 1
        return lease

    async def close(self) -> None:
        """End all flights; whoever waits gets a miss. Does not wait for hung reads."""
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
        flight = _Flight(purpose, deadline_s, parent)
        if overtaken is not None:
            # It holds nothing yet; who waits for it waits for this one.
            self.counters.overtaken += 1
            flight.deadline_s = max(deadline_s, overtaken.deadline_s)
            flight.waiters, overtaken.waiters = overtaken.waiters, []
            assert overtaken.task is not None
            overtaken.task.cancel()
        self._flights[key] = flight
        flight.task = asyncio.create_task(self._fly(key, flight), name="tiercache-read")
        return flight

    async def _fly(self, key: ChunkKey, flight: _Flight) -> None:
        landed: Lease | None = None
        try:
            for source in self.sources:
                landed = await self._read_from(source, key, flight)
                if landed is not None:
                    self.counters.hits[source.tier.name] += 1
                    break
        except Exception:
            logger.exception("a read failed in a way that nobody foresaw")
        finally:
            if self._flights.get(key) is flight:
                del self._flights[key]
            _tell(flight, key if landed is not None else None, self.cpu)
            if landed is not None:
                landed.release()

    async def _read_from(self, source: Source, key: ChunkKey, flight: _Flight) -> Lease | None:
        loop = asyncio.get_running_loop()
        if not source.may_have(key) or not source.serves(source.estimate.concurrency):
            return None
        purpose = flight.purpose
        slot = None
        began_s = loop.time()
        if purpose is Purpose.PREFETCH:
            # Before the place: while it waits for room it must not hold up demand reads.
            slot = await self._slot(flight)
            if slot is None:
                source.called_off(began_s)
                return None
        began_s = loop.time()
        try:
            async with asyncio.timeout_at(source.until_s(flight.deadline_s)):
                await source.places.acquire(purpose)
        except TimeoutError:
            if slot is not None:
                self.cpu.abandon(slot, purpose)
            # All places taken for a whole deadline: the tier hangs, though this read never reached it. A prefetch proves
            # nothing: others go before it.
            if purpose is Purpose.READ:
                source.waited_in_vain(began_s)
            else:
                source.called_off(began_s)
            return None
        except BaseException:
            if slot is not None:
                self.cpu.abandon(slot, purpose)
            raise
        try:
            if slot is None:
                slot = await self._slot(flight)
        finally:
            if slot is None:
                source.places.release(purpose)
                source.called_off(began_s)
        if slot is None:
            return None
        flight.begun = True
        began_s = loop.time()
        read = asyncio.create_task(self._read(source.tier, key, self.cpu.pool.view(slot)))
        try:
            await asyncio.wait([read], timeout=max(0.0, source.until_s(flight.deadline_s) - loop.time()))
        finally:
            if not read.done():
                self._leave_behind(read, slot, purpose, source)
        if not read.done():
            source.waited_in_vain(began_s)
            self.counters.failed += 1
            return None
        source.places.release(purpose)
        try:
            length = read.result()
        except CorruptChunk:
            self.counters.corrupt += 1
            length = None
        except Exception as error:
            source.breaker.failed(loop.time(), began_s=began_s)
            self.counters.failed += 1
            logger.warning("%s: a read failed: %s", source.tier.name, error)
            length = None
        else:
            took_s = loop.time() - began_s
            source.breaker.succeeded(loop.time(), took_s)
            if length is not None:
                source.estimate.add(took_s, loop.time())
        if length is None:
            self.cpu.abandon(slot, purpose)
            return None
        return self.cpu.publish(key, slot, length, purpose, flight.parent)

    async def _slot(self, flight: _Flight) -> Slot | None:
        slot = self.cpu.try_reserve(flight.purpose)
        if slot is not None:
            return slot
        return await self.cpu.reserve(flight.purpose, flight.deadline_s - asyncio.get_running_loop().time())

    def _leave_behind(self, read: asyncio.Task[int | None], slot: Slot, purpose: Purpose, source: Source) -> None:
        """The slot, and the place in the tier's concurrency, stay taken until the thread is really done."""

        def ended(task: asyncio.Task[int | None]) -> None:
            self._stuck.discard(task)
            if not task.cancelled():
                task.exception()
            source.places.release(purpose)
            self.cpu.abandon(slot, purpose)

        self._stuck.add(read)
        read.add_done_callback(ended)


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
