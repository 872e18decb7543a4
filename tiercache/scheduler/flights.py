"""One chunk through the cascade: one flight a key, however many ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from tiercache.core.budget import Purpose
from tiercache.core.keys import ChunkKey
from tiercache.scheduler.flight import Flight
from tiercache.scheduler.reads import ReaderStatistics
from tiercache.scheduler.tier_reader import TierReader
from tiercache.tiers.cpu import CpuTier
from tiercache.tiers.leases import Lease

logger = logging.getLogger("tiercache.reader")


class Flights:
    """A flight walks the tiers in a task of its own, which belongs to nobody who waits for it. Chunks land in `cpu`."""

    def __init__(self, cpu: CpuTier, tiers: Sequence[TierReader], counters: ReaderStatistics) -> None:
        self.cpu = cpu
        self.tiers = tiers
        self.counters = counters
        self._flights: dict[ChunkKey, Flight] = {}
        self._closed = False
        self.on_demand: Callable[[ChunkKey], None] | None = None
        """Called when somebody comes for a chunk that is only being prefetched."""

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def abandoned(self) -> Sequence[asyncio.Task[Any]]:
        """Reads that outlived their deadline and still hold a slot."""
        return [read for tier in self.tiers for read in tier.abandoned]

    async def fetch(
        self,
        key: ChunkKey,
        deadline_s: float,
        purpose: Purpose = Purpose.READ,
        parent: ChunkKey | None = None,
        time: int | None = None,
    ) -> Lease | None:
        """A lease on a chunk that is not hot, from whichever tier has it; None on a miss or at the deadline. `parent` is the
        chunk before it in its prefix, if that is known, and `time` the time of this access.

        Cancelled, it leaves the flight to the others who wait for it, and to the hot cache.
        """
        if self._closed:  # a batch that was copying then comes for its next chunk
            self.counters.misses += 1
            return None
        flight = self._flights.get(key)
        if flight is not None and flight.forgotten:
            flight = None
        if flight is not None and flight.purpose is Purpose.PREFETCH and purpose is Purpose.READ:
            if self.on_demand is not None:
                self.on_demand(key)
            if flight.begun:
                for tier in self.tiers:
                    tier.tier.hurry(key)
        if flight is not None and (flight.begun or purpose is Purpose.PREFETCH or flight.purpose is Purpose.READ):
            self.counters.joined += 1
            flight.deadline_s = max(flight.deadline_s, deadline_s)
        elif not any(tier.may_have(key) for tier in self.tiers):
            self.counters.misses += 1
            return None
        else:
            flight = self._take_off(Flight(key, self.cpu.tombstones.begin(), purpose, deadline_s, parent, time), flight)
        try:
            lease = await flight.arrival(purpose, deadline_s)
        except TimeoutError:
            self.counters.late += 1
            return None
        if lease is None:
            self.counters.misses += 1
        return lease

    async def close(self) -> None:
        """End all flights; whoever waits gets a miss. Does not wait for hung reads."""
        self._closed = True
        for tier in self.tiers:
            tier.close()
        flights = list(self._flights.values())
        tasks = [flight.task for flight in flights if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for flight in flights:
            flight.end(None)
        self._flights.clear()

    def _take_off(self, flight: Flight, overtaken: Flight | None) -> Flight:
        if overtaken is not None:
            # It holds nothing yet; who waits for it waits for this one.
            self.counters.overtaken += 1
            flight.deadline_s = max(flight.deadline_s, overtaken.deadline_s)
            flight.waiters, overtaken.waiters = overtaken.waiters, []
            assert overtaken.task is not None
            overtaken.task.cancel()
        self._flights[flight.key] = flight
        flight.task = asyncio.create_task(self._fly(flight), name="tiercache-read")
        flight.task.add_done_callback(lambda _: self.cpu.tombstones.end(flight.operation))
        return flight

    async def _fly(self, flight: Flight) -> None:
        landed: Lease | None = None
        try:
            landed = await self._from_tiers(flight)
        except Exception:
            logger.exception("a read failed unexpectedly")
        finally:
            if self._flights.get(flight.key) is flight:
                del self._flights[flight.key]
            flight.end(landed)
            if landed is not None:
                landed.release()

    async def _from_tiers(self, flight: Flight) -> Lease | None:
        """One tier after the other; then those to which the chunk has come since they were asked, as somebody may have
        joined who came after that."""
        lacked = []
        for tier in self.tiers:
            if not tier.tier.offers(flight.key):
                lacked.append(tier)
            if (landed := await tier.read(flight)) is not None:
                return landed
        for tier in lacked:
            if tier.tier.offers(flight.key) and (landed := await tier.read(flight)) is not None:
                return landed
        return None
