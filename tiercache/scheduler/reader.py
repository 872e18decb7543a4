"""The cascade: hot cache, then each tier in order; one flight per key however many ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tiercache.core.budget import Purpose
from tiercache.core.keys import ChunkKey
from tiercache.errors import CorruptChunk
from tiercache.memory.slots import Slot
from tiercache.memory.workers import to_the_end
from tiercache.scheduler.source import ReaderSettings, Source
from tiercache.tiers.base import Tier
from tiercache.tiers.cpu import CpuTier, Lease

logger = logging.getLogger("tiercache.reader")

_LET_GO_S = 0.002
"""What a tier has to let go of a question at its deadline."""

Sink = Callable[[np.ndarray], None]
ReadCall = Callable[[Any, ChunkKey, Any], Coroutine[Any, Any, int | None]]
"""Tier, key, room for the payload -> the payload's length; as `Tier.read`."""


@dataclass
class ReaderStatistics:
    """In chunks. `joined` asked for a key that was in flight already; `late` gave up at their deadline."""

    hits: dict[str, int] = field(default_factory=dict)
    misses: int = 0
    joined: int = 0
    late: int = 0
    corrupt: int = 0
    failed: int = 0
    sink_failures: int = 0


@dataclass(frozen=True)
class Hit:
    """How far a contiguous prefix reaches, and where it lies. `tokens` is 0 where only keys were given."""

    chunks: int
    tokens: int
    by_tier: dict[str, int]
    """Chunks by the first tier of the cascade that has them; together `chunks`."""


class _Flight:
    __slots__ = ("deadline_s", "task", "waiters")

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.waiters: list[asyncio.Future[Lease | None]] = []
        self.task: asyncio.Task[None] | None = None


