"""Write-behind: each tier has a bounded queue of leases and a few tasks that drain it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tiercache.core.breaker import Breaker, BreakerSettings
from tiercache.core.keys import ChunkKey
from tiercache.core.queue import BoundedQueue
from tiercache.errors import TierFull, TierUnavailable
from tiercache.scheduler.removals import Outcome, Removals
from tiercache.tiers.base import Tier
from tiercache.tiers.cpu import Lease

logger = logging.getLogger("tiercache.writer")

_FORGOTTEN_AT_ONCE = 256
"""Keys in one turn of the loop."""

LeaseMaker = Callable[[ChunkKey, Tier], Lease | None]


@dataclass(frozen=True)
class WriterSettings:
    queue_bytes: int
    queue_items: int = 65536
    on_full: str = "wait"
    """wait: `put` waits up to `wait_s` for room, then skips. skip: the chunk is not written to this tier. replace: the
    oldest queued chunk is not."""
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


class TierWriter:
    """Owns the leases in its queue. All methods belong to the event loop."""

    def __init__(self, tier: Tier, settings: WriterSettings, breaker: BreakerSettings | None = None) -> None:
        self.tier = tier
        self.settings = settings
        self.breaker = Breaker(breaker or BreakerSettings(slow_s=settings.deadline_s))
        self.counters = WriterStatistics()
        self._queue: BoundedQueue[Lease] = BoundedQueue(settings.queue_bytes, settings.queue_items)
        self._writing: dict[ChunkKey, int] = {}
        self._removals = Removals(tier, settings.deadline_s, self._removed, self._give_up_on)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stuck: set[asyncio.Task[bool]] = set()
        self._room = asyncio.Event()
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

    def stores(self, key: ChunkKey) -> bool:
        """Whether the tier knows that it has `key`, and not only until it is removed."""
        return self.tier.contains(key) and not self.tier.traffic.refuses(key)

    def enqueue_nowait(self, lease: Lease) -> bool:
        """Queue `lease` if there is room (or the policy makes room). True when the writer has taken care of the lease,
        be it by dropping it; False when the caller may wait for room with `enqueue`."""
        now_s = asyncio.get_running_loop().time()
        if self._closed or not self.breaker.would_allow(now_s) or self._hangs:
            self.counters.dropped += 1
            lease.release()
            return True
        key = lease.key
        if not lease.findable or self.holds(key):  # forgotten while it waited for room, or here already
            lease.release()
            return True
        if self._removals.hopeless(key):
            self.counters.dropped += 1
            lease.release()
            return True
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

    async def enqueue(self, lease: Lease) -> None:
        """Queue `lease`, waiting for room as configured. Takes care of the lease in any case, cancellation included."""
        try:
            async with asyncio.timeout(self.settings.wait_s):
                while not self.enqueue_nowait(lease):
                    if self._stalls:
                        raise TimeoutError
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            self.counters.skipped += 1
            lease.release()
        except BaseException:
            lease.release()
            raise

    def forget(self, key: ChunkKey) -> Outcome:
        """Remove a chunk from the queue, and from the tier when what of it is under way there has ended. From now on the
        tier is not asked for it, and what is put of it now is written after the removal."""
        lease = self._queue.discard(key)
        if lease is not None:
            lease.release()
            self._room.set()
            self._settle()
        return self._removals.want(key)

    async def flush(self, timeout_s: float) -> bool:
        """Wait until all is written or given up; False when the time ran out first. Cancelling it changes nothing."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> int:
        """Stop. Chunks still queued are given up; returns how many were not written. Does not wait for hung writes."""
        self._closed = True
        self._removals.close()
        unwritten = self.pending
        self._drop_queue()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return unwritten

    def statistics(self) -> WriterStatistics:
        counters = WriterStatistics(**vars(self.counters))
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
            except Exception:
                logger.exception("%s: a write failed in a way that nobody foresaw", self.tier.name)
                self.counters.dropped += 1
            finally:
                del self._writing[key]
                self._settle()

    def _removed(self, key: ChunkKey) -> None:
        """What was put since it was forgotten may be written."""
        if self._queue.call_up(key):
            self._add_task()

    def _give_up_on(self, key: ChunkKey) -> None:
        """Its removal does not end: what waits for that holds no memory any longer."""
        lease = self._queue.discard(key)
        if lease is not None:
            self.counters.dropped += 1
            lease.release()
            self._room.set()
            self._settle()

    def _settle(self) -> None:
        if not self.pending:
            self._idle.set()

    async def _write(self, key: ChunkKey, lease: Lease) -> None:
        """One chunk, with retries. The lease ends when no write touches its memory any more."""
        loop = asyncio.get_running_loop()
        stuck = False
        self.tier.traffic.begin(key)
        try:
            for attempt in range(self.settings.attempts):
                if not lease.findable:
                    return  # forgotten meanwhile
                if attempt:
                    self.counters.retried += 1
                    await asyncio.sleep(self.settings.first_pause_s * 2 ** (attempt - 1))
                if not self.breaker.allows(loop.time()):
                    break
                began_s = loop.time()
                work = asyncio.create_task(lease.write_to(self.tier))
                done = await self._wait(work)
                if not done:
                    stuck = True
                    self._leave_behind(work, key, lease)
                    self.breaker.failed(loop.time())
                    logger.warning(
                        "%s: a write took longer than %.1f s and was given up", self.tier.name, self.settings.deadline_s
                    )
                    break
                try:
                    stored = work.result()
                except TierFull as error:
                    if self.breaker.state.value == "closed":
                        logger.warning("%s: paused: %s", self.tier.name, error)
                    self.breaker.trip(loop.time())
                    break
                except Exception as error:
                    self.breaker.failed(loop.time())
                    logger.warning("%s: a write failed: %s", self.tier.name, error)
                    continue
                self.breaker.succeeded(loop.time(), loop.time() - began_s)
                if stored:
                    self.counters.written += 1
                else:
                    self.counters.declined += 1
                return
            self.counters.dropped += 1
            if not self.breaker.would_allow(loop.time()):
                self._drop_queue()
        finally:
            if not stuck:
                self.tier.traffic.end(key)
                lease.release()

    async def _wait(self, work: asyncio.Task[bool]) -> bool:
        """Whether `work` ended in time. Cancelled, it leaves nothing behind that still touches the lease's memory."""
        try:
            done, _ = await asyncio.wait([work], timeout=self.settings.deadline_s)
        except asyncio.CancelledError:
            done, _ = await asyncio.wait([work], timeout=1.0)
            if not done:
                # At close, with a hung device: the arena outlives the thread, see TierCache.close.
                self._stuck.add(work)
            raise
        return bool(done)

    def _leave_behind(self, work: asyncio.Task[bool], key: ChunkKey, lease: Lease) -> None:
        def ended(task: asyncio.Task[bool]) -> None:
            self._stuck.discard(task)
            if not task.cancelled():
                task.exception()
            self.tier.traffic.end(key)
            lease.release()
            if self._queue.ready:
                self._add_task()

        self._stuck.add(work)
        work.add_done_callback(ended)
        if self._hangs:
            self.breaker.trip(asyncio.get_running_loop().time())
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
        """The tier has begun no write for as long as it may take to answer: no `put` waits for it."""
        patience_s = self.tier.patience_s
        return patience_s is not None and asyncio.get_running_loop().time() - self._moved_at_s > patience_s

    @property
    def stuck(self) -> int:
        """Writes that outlived their deadline and still hold memory."""
        return len(self._stuck)

    def _drop_queue(self) -> None:
        for lease in self._queue.drain():
            self.counters.dropped += 1
            lease.release()
        self._room.set()
        self._settle()


