"""Write-behind: each tier has a bounded queue of leases and a few tasks that drain it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tiercache.core.breaker import Breaker, BreakerSettings, BreakerState
from tiercache.core.distribution import SECONDS, Distribution
from tiercache.core.keys import ChunkKey
from tiercache.core.queue import BoundedQueue, WaitBudget
from tiercache.errors import TierFull
from tiercache.memory.workers import retrieve_exception
from tiercache.scheduler.removals import Removals, Request
from tiercache.tiers.base import DeviceTier, Tier
from tiercache.tiers.leases import Lease

logger = logging.getLogger("tiercache.writer")


@dataclass(frozen=True)
class WriterSettings:
    queue_bytes: int
    queue_items: int = 65536
    on_full: str = "wait"
    """wait: a `put` waits up to `wait_s` for room, for all of its chunks together, then skips. skip: the chunk is not
    written to this tier. replace: the oldest queued chunk is not."""
    wait_s: float = 1.0
    attempts: int = 3
    first_pause_s: float = 0.05
    """Before the second attempt; doubled for each further one."""
    deadline_s: float = 30.0
    """A write that takes longer counts as failed; its memory stays held until it really ends."""
    most_at_once: int = 65536
    """Writes at a time, whatever the tier takes: how much of the arena it may hang in."""


@dataclass
class WriterStatistics:
    written: int = 0
    skipped: int = 0
    replaced: int = 0
    dropped: int = 0
    """Given up: the breaker was open, or every attempt failed."""
    declined: int = 0
    """The tier did not want it (larger than its cap, not admitted)."""
    retried: int = 0
    queued: int = 0
    queued_bytes: int = 0
    writing: int = 0
    breaker: str = BreakerState.CLOSED.value
    seconds: Distribution = field(default_factory=lambda: Distribution.of(SECONDS))
    """What writes took that stored their chunk."""


class TierWriter:
    """Owns the leases in its queue. All methods belong to the event loop."""

    def __init__(self, tier: Tier, settings: WriterSettings, breaker: BreakerSettings | None = None) -> None:
        self.tier = tier
        self.settings = settings
        self.breaker = Breaker(breaker or BreakerSettings(slow_s=settings.deadline_s))
        self.counters = WriterStatistics()
        self._queue: BoundedQueue[Lease] = BoundedQueue(settings.queue_bytes, settings.queue_items)
        self._writing: dict[ChunkKey, int] = {}
        self._wanted: set[ChunkKey] = set()
        """Of those, what the tier has come to want since it was offered."""
        self._removals = Removals(tier, settings.deadline_s, self._removed, self._give_up_stalled)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stuck: set[asyncio.Task[bool]] = set()
        self._room = asyncio.Event()
        self._line: deque[object] = deque()
        """Calls that wait for room, the first one first."""
        self._probe_ended = asyncio.Event()
        """Set when the breaker has heard of a write."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._moved_at_s = 0.0

    @property
    def pending(self) -> int:
        """Chunks queued or being written."""
        return len(self._queue) + len(self._writing)

    def holds(self, key: ChunkKey) -> bool:
        """Whether the chunk will be written, or is being written: the bytes of it that were put since it was forgotten."""
        return key in self._queue or (key in self._writing and not self.tier.traffic.refuses(key))

    def enqueue_nowait(self, lease: Lease, *, first: bool = False) -> bool:
        """Queue `lease` if there is room (or the policy makes room) and no call waits for room, but for the caller, which
        is the `first` in line. True when the writer has taken care of the lease, be it by dropping it; False when the
        caller may wait for room with `enqueue`."""
        now_s = asyncio.get_running_loop().time()
        if self._closed or self._hangs or not (self.breaker.would_allow(now_s) or self.breaker.probing(now_s)):
            self.counters.dropped += 1
            lease.release()
            return True
        key = lease.key
        if not lease.findable:  # forgotten while it waited for room
            lease.release()
            return True
        if self.holds(key):
            self._needed_again(key)
            lease.release()
            return True
        if self._removals.stalled(key):
            self.counters.dropped += 1
            lease.release()
            return True
        if self._line and not first:
            return False
        offer = self._queue.offer(
            key,
            lease,
            lease.payload_bytes,
            replace_oldest=self.settings.on_full == "replace",
            aside=self.tier.traffic.refuses(key),
        )
        for displaced in offer.displaced:
            self.counters.replaced += 1
            displaced.release()
        if offer.accepted:
            self._idle.clear()
            self._add_task()
            return True
        if self.settings.on_full == "wait":
            return False
        self.counters.skipped += 1
        lease.release()
        return True

    async def enqueue(self, leases: deque[Lease], wait_budget: WaitBudget) -> None:
        """Queue `leases` in their order, waiting for room as configured and as long as `wait_budget` lasts; the others are
        skipped. First come, first served. Takes them out, and takes care of all in any case, cancellation included."""
        loop = asyncio.get_running_loop()
        until_s = wait_budget.until_s(loop.time(), self.settings.wait_s)
        place = object()
        self._line.append(place)
        try:
            async with asyncio.timeout_at(until_s):
                while leases:
                    if self._line[0] is place and self.enqueue_nowait(leases[0], first=True):
                        leases.popleft()
                    elif self._stalls or loop.time() >= until_s:
                        break
                    else:
                        self._room.clear()
                        await self._room.wait()
        except TimeoutError:
            pass  # the put had no more time for it
        finally:
            self._line.remove(place)
            self._room.set()  # for the next in line
            self.skip(leases)

    def skip(self, leases: deque[Lease]) -> None:
        """There is no room for these: do not write them. Takes them out."""
        self.counters.skipped += len(leases)
        while leases:
            leases.pop().release()

    def forget(self, keys: Sequence[ChunkKey]) -> Request:
        """Remove chunks, all different, from the queue, and from the tier when what of them is under way there has ended.
        From now on the tier is not asked for them, and what is put of them now is written after the removal."""
        self._discard(keys)
        return self._removals.want(keys)

    def leave(self, request: Request) -> None:
        """Nobody waits for it any more; as `Removals.leave`."""
        self._removals.leave(request)

    def _discard(self, keys: Iterable[ChunkKey]) -> int:
        """Take chunks out of the queue; returns how many there were."""
        leases = [lease for lease in map(self._queue.discard, keys) if lease is not None]
        for lease in leases:
            lease.release()
        if leases:
            self._room.set()
            self._settle()
        return len(leases)

    async def drained(self) -> None:
        """Wait until all is written or given up. Cancelling it changes nothing."""
        await self._idle.wait()

    async def removed(self) -> None:
        """Wait until what was forgotten is removed, or that has failed. Cancelling it changes nothing."""
        await self._removals.settled()

    async def close(self, until_s: float) -> int:
        """Stop. Chunks still queued are given up, writes under way may end until the loop time `until_s`. Returns how many
        were not written. Hung writes are left behind with their memory."""
        self._closed = True
        self._removals.close()
        unwritten = len(self._queue)
        self._drop_queue()
        self._probe_ended.set()
        tasks = set(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, until_s - asyncio.get_running_loop().time()))
        unwritten += self.pending
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return unwritten

    def statistics(self) -> WriterStatistics:
        counters = replace(self.counters, seconds=self.counters.seconds.copy(), breaker=self.breaker.state.value)
        counters.queued = len(self._queue)
        counters.queued_bytes = self._queue.queued_bytes
        counters.writing = len(self._writing)
        return counters

    def _add_task(self) -> None:
        """One more task, up to the tier's concurrency. Hung writes count: they still occupy the tier's threads."""
        running = len(self._tasks) + len(self._stuck)
        if running < self._places and len(self._tasks) < self._queue.ready + len(self._writing):
            task = asyncio.create_task(self._drain(), name=f"tiercache-write-{self.tier.name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _drain(self) -> None:
        try:
            await self._write_queued()
        finally:
            # Now, not when callbacks run: a chunk that is queued in between would find a task that takes no more.
            task = asyncio.current_task()
            assert task is not None
            self._tasks.discard(task)

    async def _write_queued(self) -> None:
        while self._queue.ready:
            if len(self._tasks) + len(self._stuck) > self._places:
                break  # a hung write has taken this task's place in the tier
            key, lease = self._queue.take()
            self._moved_at_s = asyncio.get_running_loop().time()
            self._room.set()
            self._writing[key] = lease.payload_bytes
            try:
                await self._write(key, lease)
            except asyncio.CancelledError:
                self.counters.dropped += 1
                raise
            except Exception:
                logger.exception("%s: a write failed unexpectedly", self.tier.name)
                self.counters.dropped += 1
            finally:
                del self._writing[key]
                self._wanted.discard(key)
                self._settle()

    def _needed_again(self, key: ChunkKey) -> None:
        """Another request has a chunk that is here already. That counts as a use, and the tier may want by now what it is
        about to decline."""
        if self.tier.used([key]) and key in self._writing:
            self._wanted.add(key)

    def _removed(self, key: ChunkKey) -> None:
        """What was put since it was forgotten may be written."""
        if self._queue.call_up(key):
            self._add_task()

    def _give_up_stalled(self) -> None:
        """What waits for removals that do not end holds no memory any longer."""
        self.counters.dropped += self._discard(filter(self._removals.stalled, self._queue.aside))

    def _settle(self) -> None:
        if not self.pending:
            self._idle.set()

    async def _write(self, key: ChunkKey, lease: Lease) -> None:
        """One chunk, with retries. The lease ends when no write touches its memory any more."""
        loop = asyncio.get_running_loop()
        tier, stuck = self.tier, False
        write = tier.write_device if lease.on_device and isinstance(tier, DeviceTier) else tier.write
        tier.traffic.begin(key)
        try:
            for attempt in range(self.settings.attempts):
                if not lease.findable:
                    return  # forgotten meanwhile
                if attempt:
                    self.counters.retried += 1
                    await asyncio.sleep(self.settings.first_pause_s * 2 ** (attempt - 1))
                if not await self._may_write():
                    break
                began_s = loop.time()
                work = asyncio.create_task(write(key, lease.padded, lease.payload_bytes))
                work.add_done_callback(retrieve_exception)
                try:
                    await asyncio.wait([work], timeout=self.settings.deadline_s)
                finally:
                    stuck = not work.done()
                    if stuck:
                        self._leave_behind(work, key, lease, began_s)
                if stuck:
                    self._failed(began_s)
                    logger.warning(
                        "%s: a write took longer than %.1f s and was given up", self.tier.name, self.settings.deadline_s
                    )
                    break
                try:
                    stored = work.result()
                except TierFull as error:
                    if self.breaker.state.value == "closed":
                        logger.warning("%s: paused: %s", self.tier.name, error)
                    self._trip(began_s)
                    break
                except Exception as error:
                    self._failed(began_s)
                    logger.warning("%s: a write failed: %s", self.tier.name, error)
                    continue
                self._succeeded(began_s)
                if stored:
                    self.counters.written += 1
                    self.counters.seconds.add(loop.time() - began_s)
                elif key in self._wanted and attempt + 1 < self.settings.attempts:
                    self._wanted.discard(key)
                    continue
                else:
                    self.counters.declined += 1
                return
            self.counters.dropped += 1
            if not (self.breaker.would_allow(loop.time()) or self.breaker.probing(loop.time())):
                self._drop_queue()
        finally:
            if not stuck:
                self.tier.traffic.end(key)
                lease.release()

    async def _may_write(self) -> bool:
        """Whether the breaker lets a write begin. While another one finds out whether the tier is well, waits for its end:
        that is at most `deadline_s` away."""
        loop = asyncio.get_running_loop()
        while not self._closed:
            if self.breaker.allows(loop.time()):
                return True
            if not self.breaker.probing(loop.time()):
                return False
            self._probe_ended.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.deadline_s):
                    await self._probe_ended.wait()
        return False

    def _succeeded(self, began_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        self.breaker.succeeded(now_s, now_s - began_s)
        self._probe_ended.set()

    def _failed(self, began_s: float) -> None:
        self.breaker.failed(asyncio.get_running_loop().time(), began_s=began_s)
        self._probe_ended.set()

    def _trip(self, began_s: float) -> None:
        self.breaker.trip(asyncio.get_running_loop().time(), began_s=began_s)
        self._probe_ended.set()

    def _leave_behind(self, work: asyncio.Task[bool], key: ChunkKey, lease: Lease, began_s: float) -> None:
        def ended(task: asyncio.Task[bool]) -> None:
            self._stuck.discard(task)
            self.tier.traffic.end(key)
            lease.release()
            if self._queue.ready:
                self._add_task()

        self._stuck.add(work)
        work.add_done_callback(ended)
        if self._hangs:
            self._trip(began_s)
            self._drop_queue()

    @property
    def _hangs(self) -> bool:
        """Every place in the tier is taken by a write that outlived its deadline."""
        return len(self._stuck) >= self._places

    @property
    def _places(self) -> int:
        """Writes at a time, those included that hang."""
        return min(self.tier.traits.write_concurrency, self.settings.most_at_once)

    @property
    def _stalls(self) -> bool:
        """The tier has begun no write for as long as it may take to answer, or is being probed: no `put` waits for it."""
        now_s = asyncio.get_running_loop().time()
        patience_s = self.tier.patience_s
        return self.breaker.probing(now_s) or (patience_s is not None and now_s - self._moved_at_s > patience_s)

    @property
    def abandoned(self) -> Sequence[asyncio.Task[bool]]:
        """Writes that outlived their deadline and still hold memory."""
        return list(self._stuck)

    def _drop_queue(self) -> None:
        for lease in self._queue.drain():
            self.counters.dropped += 1
            lease.release()
        self._room.set()
        self._settle()