class Reader:
    """All methods belong to the event loop. Deadlines are loop times (`loop.time()`) in seconds."""

    def __init__(
        self,
        cpu: CpuTier,
        tiers: Sequence[Tier],
        settings: ReaderSettings | None = None,
        read: ReadCall | None = None,
    ) -> None:
        """`cpu` is where chunks land (the hot cache, or the staging tier of a device), `read` how they get there."""
        self.cpu = cpu
        self._read = read or _read_into_host
        self.settings = settings or ReaderSettings()
        self.counters = ReaderStatistics(hits={cpu.name: 0} | {tier.name: 0 for tier in tiers})
        self._sources = [Source(tier, self.settings) for tier in tiers]
        self._flights: dict[ChunkKey, _Flight] = {}
        self._stuck: set[asyncio.Task[int | None]] = set()
        self._questions: set[asyncio.Task[int | None]] = set()
        """Cancelled, and not over yet."""
        self._lanes = max([2, *(tier.traits.read_concurrency + 2 for tier in tiers)])

    @property
    def stuck(self) -> int:
        """Reads that outlived their deadline and still hold a slot."""
        return len(self._stuck)

    def breakers(self) -> dict[str, str]:
        return {source.tier.name: source.breaker.state.value for source in self._sources}

    def lease_now(self, key: ChunkKey) -> Lease | None:
        """The chunk if it is hot. Does not count a miss."""
        lease = self.cpu.lease(key)
        if lease is not None:
            self.counters.hits[self.cpu.name] += 1
        return lease

    async def fetch(self, key: ChunkKey, deadline_s: float) -> Lease | None:
        """A lease on the chunk from whichever tier has it; None on a miss or at the deadline.

        Cancelled, it leaves the flight to the others who wait for it, and to the hot cache.
        """
        lease = self.lease_now(key)
        if lease is not None:
            return lease
        flight = self._flights.get(key)
        if flight is not None:
            self.counters.joined += 1
            flight.deadline_s = max(flight.deadline_s, deadline_s)
        elif not any(source.may_have(key) for source in self._sources):
            self.counters.misses += 1
            return None
        else:
            flight = _Flight(deadline_s)
            self._flights[key] = flight
            flight.task = asyncio.create_task(self._fly(key, flight), name="tiercache-read")
        arrival: asyncio.Future[Lease | None] = asyncio.get_running_loop().create_future()
        flight.waiters.append(arrival)
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

    async def deliver(self, keys: Sequence[ChunkKey], sinks: Sequence[Sink], deadline_s: float) -> int:
        """Hand each chunk to its sink on a worker thread; returns how many of the contiguous prefix were delivered.

        Hot chunks go in one hand-over for each copying thread; the others are read meanwhile. Sinks behind a gap may have
        run. No sink runs after this has returned or raised. A sink that raises ends the prefix.
        """
        delivered = bytearray(len(keys))
        hot = {position: lease for position, key in enumerate(keys) if (lease := self.lease_now(key)) is not None}
        work = [
            asyncio.ensure_future(self._hand_over(part, sinks, delivered))
            for part in _split(list(hot.items()), self.cpu.copiers.threads)
        ]
        if len(hot) < len(keys):
            cold = iter([position for position in range(len(keys)) if position not in hot])
            lanes = min(self._lanes, len(keys) - len(hot))
            gap = [len(keys)]
            work += [
                asyncio.ensure_future(self._lane(cold, keys, sinks, delivered, gap, deadline_s)) for _ in range(lanes)
            ]
        try:
            await all_or_none(work)
        finally:
            # A part that was cancelled before its first step never came to its own clean-up.
            for lease in hot.values():
                lease.release()
        return prefix_of(delivered)

    async def warm(self, keys: Sequence[ChunkKey], deadline_s: float) -> int:
        """Promote chunks into the hot cache; returns how many of the prefix are hot (or were, on arrival)."""
        nothing: list[Sink] = [_discard] * len(keys)
        return await self.deliver(keys, nothing, deadline_s)

    def where(self, keys: Sequence[ChunkKey]) -> tuple[int, dict[str, int]]:
        """What memory knows of the contiguous prefix of `keys`: its length, and its chunks by tier."""
        by_tier = dict.fromkeys(self.counters.hits, 0)
        position = self.cpu.prefix(keys)
        by_tier[self.cpu.name] = position
        if position < len(keys) and self._sources:
            left = len(keys) - position
            well = [source.tier for source in self._sources if self._would_ask(source, left)]
            tiers = [(tier.name, tier.contains) for tier in (self.cpu, *well)]
            for key in keys[position:]:
                for name, contains in tiers:
                    if contains(key):
                        by_tier[name] += 1
                        break
                else:
                    break
                position += 1
        return position, by_tier

    async def lookup(self, keys: Sequence[ChunkKey], deadline_s: float | None = None) -> tuple[int, dict[str, int]]:
        """As `where`, asking shared tiers about what memory does not know, all at once and until the deadline.

        One that does not answer costs its own hits only. Tiers from which the engine would compute sooner are not asked.
        """
        position, by_tier = self.where(keys)
        if position == len(keys):
            return position, by_tier
        deadline_s = deadline_s or asyncio.get_running_loop().time() + self.settings.probe_deadline_s
        due = [source for source in self._sources if source.tier.traits.shared]
        asked: dict[asyncio.Task[int | None], tuple[Source, int]] = {}
        try:
            while position < len(keys):
                for source in due:
                    if self._would_ask(source, len(keys) - position, take_probe=True):
                        task = asyncio.create_task(source.ask(keys[position:], deadline_s), name="tiercache-ask")
                        asked[task] = source, position
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
                ends = [(source, start + found) for source, start, found in answers if found is not None]
                due = [source for source, end in ends if before < position and end < position]
        finally:
            for task in asked:
                task.cancel()
                # Nobody waits for it: a tier that does not let go of a question would hold the look-up.
                self._questions.add(task)
                task.add_done_callback(self._questions.discard)
        return position, by_tier

    def _would_ask(self, source: Source, chunks: int, *, take_probe: bool = False) -> bool:
        """Whether a tier is well, and worth it for so many chunks. `take_probe`: it will be asked now."""
        if source.too_slow(chunks):
            return False
        now_s = asyncio.get_running_loop().time()
        return source.breaker.allows(now_s) if take_probe else source.breaker.would_allow(now_s)

    async def close(self) -> None:
        """End all flights; whoever waits gets a miss. Does not wait for hung reads."""
        tasks = [flight.task for flight in self._flights.values() if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for flight in self._flights.values():
            for arrival in flight.waiters:
                if not arrival.done():
                    arrival.set_result(None)
        self._flights.clear()

    # Flights

    async def _fly(self, key: ChunkKey, flight: _Flight) -> None:
        landed: Lease | None = None
        try:
            for source in self._sources:
                landed = await self._read_from(source, key, flight)
                if landed is not None:
                    self.counters.hits[source.tier.name] += 1
                    break
        except Exception:
            logger.exception("a read failed in a way that nobody foresaw")
        finally:
            del self._flights[key]
            for arrival in flight.waiters:
                if not arrival.done():
                    arrival.set_result(self.cpu.lease(key) if landed is not None else None)
            if landed is not None:
                landed.release()

    async def _read_from(self, source: Source, key: ChunkKey, flight: _Flight) -> Lease | None:
        loop = asyncio.get_running_loop()
        if not source.may_have(key) or not self._would_ask(source, source.estimate.concurrency, take_probe=True):
            return None
        began_s = loop.time()
        try:
            async with asyncio.timeout_at(source.until_s(flight.deadline_s)):
                await source.places.acquire()
        except TimeoutError:
            # All places taken for a whole deadline: the tier hangs, though this read never reached it.
            source.waited_in_vain(began_s)
            return None
        slot = await self._slot(flight)
        if slot is None:
            source.places.release()
            return None
        began_s = loop.time()
        read = asyncio.create_task(self._read(source.tier, key, self.cpu.pool.view(slot)))
        try:
            await asyncio.wait([read], timeout=max(0.0, source.until_s(flight.deadline_s) - loop.time()))
        finally:
            if not read.done():
                self._leave_behind(read, slot, source)
        if not read.done():
            source.waited_in_vain(began_s)
            self.counters.failed += 1
            return None
        source.places.release()
        try:
            length = read.result()
        except CorruptChunk:
            self.counters.corrupt += 1
            length = None
        except Exception as error:
            source.breaker.failed(loop.time())
            self.counters.failed += 1
            logger.warning("%s: a read failed: %s", source.tier.name, error)
            length = None
        else:
            took_s = loop.time() - began_s
            source.breaker.succeeded(loop.time(), took_s)
            if length is not None:
                source.estimate.add(took_s, loop.time())
        if length is None:
            self.cpu.abandon(slot, Purpose.READ)
            return None
        return self.cpu.publish(key, slot, length, Purpose.READ)

    async def _slot(self, flight: _Flight) -> Slot | None:
        slot = self.cpu.try_reserve(Purpose.READ)
        if slot is not None:
            return slot
        return await self.cpu.reserve(Purpose.READ, flight.deadline_s - asyncio.get_running_loop().time())

    def _leave_behind(self, read: asyncio.Task[int | None], slot: Slot, source: Source) -> None:
        """The slot, and the place in the tier's concurrency, stay taken until the thread is really done."""

        def ended(task: asyncio.Task[int | None]) -> None:
            self._stuck.discard(task)
            if not task.cancelled():
                task.exception()
            source.places.release()
            self.cpu.abandon(slot, Purpose.READ)

        self._stuck.add(read)
        read.add_done_callback(ended)

    # Batches

    async def _lane(
        self,
        positions: Iterator[int],
        keys: Sequence[ChunkKey],
        sinks: Sequence[Sink],
        delivered: bytearray,
        gap: list[int],
        deadline_s: float,
    ) -> None:
        """Take one position after the other until a gap makes the rest worthless."""
        for position in positions:
            if position > gap[0]:
                return
            lease = await self.fetch(keys[position], deadline_s)
            if lease is None:
                gap[0] = min(gap[0], position)
                return
            await self._hand_over([(position, lease)], sinks, delivered)
            if not delivered[position]:
                gap[0] = min(gap[0], position)

    async def _hand_over(
        self, part: Sequence[tuple[int, Lease]], sinks: Sequence[Sink], delivered: bytearray
    ) -> None:
        todo = [(position, lease.view, sinks[position]) for position, lease in part if sinks[position] is not _discard]
        try:
            if todo:
                await to_the_end(self.cpu.copiers.submit(_run_sinks, todo, delivered))
            for position, _ in part:
                if sinks[position] is _discard:
                    delivered[position] = 1
        except Exception as error:
            self.counters.sink_failures += 1
            logger.warning("a chunk could not be delivered: %r", error)
        finally:
            for _, lease in part:
                lease.release()


def _read_into_host(tier: Tier, key: ChunkKey, into: np.ndarray) -> Coroutine[Any, Any, int | None]:
    return tier.read(key, into)


def _run_sinks(todo: Sequence[tuple[int, np.ndarray, Sink]], delivered: bytearray) -> None:
    for position, view, sink in todo:
        sink(view)
        delivered[position] = 1


def _discard(view: np.ndarray) -> None:
    """The sink of a promotion: nobody wants the bytes yet."""


def _split(items: list[tuple[int, Lease]], parts: int) -> list[list[tuple[int, Lease]]]:
    """Consecutive parts of about equal length; small batches are not worth a second thread."""
    parts = max(1, min(parts, len(items) // 4))
    size = -(-len(items) // parts) if items else 1
    return [items[start : start + size] for start in range(0, len(items), size)]


def prefix_of(delivered: bytearray) -> int:
    """How many of the first are set."""
    gap = delivered.find(0)
    return len(delivered) if gap < 0 else gap


async def all_or_none(work: Sequence[asyncio.Future[Any]]) -> None:
    """Wait for all; if this or one of them is cancelled or fails, none is left running."""
    try:
        await asyncio.gather(*work)
    except BaseException:
        for item in work:
            item.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        raise
