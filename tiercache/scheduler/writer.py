"""Write-behind: each tier has a bounded queue of leases and its own limit of concurrent writes.

`FanOut` offers stored chunks to all tiers that lack them, concurrently.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tiercache.core.breaker import Breaker, BreakerState
from tiercache.core.estimate import SECONDS, Distribution
from tiercache.core.keys import ChunkKey
from tiercache.errors import TierFull, TierUnavailable
from tiercache.memory.slots import Lease
from tiercache.memory.workers import all_or_none, was_cancelled
from tiercache.scheduler.removals import Attempt, Removals, all_ended
from tiercache.tiers.base import DeviceTier, Tier
from tiercache.tiers.cpu import CpuTier

logger = logging.getLogger("tiercache.writer")

_FORGOTTEN_AT_ONCE = 256
"""Keys that a `forget` handles in one iteration of the loop."""
_ATTEMPTS = 3
_FIRST_PAUSE_S = 0.05
"""Pause in seconds before the second attempt; it doubles for each further attempt."""


@dataclass(frozen=True)
class WriterSettings:
    queue_bytes: int
    """Limit of the chunks in the queue and of those being written. One chunk may be queued whatever its size."""
    on_full: str = "wait"
    """wait, skip or replace.

    With wait, a `put` waits for room until `wait_s` after its start, then skips. With skip, the chunk is not written to
    this tier. With replace, the oldest queued chunk is dropped instead.
    """
    wait_s: float = 1.0
    deadline_s: float = 30.0
    """A write that takes longer is abandoned: it counts as failed, and its memory stays leased until it ends."""
    most_at_once: int = 65536
    """Limit of concurrent writes, besides the tier's own. It bounds the arena memory that abandoned writes can keep."""


@dataclass
class WriterStatistics:
    written: int = 0
    skipped: int = 0
    replaced: int = 0
    dropped: int = 0
    """Chunks given up: the tier hung, was detached, its breaker was open, the writer closed, or every attempt failed."""
    declined: int = 0
    """Chunks that the tier did not want: larger than its cap, or not admitted."""
    retried: int = 0
    queued: int = 0
    queued_bytes: int = 0
    writing: int = 0
    breaker: str = BreakerState.CLOSED.value
    seconds: Distribution = field(default_factory=lambda: Distribution.of(SECONDS))
    """Durations of successful writes."""


@dataclass(eq=False, slots=True)
class _Write:
    """A chunk that has left the queue, until its last attempt has ended."""

    key: ChunkKey
    lease: Lease
    task: asyncio.Task[None] | None = None
    began_s: float = 0.0
    """The loop time at which the tier began this attempt."""
    timer: asyncio.TimerHandle | None = None
    """Runs while the tier writes."""


