"""The cascade: hot cache, then each tier in order; one flight per key however many ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tiercache.core.budget import Purpose
from tiercache.core.keys import ChunkKey
from tiercache.memory.workers import to_the_end
from tiercache.scheduler.flights import Flights, ReadCall, read_into_host
from tiercache.scheduler.source import ReaderSettings, Source
from tiercache.scheduler.together import all_or_none
from tiercache.tiers.base import Tier
from tiercache.tiers.cpu import CpuTier, Lease

logger = logging.getLogger("tiercache.reader")

_LET_GO_S = 0.002
"""What a tier has to let go of a question at its deadline."""

Sink = Callable[[np.ndarray], None]


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
        read: ReadCall | None = None,
    ) -> None:
        """`cpu` is where chunks land (the hot cache, or the staging tier of a device), `read` how they get there."""
        self.cpu = cpu
        self.settings = settings or ReaderSettings()
        cpu.budget.divide(tier.name for tier in tiers)
        self._sources = [Source(tier, self.settings, cpu.budget.reads_at_once) for tier in tiers]
        self.flights = Flights(cpu, self._sources, read or read_into_host)
        self.counters = self.flights.counters
        self._questions: set[asyncio.Task[int | None]] = set()
        """Cancelled, and not over yet."""
        self._lanes = max([2, *(tier.traits.read_concurrency + 2 for tier in tiers)])

    @property
    def read_concurrency(self) -> int:
        """How many chunks all tiers together take on at a time."""
        return sum(source.tier.traits.read_concurrency + 2 for source in self._sources)

    @property
    def stuck(self) -> int:
        """Reads that outlived their deadline and still hold a slot."""
        return self.flights.stuck

    def breakers(self) -> dict[str, str]:
        return {source.tier.name: source.breaker.state.value for source in self._sources}

    def lease_now(self, key: ChunkKey, *, noted: bool = False) -> Lease | None:
        """The chunk if it is hot. Does not count a miss, nor a use that is `noted` already."""
        lease = self.cpu.lease(key, noted=noted)
        if lease is not None:
            self.counters.hits[self.cpu.name] += 1
        return lease

    async def fetch(self, key: ChunkKey, deadline_s: float, parent: ChunkKey | None = None) -> Lease | None:
        """A lease on the chunk from whichever tier has it; None on a miss or at the deadline. `parent` is the chunk before
        it in its prefix, if that is known.

        Cancelled, it leaves the flight to the others who wait for it, and to the hot cache.
        """
        return self.lease_now(key) or await self.flights.fetch(key, deadline_s, parent=parent)

    async def promote(self, key: ChunkKey, deadline_s: float, parent: ChunkKey | None = None) -> Lease | None:
        """As `fetch`, for somebody who may come: any demand read goes first, and the lease is a hold, no use."""
        return self.cpu.hold(key) or await self.flights.fetch(key, deadline_s, Purpose.PREFETCH, parent)

    async def deliver(self, keys: Sequence[ChunkKey], sinks: Sequence[Sink], deadline_s: float) -> int:
        """Hand each chunk to its sink on a worker thread; returns how many of the contiguous prefix were delivered.

        Hot chunks go in one hand-over for each copying thread; the others are read meanwhile. Sinks behind a gap may have
        run. No sink runs after this has returned or raised. A sink that raises ends the prefix.
        """
        delivered = bytearray(len(keys))
        self.cpu.touch_prefix(keys)
        hot = {
            position: lease
            for position, key in enumerate(keys)
            if (lease := self.lease_now(key, noted=True)) is not None
        }
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
        self.cpu.follow(keys)
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
            well = [source for source in self._sources if source.would_serve(left)]
            tiers = [(self.cpu.name, self.cpu.contains), *((source.tier.name, source.contains) for source in well)]
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
                    if source.serves(len(keys) - position, question=True):
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

    async def close(self) -> None:
        """End all flights; whoever waits gets a miss. Does not wait for hung reads."""
        await self.flights.close()

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
            lease = await self.fetch(keys[position], deadline_s, keys[position - 1] if position else None)
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
