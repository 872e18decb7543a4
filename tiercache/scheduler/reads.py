"""Read chunks through the cascade: the hot cache, then each tier in order, with single-flight reads per key.

A read in flight is a task that belongs to none of its waiters. It walks the tiers, reads into a slot of the hot cache,
verifies, and publishes; each waiter has its own deadline. A tier that is down, hung or slow costs only its own hits,
since each tier has a `TierReader`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from tiercache.core.breaker import Breaker, BreakerState
from tiercache.core.estimate import SECONDS, Distribution, TransferEstimate, worth_waiting_s
from tiercache.core.index import counts_in
from tiercache.core.keys import ChunkKey
from tiercache.errors import CorruptChunk
from tiercache.memory.slots import PREFETCH, READ, Lease, Purpose, Slot, WaitQueue, done_by, zero_padding
from tiercache.memory.workers import cancel_all, was_cancelled
from tiercache.payloads import Sink
from tiercache.scheduler.batch import HostMemory, HotCache, deliver, or_held
from tiercache.tiers.base import DeviceTier, Tier
from tiercache.tiers.cpu import CpuTier
from tiercache.tiers.shared_memory import SharedMemoryTier

logger = logging.getLogger("tiercache.reader")

_LEAST_S = 1.0
"""A shorter wait for an answer does not count against a tier."""
WARN_EVERY_S = 60.0
"""Every chunk that cannot be delivered is counted; at most one is logged in this time."""
_CANCEL_S = 0.002
"""Time for a tier to end a lookup at its deadline."""
_Answer = TypeVar("_Answer")
T = TypeVar("T")

_Outcome = int | Lease | None
"""Length of the data read into a slot, the lease on a mapped chunk, or None for a miss."""


@dataclass
class ReaderSettings:
    deadline_s: float = 10.0
    """Default deadline of a call."""
    probe_deadline_s: float = 3.0
    """Longest wait of a lookup for a shared tier."""
    recompute_s: float | None = None
    """Seconds that the engine takes to compute a chunk; None if unknown. Slower loads are not begun.

    It changes as the engine is measured.
    """


@dataclass
class ReaderStatistics:
    """Counts of chunks.

    `joined`: the key was in flight already. `late`: the caller gave up at its deadline. `overtaken`: a demand read came
    for a prefetch that still waited. `kept`: the read outlived its callers; the chunk is hot.
    """

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
    """Counts of one tier. `failed` counts reads that failed, failed verification, or were given up."""

    seconds: Distribution = field(default_factory=lambda: Distribution.of(SECONDS))
    """Durations of reads that found their chunk, or were given up."""
    failed: int = 0
    reading: int = 0
    """Reads in flight in the tier."""


@dataclass(eq=False, slots=True)
class InFlight:
    """The read of one chunk through the cascade, and its waiters."""

    key: ChunkKey
    epoch: int
    """The epoch of the tombstones at the start of the read."""
    purpose: Purpose
    deadline_s: float
    """The latest deadline of its waiters. A waiter that joins may extend it."""
    parent: ChunkKey | None
    """The previous chunk in its prefix; None if unknown."""
    time: int | None
    """The time of the access that it serves, in the hot cache's count."""
    begun: bool = False
    """True while a tier reads, or has not answered in time. Otherwise a demand read overtakes a prefetch."""
    waiters: list[tuple[asyncio.Future[Lease | None], Purpose]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    async def arrival(self, purpose: Purpose, deadline_s: float) -> Lease | None:
        """Wait for a lease on the chunk; None on a miss. Raises TimeoutError at the deadline; holds nothing if cancelled."""
        arrival: asyncio.Future[Lease | None] = asyncio.get_running_loop().create_future()
        self.waiters.append((arrival, purpose))
        try:
            async with asyncio.timeout_at(deadline_s):
                return await arrival
        except BaseException as error:
            if arrival.done() and not arrival.cancelled():
                if isinstance(error, TimeoutError):
                    return arrival.result()  # it completed at the deadline
                if (landed := arrival.result()) is not None:
                    landed.release()
            elif not arrival.get_loop().is_closed():
                arrival.cancel()  # if this coroutine was closed, a lease could still arrive
            raise

    def end(self, landed: Lease | None) -> None:
        """Give each waiter its own lease on the chunk that has `landed`, or None.

        A demand read has already counted its access.
        """
        counted = self.purpose is Purpose.READ
        for arrival, purpose in self.waiters:
            if not arrival.done():
                lease = None
                if landed is not None:
                    lease = landed.another(purpose, counted=counted)
                    counted = counted and purpose is not Purpose.READ
                arrival.set_result(lease)


@dataclass(eq=False, slots=True)
class _Transfer:
    """A read that a tier has begun. It keeps its slot and its place at the tier until it ends, even after its deadline.

    Its chunk is published even if it ends after the deadline.
    """

    request: InFlight
    """The read that began the transfer."""
    slot: Slot | None
    """None if the chunk is mapped."""
    began_s: float
    task: asyncio.Task[_Outcome]
    abandoned: bool = False


class TierReader:
    """Reads from one tier, within its breaker, its latency estimate and its concurrency limit.

    Demand reads get places first. While a demand read has a place, at most one prefetch at a time begins: all reads
    share the tier's bandwidth, so each prefetch slows the demand read.
    """

    def __init__(self, tier: Tier, reader: Reader) -> None:
        """`reader` has the destination tier, whose budget bounds the slots of reads in flight, abandoned reads included.

        A tier that it maps is read by mapping.
        """
        settings = reader.settings
        self.tier = tier
        self.mapped = tier if isinstance(tier, SharedMemoryTier) and tier in reader.mapped else None
        self.name = tier.name
        self.cpu = reader.cpu
        self.settings = settings
        self.counters = reader.counters
        self.reads = reader.tier_counters[tier.name]
        self.in_flight = reader.in_flight
        self.patience_s = min(tier.patience_s or settings.deadline_s, settings.deadline_s)
        self.breaker = Breaker(settings.deadline_s)
        self.estimate = TransferEstimate(tier.traits.read_concurrency)
        self.taken = {READ: 0, PREFETCH: 0}
        """Places in use, by purpose."""
        self.wait_queue = WaitQueue(self._take_place, lambda _, purpose: self._leave(purpose))
        """Waiters for a place."""
        self._transfers: dict[ChunkKey, _Transfer] = {}
        """Transfers in flight, oldest first, at most one per key."""

    @property
    def places(self) -> int:
        """Reads at a time."""
        places = self.tier.traits.read_concurrency
        return places if self.mapped is not None else min(places, self.cpu.budget.reads_at_once)

    @property
    def in_tier(self) -> list[asyncio.Task[Any]]:
        """Reads and lookups in flight."""
        return [*(transfer.task for transfer in self._transfers.values()), *self.tier.traffic.questions]

    @property
    def abandoned(self) -> Sequence[asyncio.Task[_Outcome]]:
        """Reads that outlived their deadline and still hold a slot."""
        return [transfer.task for transfer in tuple(self._transfers.values()) if transfer.abandoned]

    # Routing

    def may_have(self, key: ChunkKey) -> bool:
        """Return True if the tier may have the chunk, and it is not being removed there."""
        return not self.tier.traffic.refuses(key) and (self.tier.traits.shared or self.tier.contains(key))

    def would_serve(self, chunks: int) -> bool:
        """Return True if the tier is healthy, and loading `chunks` chunks is faster than computing them."""
        if self.tier.traffic.detached:
            return False
        now_s = asyncio.get_running_loop().time()
        oldest_s = now_s - next((transfer.began_s for transfer in self._transfers.values()), now_s)
        worthwhile = self.estimate.worthwhile(chunks, self.settings.recompute_s, now_s, oldest_s)
        return worthwhile and self.breaker.would_allow(now_s)

    def serves(self, chunks: int) -> bool:
        """Return the result of `would_serve`, for a read or a lookup that begins now.

        If that is the probe of an open breaker, its end must be reported to the breaker.
        """
        return self.would_serve(chunks) and self.breaker.allows(asyncio.get_running_loop().time())

    def lasting_s(self, chunks: int) -> float | None:
        """Return the seconds that a demand read of `chunks` chunks should take after those in flight; None if unknown."""
        return self.estimate.lasting_s(chunks, self.taken[READ] + len(self.wait_queue.waiting[READ]))

    def _until_s(self, deadline_s: float, began_s: float) -> float:
        """Return the time at which to continue with the next tier."""
        return min(deadline_s, began_s + self.patience_s)

    def _timed_out(self, began_s: float, enough_s: float = _LEAST_S) -> None:
        """Report to the breaker that there was no answer since `began_s`.

        A wait shorter than a second (or `enough_s`, if that is less) does not count against the tier.
        """
        now_s = asyncio.get_running_loop().time()
        least_s = min(enough_s, _LEAST_S, self.patience_s)
        if now_s - began_s >= 0.99 * least_s:  # a timer may be early by its resolution
            self.breaker.failed(now_s, began_s=began_s)
        else:
            self._proved_nothing(began_s)

    def _proved_nothing(self, began_s: float) -> None:
        """Report to the breaker that the operation from `began_s` proved nothing: the next operation may be the probe."""
        self.breaker.abandoned(asyncio.get_running_loop().time(), began_s)

    # Lookups

    def ask(self, question: Callable[[], Awaitable[_Answer]], deadline_s: float) -> asyncio.Task[_Answer | None]:
        """Begin a lookup with a deadline and report its outcome to the breaker; None if there was no answer.

        A cancelled lookup, even if it has not begun, leaves the breaker's probe to the next operation.
        """
        began_s = asyncio.get_running_loop().time()
        task = asyncio.create_task(self._ask(question, deadline_s, began_s), name="tiercache-ask")
        self.tier.traffic.questions.add(task)

        def ended(task: asyncio.Task[_Answer | None]) -> None:
            self.tier.traffic.questions.discard(task)
            if task.cancelled():
                self._proved_nothing(began_s)

        task.add_done_callback(ended)
        return task

    async def _ask(
        self, question: Callable[[], Awaitable[_Answer]], deadline_s: float, began_s: float
    ) -> _Answer | None:
        try:
            async with asyncio.timeout_at(self._until_s(deadline_s, began_s)):
                found = await question()
        except TimeoutError:
            # Lookups end at this deadline, so a longer limit would never be reached.
            self._timed_out(began_s, self.settings.probe_deadline_s)
            return None
        except (Exception, asyncio.CancelledError) as error:
            if was_cancelled():
                raise
            self.breaker.failed(asyncio.get_running_loop().time(), began_s=began_s)
            logger.warning("%s: a lookup failed: %s", self.name, error or type(error).__name__)
            return None
        self._proved_nothing(began_s)
        return found

    # Reads

    async def read(self, request: InFlight) -> None:
        """Read the chunk if the tier has it, until the deadline of the tier or of the waiters.

        A transfer that takes longer continues, also after cancellation, and the next read of its key waits for it.
        Whenever it ends, the waiters for the chunk get it.
        """
        key, loop = request.key, asyncio.get_running_loop()
        if self._unwanted(request) or not self.may_have(key):
            return
        began_s = loop.time()
        transfer = self._transfers.get(key)
        if transfer is None:
            if not self.serves(self.estimate.concurrency):
                return
            try:
                transfer = await self._begin(request)
            finally:
                if transfer is None:
                    self._proved_nothing(began_s)
            if transfer is None:
                return
            began_s = transfer.began_s
        elif not self.would_serve(self.estimate.concurrency) or self._is_forgotten(transfer.request):
            return
        try:
            in_time = await done_by(transfer.task, lambda: self._until_s(request.deadline_s, began_s))
        except BaseException:
            self._abandon(transfer)
            self._proved_nothing(began_s)
            raise
        if in_time:
            self._end(transfer)  # the callback may run later
            request.begun = False  # it may wait for the next tier now
            return
        self._timed_out(began_s)
        if not transfer.abandoned:
            self._abandon(transfer)
            self.counters.failed += 1
            self.reads.failed += 1
            self.reads.seconds.add(loop.time() - began_s)

    def _unwanted(self, request: InFlight) -> bool:
        """Return True if the chunk came from another source, or was forgotten since the request began."""
        return self.in_flight.get(request.key) is not request or self._is_forgotten(request)

    def _is_forgotten(self, request: InFlight) -> bool:
        return self.cpu.tombstones.forgot(request.key, request.epoch)

    async def _begin(self, request: InFlight) -> _Transfer | None:
        """Begin to read once there is a place at the tier and a slot to read into.

        Returns None if there is none in time, or if the chunk is no longer wanted or no longer in the tier.
        """
        key, purpose, cpu = request.key, request.purpose, self.cpu
        slot, placed, needs_slot = None, False, self.mapped is None
        try:
            placed = await self._place(request)
            if placed and needs_slot and purpose is PREFETCH and request.time is not None:  # as `promote` says
                if not cpu.has_free(key) or (slot := cpu.try_reserve(purpose, key)) is None:
                    return None
            elif placed and needs_slot and (slot := cpu.try_reserve(purpose, key)) is None:
                if purpose is PREFETCH or cpu.wait_queue.blocks_only_itself(purpose, key):
                    # A waiter for a slot must not block demand reads, or other tenants.
                    self._leave(purpose)
                    placed = False
                slot = await cpu.wait_queue.wait(purpose, lambda: request.deadline_s, key)
                if slot is not None and not placed:
                    placed = await self._place(request)
            if not placed or (slot is None and needs_slot) or self._unwanted(request) or not self.may_have(key):
                return None
            task = asyncio.create_task(self._transfer(key, slot, purpose))
            transfer = _Transfer(request, slot, asyncio.get_running_loop().time(), task)
            slot, placed = None, False
        finally:
            if slot is not None:
                cpu.abandon(slot, purpose)
            if placed:
                self._leave(purpose)
        self._transfers[key] = transfer
        self.reads.reading += 1
        task.add_done_callback(lambda _: self._end(transfer))
        self.tier.traffic.begin(key)
        request.begun = True
        return transfer

    def _transfer(self, key: ChunkKey, slot: Slot | None, purpose: Purpose) -> Coroutine[Any, Any, _Outcome]:
        tier = self.tier
        if slot is None:
            assert self.mapped is not None
            return self.mapped.map(key, purpose)
        view = self.cpu.pool.view(slot)
        if self.cpu.on_device and isinstance(tier, DeviceTier):
            return tier.read_device(key, view)
        return tier.read(key, view)

    async def _place(self, request: InFlight) -> bool:
        began_s = asyncio.get_running_loop().time()
        came = await self.wait_queue.wait(request.purpose, lambda: self._until_s(request.deadline_s, began_s))
        if came is None and request.purpose is READ and len(self._transfers) >= self.places:
            # All places were in use for a whole deadline: the tier hangs, though this read never reached it. A prefetch
            # proves nothing, since demand reads go before it; nor does a place whose owner waits for memory.
            self._timed_out(began_s)
        return came is not None

    def _take_place(self, purpose: Purpose, *_: object) -> bool | None:
        """Take a place for `purpose`; None if there is none."""
        if sum(self.taken.values()) >= self.places:
            return None
        if purpose is PREFETCH and self.taken[PREFETCH]:
            most = self.tier.traits.prefetch_concurrency
            if self.taken[READ] or self.wait_queue.waiting[READ] or (most and self.taken[PREFETCH] >= most):
                return None
        self.taken[purpose] += 1
        return True

    def _leave(self, purpose: Purpose) -> None:
        """Release a place."""
        self.taken[purpose] -= 1
        self.wait_queue.serve()

    def _abandon(self, transfer: _Transfer) -> None:
        """Let a transfer continue without a waiter. Its slot does not count as held for a read meanwhile."""
        if self._transfers.get(transfer.request.key) is transfer and not transfer.abandoned:
            transfer.abandoned = True
            if transfer.slot is not None:
                self.cpu.budget.give_back(transfer.request.purpose)

    def _end(self, transfer: _Transfer) -> None:
        """Release a transfer's resources, publish its chunk unless it was forgotten, and serve the waiters for it.

        Idempotent: called by the task's callback, or earlier by a waiter of the task.
        """
        request, slot = transfer.request, transfer.slot
        key, purpose = request.key, request.purpose
        if self._transfers.get(key) is not transfer:
            return
        outcome = self._outcome(transfer)
        if transfer.abandoned and slot is not None:
            self.cpu.budget.take(purpose)
            self.cpu.wait_queue.serve()  # a write may have waited for the floor of reads
        del self._transfers[key]
        self.reads.reading -= 1
        self._leave(purpose)
        lease = outcome if isinstance(outcome, Lease) else None
        unwanted = self.cpu.wait_queue.closed or self._is_forgotten(request)
        if lease is not None and unwanted:
            lease.release()
            lease = None
        if slot is not None and isinstance(outcome, int) and not unwanted:
            if not self.cpu.on_device:
                zero_padding(self.cpu.pool.view(slot), outcome)  # tiers leave the slot's earlier bytes there
            lease = self.cpu.publish(key, slot, outcome, purpose, request.parent, request.time)
        elif slot is not None:
            self.cpu.abandon(slot, purpose)
        self.tier.traffic.end(key)
        if lease is None:
            return
        if (waiting := self.in_flight.pop(key, None)) is not None:
            self.counters.hits[self.name] += 1
            waiting.end(lease)
        else:
            self.counters.kept += 1
        lease.release()

    def _outcome(self, transfer: _Transfer) -> _Outcome:
        """Return and report the outcome of an ended transfer, None if it failed.

        An abandoned transfer was reported before.
        """
        now_s, task = asyncio.get_running_loop().time(), transfer.task
        took_s, in_time = now_s - transfer.began_s, not transfer.abandoned
        error = asyncio.CancelledError("cancelled") if task.cancelled() else task.exception()
        if error is None:
            outcome = task.result()
            if in_time:
                self.breaker.succeeded(now_s, took_s)
            if outcome is not None and in_time:
                self.reads.seconds.add(took_s)
            if outcome is not None:
                self.estimate.add(took_s, now_s)
            return outcome
        self.reads.failed += 1
        if isinstance(error, CorruptChunk):
            self.counters.corrupt += 1
            if in_time:
                self._proved_nothing(transfer.began_s)  # an answer, which proves nothing about the tier's health
        else:
            self.counters.failed += 1
            logger.warning("%s: a read failed: %s", self.name, error)
            if in_time:
                self.breaker.failed(now_s, began_s=transfer.began_s)
        return None


@dataclass(frozen=True)
class Hit:
    """A contiguous prefix that was found, and its tiers. `tokens` is 0 if only keys were given."""

    chunks: int
    tokens: int
    by_tier: dict[str, int]
    """Chunks by the first tier of the cascade that has them; their sum is `chunks`."""


class Reader:
    """Reads from all tiers. Bound to the event loop. Deadlines are loop times (`loop.time()`) in seconds."""

    def __init__(
        self,
        cpu: CpuTier,
        tiers: Sequence[Tier],
        settings: ReaderSettings,
        *,
        maps: bool = False,
        counts_with: Reader | None = None,
    ) -> None:
        """`cpu` is the destination tier: the hot cache, or the staging tier of a device.

        With `maps`, chunks of mapped tiers are read in place. With `counts_with`, a reader of all these tiers, the two
        have one set of counters.
        """
        self.cpu = cpu
        self.settings = settings
        self.mapped = [tier for tier in tiers if maps and isinstance(tier, SharedMemoryTier)]
        self._hot: tuple[CpuTier | SharedMemoryTier, ...] = (cpu, *self.mapped)
        cpu.budget.tiers = len(tiers) - len(self.mapped)
        if counts_with is None:
            self.counters = ReaderStatistics(hits=dict.fromkeys([cpu.name, *(tier.name for tier in tiers)], 0))
            self.tier_counters = {tier.name: TierReadStatistics() for tier in tiers}
        else:
            self.counters, self.tier_counters = counts_with.counters, counts_with.tier_counters
        self._is_last = counts_with is None  # else the other reader is asked after a miss, and counts it
        self._next_warning_s = float("-inf")
        self.in_flight: dict[ChunkKey, InFlight] = {}
        self.tiers = [TierReader(tier, self) for tier in tiers]
        self.on_demand: Callable[[ChunkKey], None] | None = None
        """Called on a demand for a chunk whose only read is a prefetch."""
        self.lanes = max([2, *(tier.traits.read_concurrency + 2 for tier in tiers)])
        """Chunks of a batch that are fetched at a time."""
        self._closed = False

    @property
    def abandoned(self) -> Sequence[asyncio.Task[Any]]:
        """Reads that outlived their deadline and still hold a slot."""
        return [read for tier in self.tiers for read in tier.abandoned]

    def statistics(self) -> ReaderStatistics:
        return replace(self.counters, hits=self.counters.hits.copy())

    def reads(self) -> dict[str, TierReadStatistics]:
        return {name: replace(reads, seconds=reads.seconds.copy()) for name, reads in self.tier_counters.items()}

    def breakers(self) -> dict[str, str]:
        return {
            tier.name: (BreakerState.DETACHED if tier.tier.traffic.detached else tier.breaker.state).value
            for tier in self.tiers
        }

    def replace_tier(self, before: Tier, after: Tier) -> list[asyncio.Task[Any]]:
        """Use `after` in place of the tier `before`. Return the operations in flight there."""
        in_flight: list[asyncio.Task[Any]] = []
        for reader in self.tiers:
            if reader.tier is before:
                in_flight += reader.in_tier
                reader.tier = after
                reader.breaker.succeeded(asyncio.get_running_loop().time())  # it was that of the other one
                if reader.mapped is not None:
                    assert isinstance(after, SharedMemoryTier)
                    self.mapped[self.mapped.index(reader.mapped)] = reader.mapped = after
                    self._hot = (self.cpu, *self.mapped)
        return in_flight

    async def close(self) -> None:
        """End all reads in flight; their waiters get a miss. Does not wait for reads that hang."""
        self._closed = True
        reads = list(self.in_flight.values())
        tasks = [read.task for read in reads if read.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for read in reads:
            read.end(None)
        self.in_flight.clear()

    # Chunks in memory

    def lease_now(self, key: ChunkKey, *, counted: bool = False) -> Lease | None:
        """Return a lease on the chunk if it is hot or mapped, else None.

        Counts a hit, and the access unless it is `counted` already; does not count a miss.
        """
        for tier in self._hot:
            lease = tier.lease(key, counted=counted)
            if lease is not None:
                self.counters.hits[tier.name] += 1
                return lease
        return None

    def _lease_unserved(self, key: ChunkKey) -> Lease | None:
        """Return a lease as `lease_now` does, for a chunk to keep hot. Counts no hit; the access is counted already."""
        return next(filter(None, (tier.lease(key, counted=True) for tier in self._hot)), None)

    def pin(self, key: ChunkKey) -> Lease | None:
        """Pin a chunk that is hot, or mapped, for a future reader; not an access. None if it is neither."""
        return next(filter(None, (tier.pin(key) for tier in self._hot)), None)

    def has_at_hand(self, key: ChunkKey) -> bool:
        """Return True if the chunk is hot or mapped."""
        return self.cpu.contains(key) or any(key in tier.mappings for tier in self.mapped)

    def prefix_at_hand(self, keys: Sequence[ChunkKey]) -> int:
        """Return the length of the prefix of `keys` that is hot or mapped."""
        position = self.cpu.prefix(keys)
        while self.mapped and position < len(keys) and self.has_at_hand(keys[position]):
            position += 1
        return position

    # Single chunks

    async def fetch(
        self, key: ChunkKey, deadline_s: float, parent: ChunkKey | None = None, time: int | None = None
    ) -> Lease | None:
        """Return a lease on the chunk from the first tier that has it; None on a miss or at the deadline.

        `parent` is the previous chunk in its prefix, if known, and `time` the time of this access. Cancellation does
        not end the read, which continues for other waiters and publishes its chunk.
        """
        return self.lease_now(key) or await self.fetch_cold(key, deadline_s, parent=parent, time=time)

    async def promote(
        self, key: ChunkKey, deadline_s: float, parent: ChunkKey | None = None, time: int | None = None
    ) -> Lease | None:
        """Return a pin on the chunk from the first tier that has it; not an access. Demand reads go first.

        Nothing is evicted for a chunk with the `time` of an earlier access.
        """
        return self.pin(key) or await self.fetch_cold(key, deadline_s, PREFETCH, parent, time)

    async def fetch_cold(
        self,
        key: ChunkKey,
        deadline_s: float,
        purpose: Purpose = READ,
        parent: ChunkKey | None = None,
        time: int | None = None,
    ) -> Lease | None:
        """Return a lease as `fetch` does, for a chunk that is not hot."""
        if self._closed:  # a batch that was copying during `close` fetches its next chunk
            self.counters.misses += self._is_last
            return None
        read = self.in_flight.get(key)
        if read is not None and self.cpu.tombstones.forgot(key, read.epoch):
            read = None  # its chunk is not published
        if read is not None and read.purpose is PREFETCH and purpose is READ and self.on_demand is not None:
            self.on_demand(key)
        if read is not None and (read.begun or purpose is PREFETCH or read.purpose is READ):
            self.counters.joined += 1
            read.deadline_s = max(read.deadline_s, deadline_s)
        elif not any(tier.may_have(key) for tier in self.tiers):
            self.counters.misses += self._is_last
            return None
        else:
            overtaken = read
            read = InFlight(key, self.cpu.tombstones.epoch, purpose, deadline_s, parent, time)
            if overtaken is not None:
                self._overtake(overtaken, read)
            self._begin(read)
        try:
            lease = await read.arrival(purpose, deadline_s)
        except TimeoutError:
            self.counters.late += self._is_last
            return None
        if lease is None:
            self.counters.misses += self._is_last
        return lease

    def _overtake(self, prefetch: InFlight, read: InFlight) -> None:
        """Let `read` replace a prefetch that no tier has begun, and adopt its waiters."""
        self.counters.overtaken += 1
        read.deadline_s = max(read.deadline_s, prefetch.deadline_s)
        read.waiters, prefetch.waiters = prefetch.waiters, []
        assert prefetch.task is not None
        prefetch.task.cancel()

    def _begin(self, read: InFlight) -> None:
        self.in_flight[read.key] = read
        read.task = asyncio.create_task(self._read(read), name="tiercache-read")

    async def _read(self, read: InFlight) -> None:
        """Read from the tiers in order, then from tiers that have gained the chunk since, for later waiters."""
        lacking = []
        try:
            for tier in self.tiers:
                if not tier.tier.offers(read.key):
                    lacking.append(tier)
                await tier.read(read)
            for tier in lacking:
                if tier.tier.offers(read.key):
                    await tier.read(read)
        except Exception:
            logger.exception("a read failed unexpectedly")
        finally:
            if self.in_flight.get(read.key) is read:
                del self.in_flight[read.key]
            read.end(None)

    # Many chunks

    async def deliver(
        self,
        keys: Sequence[ChunkKey],
        sinks: Sequence[Sink],
        deadline_s: float,
        held: Mapping[ChunkKey, Lease] | None = None,
    ) -> int:
        """Pass each chunk to its sink on a worker thread, and return how many of the contiguous prefix were delivered.

        Hot chunks are copied in one call per copying thread; the others are read meanwhile. Sinks after a gap may have
        run. The prefix ends at a sink that raises, or that found no free thread by the deadline. `held` chunks are
        delivered even if they were removed meanwhile, and the deadline is not shortened for them.

        No sink runs after a return, error or cancellation, except a sink that hangs, which raises TierUnavailable 30 s
        after the deadline.
        """
        if held is None and (wait_s := self.worth_waiting_s(keys)) is not None:
            deadline_s = min(deadline_s, asyncio.get_running_loop().time() + wait_s)
        landing = HostMemory(sinks, self.cpu.copiers, self.undelivered, deadline_s)
        lease_hot = or_held(partial(self.lease_now, counted=True), held)
        return await deliver(self.cpu, keys, landing, deadline_s, lease_hot, self.fetch, self.lanes)

    async def warm(self, keys: Sequence[ChunkKey], deadline_s: float) -> int:
        """Promote chunks into the hot cache, or map them. Return how many of the contiguous prefix are hot or mapped."""
        return await deliver(self.cpu, keys, HotCache(), deadline_s, self._lease_unserved, self.fetch, self.lanes)

    def worth_waiting_s(self, keys: Sequence[ChunkKey]) -> float | None:
        """Return how long to wait for the chunks that are not hot until computing the rest is faster.

        Returns None if the time of computing is unknown, or if no tier can have any of them.
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

    def undelivered(self, error: Exception, where: str = "") -> None:
        """Count a chunk, or a part of a batch, that the caller's memory did not take. `where` is a phrase for the log."""
        self.counters.sink_failures += 1
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._next_warning_s:
            self._next_warning_s = now_s + WARN_EVERY_S
            logger.warning(
                "a chunk could not be delivered%s: %r (%d so far)", where, error, self.counters.sink_failures
            )

    # Lookups

    def where(self, keys: Sequence[ChunkKey]) -> tuple[int, dict[str, int]]:
        """Return the length of the contiguous prefix of `keys` that is known without I/O, and its chunks by tier."""
        by_tier = dict.fromkeys(self.counters.hits, 0)
        position = self.cpu.prefix(keys)
        by_tier[self.cpu.name] = position
        if position < len(keys) and self.tiers:
            places = self._offered(len(keys) - position)
            counts = counts_in([known for _, known in places], keys[position:])
            position += sum(counts)
            for (name, _), count in zip(places, counts, strict=True):
                by_tier[name] += count
        return position, by_tier

    async def lookup(self, keys: Sequence[ChunkKey], deadline_s: float | None = None) -> tuple[int, dict[str, int]]:
        """Return the result of `where`, after asking shared tiers about the rest, concurrently and until the deadline.

        A tier that does not answer costs its own hits only. Tiers that are slower than computing are not asked.
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
                    if tier.serves(len(keys) - position):
                        asked[tier.ask(partial(tier.tier.probe, keys[position:]), deadline_s)] = tier, position
                answers = await self._answers(asked, deadline_s)
                if not answers:
                    break
                before = position
                # What was known when this began may have left the hot cache, and need not be in its tier's index.
                more, counts = self.where(keys[position:])
                position += more
                by_tier = {name: count + counts[name] for name, count in by_tier.items()}
                # A tier whose prefix ended at a gap that another tier has filled may have more.
                ends = [(tier, start + found) for (tier, start), found in answers if found is not None]
                due = [tier for tier, end in ends if before < position and end < position]
        finally:
            cancel_all(asked)  # without waiting, since a tier may not end them
        return position, by_tier

    async def lookup_each(self, keys: Sequence[ChunkKey], deadline_s: float | None = None) -> list[bool]:
        """Return for each of `keys` if a tier has it. Asks each shared tier once about unknown keys."""
        loop = asyncio.get_running_loop()
        deadline_s = deadline_s or loop.time() + self.settings.probe_deadline_s
        unknown = self._unknown(keys)
        due = [tier for tier in self.tiers if tier.tier.traits.shared] if unknown and deadline_s > loop.time() else []
        serving = [tier for tier in due if tier.serves(len(unknown))]
        asked = {tier.ask(partial(tier.tier.probe_each, unknown), deadline_s): tier for tier in serving}
        try:
            while unknown and await self._answers(asked, deadline_s):
                unknown = self._unknown(unknown)
        finally:
            cancel_all(asked)  # without waiting, since a tier may not end them
        lacking = set(unknown)
        return [key not in lacking for key in keys]

    async def _answers(self, asked: dict[asyncio.Task[Any], T], deadline_s: float) -> list[tuple[T, Any]]:
        """Await the first lookups to end, remove them from `asked`, and return their answers; none at the deadline."""
        if not asked:
            return []
        left_s = deadline_s + _CANCEL_S - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait(asked, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
        return [(asked.pop(task), task.result()) for task in list(asked) if task in done]

    def _unknown(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Return the keys that are not known to be in a healthy tier."""
        places = self._offered(len(keys))
        return [key for key in keys if not any(key in known for _, known in places)]

    def _offered(self, chunks: int) -> list[tuple[str, Container[ChunkKey]]]:
        """Return what the hot cache and each tier that would serve `chunks` chunks offer, by name."""
        well = [tier.tier for tier in self.tiers if tier.would_serve(chunks)]
        return [(tier.name, known) for tier in (self.cpu, *well) for known in tier.offered()]