class TierWriter:
    """Owns the leases in its queue. Bound to the event loop."""

    def __init__(self, tier: Tier, settings: WriterSettings) -> None:
        self.tier = tier
        self.settings = settings
        self.breaker = Breaker(settings.deadline_s)
        self.counters = WriterStatistics()
        self._queue: OrderedDict[ChunkKey, Lease] = OrderedDict()
        """Chunks to write, oldest first. Each has a slot, so there are no more of them than slots."""
        self._queued_bytes = 0
        self._writing: set[_Write] = set()
        self._latest: dict[ChunkKey, _Write] = {}
        """The latest write of each key in `_writing`; it waits for an earlier write of forgotten bytes."""
        self._abandoned: set[_Write] = set()
        self.removals = Removals(tier, settings.deadline_s)
        self._room = asyncio.Event()
        self._line = asyncio.Lock()
        """Held by the first caller that waits for room."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._waited_in_vain = False
        """True if a call has waited for room until its deadline, and no chunk has left the queue for the tier since."""

    @property
    def pending(self) -> int:
        """Number of chunks queued or being written."""
        return len(self._queue) + len(self._writing)

    @property
    def abandoned(self) -> Sequence[asyncio.Task[None]]:
        """Writes that outlived their deadline and still hold memory."""
        return [write.task for write in tuple(self._abandoned) if write.task is not None]

    def holds(self, key: ChunkKey) -> bool:
        """Return True if the latest bytes of `key`, put since its last `forget`, are queued or being written."""
        return key in self._queue or (key in self._latest and self._latest[key].lease.findable)

    def enqueue_nowait(self, lease: Lease, *, first: bool = False) -> bool:
        """Queue `lease` if there is room, or the policy makes room, and no other call waits for room.

        The waiting call itself passes `first`. Returns True if the writer has taken the lease, even to drop it, and
        False if the caller may wait for room with `enqueue`.
        """
        if self._closed or self.tier.traffic.draining or self._hangs or self._is_refused():
            self.counters.dropped += 1
            lease.release()
            return True
        key = lease.key
        if not lease.findable:  # forgotten while it waited for room
            lease.release()
            return True
        if self.holds(key):
            self.tier.used([key])
            lease.release()
            return True
        if self._line.locked() and not first:
            return False
        settings, length = self.settings, lease.payload_bytes
        while self._queue and self._held_bytes + length > settings.queue_bytes:
            if settings.on_full == "wait":
                return False
            if settings.on_full == "skip":
                self.counters.skipped += 1
                lease.release()
                return True
            self._take(next(iter(self._queue))).release()
            self.counters.replaced += 1
        self._queue[key] = lease
        self._queued_bytes += length
        self._idle.clear()
        self._start_writes()
        return True

    async def enqueue(self, leases: deque[Lease], until_s: float) -> None:
        """Queue `leases` in order, waiting for room as configured until the loop time `until_s`; skip the others.

        Calls are served in order of arrival. Takes the leases out of the deque, and owns all of them in any case,
        cancellation included.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(until_s), self._line:
                while leases:
                    if self.enqueue_nowait(leases[0], first=True):
                        leases.popleft()
                    elif self._stalls or loop.time() >= until_s:
                        break
                    else:
                        self._room.clear()
                        await self._room.wait()
        except TimeoutError:
            self._waited_in_vain = True
        finally:
            self.skip(leases)

    def skip(self, leases: deque[Lease]) -> None:
        """Skip the writes of `leases` for lack of room. Takes them out of the deque."""
        self.counters.skipped += len(leases)
        while leases:
            leases.pop().release()

    def forget(self, keys: Sequence[ChunkKey]) -> list[Attempt]:
        """Remove `keys` from the queue, and from the tier once their reads and writes in flight have ended.

        The tier does not serve them until then, and later puts of them are written after the removal.
        """
        self._drop(keys)
        return self.removals.begin(keys)

    async def drained(self) -> None:
        """Wait until all chunks are written or given up. Cancellation changes nothing."""
        await self._idle.wait()

    async def close(self, until_s: float) -> None:
        """Stop: `give_up` chunks, and take no more."""
        self._closed = True
        self.removals.close()
        await self.give_up(until_s)

    async def give_up(self, until_s: float) -> None:
        """Give up queued chunks. Writes in flight may end until the loop time `until_s`, and are abandoned then."""
        self._drop_queue()
        if tasks := [write.task for write in self._writing if write.task is not None]:
            await asyncio.wait(tasks, timeout=max(0.0, until_s - asyncio.get_running_loop().time()))
        waiting = []
        for write in tuple(self._writing):
            self._abandon(write)
            if write.timer is None and write.task is not None:  # it waits for its next attempt
                write.task.cancel()
                waiting.append(write.task)
        await asyncio.gather(*waiting, return_exceptions=True)

    def replace_tier(self, before: Tier, after: Tier) -> list[asyncio.Task[Any]]:
        """Use `after` in place of the tier `before`, if that is this writer's. Return the operations in flight there."""
        if self.tier is not before:
            return []
        self.tier = self.removals.tier = after
        for breaker in (self.breaker, self.removals.breaker):
            breaker.succeeded(asyncio.get_running_loop().time())  # of the other one; its probe may never end
        return [*(write.task for write in self._writing if write.task is not None), *self.removals.lanes]

    def statistics(self) -> WriterStatistics:
        state = BreakerState.DETACHED if self.tier.traffic.draining else self.breaker.state
        counters = replace(self.counters, seconds=self.counters.seconds.copy(), breaker=state.value)
        counters.queued = len(self._queue)
        counters.queued_bytes = self._queued_bytes
        counters.writing = len(self._writing)
        return counters

    # Writes

    def _start_writes(self) -> None:
        """Begin queued writes up to the tier's limit, which includes abandoned writes, since they occupy its threads.

        While a write probes the tier, the others wait in the queue.
        """
        now_s = asyncio.get_running_loop().time()
        while self._queue and len(self._writing) + len(self._abandoned) < self._places:
            if not self.breaker.allows(now_s):
                if not self.breaker.probing(now_s):
                    self._drop_queue()
                return
            key = next(iter(self._queue))
            lease = self._take(key)
            self._waited_in_vain = False
            self._room.set()
            self._latest[key] = write = _Write(key, lease, began_s=now_s)
            self._writing.add(write)
            write.task = asyncio.create_task(self._write(write), name=f"tiercache-write-{self.tier.name}")
            # For a task that is cancelled before its first step.
            write.task.add_done_callback(partial(self._end, write))

    async def _write(self, write: _Write) -> None:
        answered = False
        try:
            answered = await self._attempt(write)
        except Exception:
            logger.exception("%s: a write failed unexpectedly", self.tier.name)
        finally:
            if not (answered or write in self._abandoned):
                self.counters.dropped += 1
            self._end(write)

    def _end(self, write: _Write, task: asyncio.Task[None] | None = None) -> None:
        """Release the resources of a write once its memory is no longer in use. Idempotent."""
        if write not in self._writing and write not in self._abandoned:
            return
        write.lease.release()
        self._abandoned.discard(write)
        self._leave_table(write)
        self._start_writes()

    async def _attempt(self, write: _Write) -> bool:
        """Write a chunk, with retries.

        Returns False if it is given up, True if the tier answered, or if the chunk was forgotten.
        """
        loop, lease, counters = asyncio.get_running_loop(), write.lease, self.counters
        for attempt in range(_ATTEMPTS):
            if attempt:
                counters.retried += 1
                await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
                if not self.breaker.allows(loop.time()):
                    break
                write.began_s = loop.time()
            removed = await self.removals.ended(write.key, self.settings.deadline_s)
            if not removed or not lease.findable:
                self.breaker.abandoned(loop.time(), write.began_s)  # this may have been the probe
                if not lease.findable:  # it was forgotten meanwhile
                    return True
                break
            write.began_s = loop.time()
            tier = self.tier  # it may have been replaced
            send = tier.write_device if lease.on_device and isinstance(tier, DeviceTier) else tier.write
            tier.traffic.begin(write.key)
            write.timer = loop.call_later(self.settings.deadline_s, self._outlived, write)
            try:
                stored = await send(write.key, lease.padded, lease.payload_bytes)
            except (Exception, asyncio.CancelledError) as error:
                if write in self._abandoned:
                    return False
                if was_cancelled():
                    self.breaker.abandoned(loop.time(), write.began_s)
                    raise
                if isinstance(error, TierFull):
                    if self.breaker.state is BreakerState.CLOSED:
                        logger.warning("%s: paused: %s", tier.name, error)
                    self.breaker.trip(loop.time(), began_s=write.began_s)
                    break
                logger.warning("%s: a write failed: %s", tier.name, error or type(error).__name__)
                self.breaker.failed(loop.time(), began_s=write.began_s)
                continue
            finally:
                write.timer.cancel()
                write.timer = None
                tier.traffic.end(write.key)
            if write in self._abandoned:
                return False
            took_s = loop.time() - write.began_s
            self.breaker.succeeded(loop.time(), took_s)
            if stored:
                counters.written += 1
                counters.seconds.add(took_s)
                return True
            counters.declined += 1
            return True
        return False

    def _outlived(self, write: _Write) -> None:
        """Called at the deadline of a write."""
        logger.warning("%s: a write took longer than %.1f s and was given up", self.tier.name, self.settings.deadline_s)
        self._abandon(write)
        tell = self.breaker.trip if self._hangs else self.breaker.failed
        tell(asyncio.get_running_loop().time(), began_s=write.began_s)
        if self._hangs or self._is_refused():
            self._drop_queue()

    def _abandon(self, write: _Write) -> None:
        """Stop waiting for a write. It keeps its memory and its place in the tier until it ends."""
        if write.timer is not None:
            write.timer.cancel()
        self._abandoned.add(write)
        self.counters.dropped += 1
        self._leave_table(write)

    def _leave_table(self, write: _Write) -> None:
        self._writing.discard(write)
        if self._latest.get(write.key) is write:
            del self._latest[write.key]
        if not self.pending:
            self._idle.set()

    def _is_refused(self) -> bool:
        """Return True while the breaker is open and no probe is in flight."""
        now_s = asyncio.get_running_loop().time()
        return not (self.breaker.would_allow(now_s) or self.breaker.probing(now_s))

    @property
    def _hangs(self) -> bool:
        """True if abandoned writes occupy every place in the tier."""
        return len(self._abandoned) >= self._places

    @property
    def _places(self) -> int:
        """Limit of concurrent writes, including abandoned writes."""
        return min(self.tier.traits.write_concurrency, self.settings.most_at_once)

    @property
    def _stalls(self) -> bool:
        """True if a call has waited in vain, or the tier is being probed: no `put` waits for it."""
        return self._waited_in_vain or self.breaker.probing(asyncio.get_running_loop().time())

    # Queue

    @property
    def _held_bytes(self) -> int:
        """Bytes of the chunks that are queued, being written, or abandoned. They cannot be evicted from the hot cache."""
        return self._queued_bytes + sum(write.lease.payload_bytes for write in (*self._writing, *self._abandoned))

    def _take(self, key: ChunkKey) -> Lease:
        """Take a chunk out of the queue."""
        lease = self._queue.pop(key)
        self._queued_bytes -= lease.payload_bytes
        return lease

    def _drop_queue(self) -> None:
        self.counters.dropped += len(self._queue)
        self._drop(tuple(self._queue))

    def _drop(self, keys: Sequence[ChunkKey]) -> None:
        """Drop the chunks of `keys` that are queued."""
        for key in keys:
            if key in self._queue:
                self._take(key).release()
        self._room.set()
        if not self.pending:
            self._idle.set()