@dataclass(frozen=True)
class FlushReport:
    """What a flush or a close achieved, by tier."""

    written: dict[str, int] = field(default_factory=dict)
    pending: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return not any(self.pending.values())


class FanOut:
    """All writers of a cache."""

    def __init__(self, writers: list[TierWriter]) -> None:
        self.writers = writers

    async def offer(self, leases: list[Lease], another: LeaseMaker) -> None:
        """Queue chunks for every tier that lacks them. Uses up `leases`, also when cancelled.

        Each writer gets a lease of its own, made by `another` for its tier.
        """
        try:
            for lease in leases:
                for writer in self.writers:
                    if writer.stores(lease.key):
                        writer.tier.used([lease.key])
                        continue
                    own = another(lease.key, writer.tier)
                    if own is not None and not writer.enqueue_nowait(own):
                        await writer.enqueue(own)
                lease.release()
        finally:
            for lease in leases:
                lease.release()

    def used(self, keys: Sequence[ChunkKey], another: LeaseMaker) -> None:
        """A request was served with `keys`: queue those that a tier wants by now and did not take when they were put."""
        for writer in self.writers:
            for key in writer.tier.used(keys):
                own = another(key, writer.tier)
                if own is not None and not writer.enqueue_nowait(own):
                    own.release()

    def continued(self, keys: Sequence[ChunkKey]) -> None:
        """A session that has come back needs `keys`."""
        for writer in self.writers:
            writer.tier.continued(keys)

    async def forget(
        self, keys: Sequence[ChunkKey], timeout_s: float, from_memory: Callable[[ChunkKey], None]
    ) -> None:
        """Remove chunks from every tier, waiting up to `timeout_s` for that; as `TierCache.forget`. `from_memory` is called
        for each in the same step of the loop: nothing that begins in between may find it in a tier and bring it back."""
        outcomes: dict[str, list[Outcome]] = {writer.tier.name: [] for writer in self.writers}
        for number, key in enumerate(keys, start=1):
            for writer in self.writers:
                outcomes[writer.tier.name].append(writer.forget(key))
            from_memory(key)
            if not number % _FORGOTTEN_AT_ONCE:
                await asyncio.sleep(0)
        every = [outcome for of_tier in outcomes.values() for outcome in of_tier]
        if every:
            await asyncio.wait(every, timeout=max(0.0, timeout_s))
        for of_tier in outcomes.values():
            for outcome in of_tier:
                if outcome.done() and (error := outcome.result()) is not None:
                    raise error
        left = {name: sum(not outcome.done() for outcome in of_tier) for name, of_tier in outcomes.items()}
        if any(left.values()):
            found = ", ".join(f"{name}: {count} of {len(keys)}" for name, count in left.items() if count)
            raise TierUnavailable(
                f"forget: not removed within {timeout_s:.1f} s ({found} chunks); nobody gets them from there any more, and "
                "they are removed when the tier answers"
            )

    async def flush(self, timeout_s: float) -> FlushReport:
        """Drain all queues, each for up to `timeout_s`, side by side."""
        before = {writer.tier.name: writer.counters.written for writer in self.writers}
        await asyncio.gather(*(writer.flush(timeout_s) for writer in self.writers))
        return FlushReport(
            written={w.tier.name: w.counters.written - before[w.tier.name] for w in self.writers},
            pending={w.tier.name: w.pending for w in self.writers},
            dropped={w.tier.name: w.counters.dropped for w in self.writers},
        )

    async def close(self) -> None:
        for writer in self.writers:
            with contextlib.suppress(asyncio.CancelledError):
                await writer.close()