@dataclass(frozen=True)
class FlushReport:
    """Chunks by tier and outcome, from the beginning of a flush or a close to its end.

    `pending` chunks were neither written nor given up at its end, and `dropped` chunks were given up. `declined` chunks
    were offered to the tier, which did not admit them or had them already. What happened before the call, as while a
    tier was down, is counted in `TierCache.statistics().writers`.
    """

    written: dict[str, int] = field(default_factory=dict)
    pending: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    declined: dict[str, int] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """True if no chunk is pending. Chunks may have been dropped."""
        return not any(self.pending.values())

    def describe(self) -> str:
        """Return a log line that counts the pending and dropped chunks of each tier together."""
        left = {tier: pending + self.dropped.get(tier, 0) for tier, pending in self.pending.items()}
        lines = ", ".join(f"{tier}: {chunks}" for tier, chunks in left.items() if chunks)
        return f"chunks that were not written: {lines}" if lines else "every chunk was written"


class FanOut:
    """All writers of a cache.

    `keeps(key)` returns True if this cache writes `key`: if several caches hold the same bytes above the same tiers,
    only one writes.
    """

    def __init__(self, writers: list[TierWriter], keeps: Callable[[ChunkKey], bool] = lambda key: True) -> None:
        self.writers = writers
        self._keeps = keeps

    async def offer(
        self, leases: Sequence[Lease], began_s: float, deadline_s: float, staged: Sequence[Lease] = ()
    ) -> None:
        """Queue chunks for every tier that lacks them. Consumes the leases, also when cancelled.

        Each writer gets its own lease: on device memory if a chunk is `staged` there and the tier writes from it. All
        writers are offered everything before any wait, and full queues are awaited concurrently, until `deadline_s` of
        the put or `wait_s` after its start `began_s`. A writer skips chunks that do not fit then.
        """
        waiting: dict[TierWriter, deque[Lease]] = {}
        nearest = list({lease.key: lease for lease in (*leases, *staged)}.values()) if staged else leases
        try:
            for writer in self.writers:
                for lease in nearest if writer.tier.serves_device else leases:
                    if not self._keeps(lease.key):
                        continue
                    if writer.tier.offers(lease.key):
                        writer.tier.used([lease.key])
                    elif (own := lease.sibling()) is not None and (writer in waiting or not writer.enqueue_nowait(own)):
                        waiting.setdefault(writer, deque()).append(own)
            for lease in (*leases, *staged):
                lease.release()
            leases = staged = ()
            if waiting:
                await all_or_none(
                    [
                        asyncio.ensure_future(writer.enqueue(own, min(deadline_s, began_s + writer.settings.wait_s)))
                        for writer, own in waiting.items()
                    ]
                )
        finally:
            for lease in (*leases, *staged):
                lease.release()
            for writer, left in waiting.items():
                writer.skip(left)  # leases of a call that was cancelled before its first step

    def used(self, keys: Sequence[ChunkKey], cpu: CpuTier) -> None:
        """Record an access of a request to `keys` in the tiers. Queue hot chunks that a tier now wants."""
        for writer in self.writers:
            for key in filter(self._keeps, writer.tier.used(keys)):
                own = cpu.lease(key, writes=True)
                if own is not None and not writer.enqueue_nowait(own):
                    writer.skip(deque([own]))

    def continued(self, keys: Sequence[ChunkKey]) -> None:
        """Tell the tiers that a continued session needs `keys`."""
        for writer in self.writers:
            writer.tier.continued(keys)

    async def forget(
        self, keys: Sequence[ChunkKey], timeout_s: float, from_memory: Callable[[Sequence[ChunkKey]], None]
    ) -> None:
        """Remove chunks from every tier, waiting up to `timeout_s`; see `TierCache.forget`. A cancellation leaves no
        key out.

        `from_memory` is called with the keys of a part in the same step that makes the tiers refuse them, so that no
        operation in between finds a chunk in a tier and restores it.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        keys = list(dict.fromkeys(keys))
        if not keys:
            return
        attempts: dict[TierWriter, list[Attempt]] = {writer: [] for writer in self.writers}
        parts = iter([keys[start : start + _FORGOTTEN_AT_ONCE] for start in range(0, len(keys), _FORGOTTEN_AT_ONCE)])

        def forget(part: Sequence[ChunkKey]) -> None:
            for writer, begun in attempts.items():
                begun += writer.forget(part)
            from_memory(part)

        for writer in self.writers:
            writer.removals.try_one()
        try:
            for part in parts:
                forget(part)
                await asyncio.sleep(0)
            async with asyncio.timeout_at(until_s):
                for begun in attempts.values():
                    await all_ended(begun)
        except TimeoutError:
            pass  # those that are left are counted below
        finally:
            for part in parts:
                forget(part)
            for writer in self.writers:
                writer.removals.give_up_excess(keys)
        for attempt in itertools.chain(*attempts.values()):
            if attempt.done() and (error := attempt.result()) is not None:
                raise error
        left = {writer.tier.name: sum(not attempt.done() for attempt in begun) for writer, begun in attempts.items()}
        if any(left.values()):
            found = ", ".join(f"{name}: {count} of {len(keys)}" for name, count in left.items() if count)
            raise TierUnavailable(
                f"forget: not removed within {timeout_s:.1f} s ({found} chunks); they are not read from there any more, "
                "and are removed when the tier answers"
            )

    async def flush(self, timeout_s: float) -> FlushReport:
        """Drain all queues concurrently, each for up to `timeout_s`. Cancellation changes nothing."""
        before = self.counts()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.drained()
        return self.report(before)

    async def drained(self) -> None:
        """Wait until all chunks are written or given up. Cancellation changes nothing."""
        for writer in self.writers:
            await writer.drained()

    async def removed(self) -> None:
        """Wait until the removal of every forgotten chunk has succeeded or failed once. Cancellation changes nothing."""
        for writer in self.writers:
            await writer.removals.tried()

    def counts(self) -> dict[str, WriterStatistics]:
        """Return the counts so far, by tier."""
        return {writer.tier.name: replace(writer.counters) for writer in self.writers}

    def report(self, before: dict[str, WriterStatistics]) -> FlushReport:
        """Return the changes since `counts` returned `before`, and the pending chunks."""
        since = [(writer.tier.name, before[writer.tier.name], writer.counters) for writer in self.writers]
        return FlushReport(
            written={name: now.written - then.written for name, then, now in since},
            pending={writer.tier.name: writer.pending for writer in self.writers},
            dropped={name: now.dropped - then.dropped for name, then, now in since},
            declined={name: now.declined - then.declined for name, then, now in since},
        )

    async def close(self, until_s: float) -> None:
        """Stop all writers concurrently; see `TierWriter.close`."""
        await asyncio.gather(*(writer.close(until_s) for writer in self.writers))
