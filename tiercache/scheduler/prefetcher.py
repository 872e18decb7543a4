"""The async half of prefetching: carries out what the plan (`core/prefetch/`) decides, and holds what came of it.

A promoted chunk is held, so that nothing evicts it before the request that it was fetched for, until somebody reads it or
nobody expects it any more. The plan bounds how much that may be.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tiercache.core.keys import ChunkKey
from tiercache.core.prediction.base import Prediction
from tiercache.core.prefetch import Fetch, PrefetchPlan
from tiercache.scheduler.reader import Reader
from tiercache.tiers.leases import Lease

logger = logging.getLogger("tiercache.prefetch")

_SWEEP_S = 1.0
_SEARCH_PAUSE_S = 0.1
_MOST_LOOKED_FOR = 1 << 18
"""Keys that tiers are being asked about for prefetches; what comes on top of them is cancelled at once."""


@dataclass(frozen=True)
class PrefetchProgress:
    """Of one prefetch, in chunks; `chunk_bytes` each (a shorter tail counts as whole)."""

    asked: int
    found: int
    """Of the contiguous prefix that some tier has; the others are `missing`."""
    in_flight: int
    promoted: int
    """In the hot cache: fetched, or there already."""
    missing: int
    """Found in no tier, behind such a gap, or lost on the way."""
    cancelled: int
    """Not fetched any more: by `cancel`, because the cache was closed, or because nobody came within the `ttl`."""
    chunk_bytes: int

    @property
    def done(self) -> bool:
        return self.promoted + self.missing + self.cancelled == self.asked

    @property
    def promoted_bytes(self) -> int:
        return self.promoted * self.chunk_bytes

    @property
    def found_bytes(self) -> int:
        return self.found * self.chunk_bytes


class PrefetchHandle:
    """One `cache.prefetch`. Awaiting it waits until every chunk is promoted, missing or cancelled, and gives the progress;
    cancelling whoever awaits leaves the prefetch alone, `cancel` ends it."""

    def __init__(self, prefetcher: Prefetcher, subject: str, keys: Sequence[ChunkKey]) -> None:
        self.subject = subject
        self.keys = keys
        """Empty once it has ended."""
        self._prefetcher = prefetcher
        self._found = 0
        self._reach = 0
        """How many of `keys` the prefetcher looks out for."""
        self._looked = False
        self._left: set[ChunkKey] = set(keys)
        self._asked = len(self._left)
        self._promoted = 0
        self._cancelled = 0
        self._ended = asyncio.Event()
        if not self._left:
            self._ended.set()

    @property
    def progress(self) -> PrefetchProgress:
        """At this moment."""
        return PrefetchProgress(
            asked=self._asked,
            found=self._found,
            in_flight=sum(1 for key in self._left if self._prefetcher.is_in_flight(key)),
            promoted=self._promoted,
            missing=self._asked - len(self._left) - self._promoted - self._cancelled,
            cancelled=self._cancelled,
            chunk_bytes=self._prefetcher.plan.chunk_bytes,
        )

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def cancel(self) -> None:
        """Begin no more reads. Chunks that are on their way arrive, and may be evicted like others. Idempotent."""
        self._prefetcher.withdraw(self)

    def __await__(self) -> Generator[object, None, PrefetchProgress]:
        yield from self._ended.wait().__await__()
        return self.progress

    def _look_for(self, found: set[ChunkKey]) -> None:
        """Some tier has these; the others are missing."""
        self._found = len(found)
        self._left &= found
        self._end_if_done()

    def _settle(self, key: ChunkKey, *, promoted: bool) -> None:
        if key in self._left:
            self._left.discard(key)
            self._promoted += promoted
            self._end_if_done()

    def _give_up(self, keys: Sequence[ChunkKey], *, cancelled: bool) -> None:
        given_up = self._left.intersection(keys)
        self._left -= given_up
        if cancelled:
            self._cancelled += len(given_up)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if not self._left:
            self._ended.set()
            self._prefetcher.forget(self)
            self.keys = ()  # whoever keeps the handle wants to know what became of it


class Prefetcher:
    """All methods belong to the event loop. Nothing here waits for a tier but the reads themselves."""

    def __init__(self, reader: Reader, plan: PrefetchPlan, *, read_s: float = 10.0) -> None:
        """`read_s`: how long one chunk may take."""
        self.reader = reader
        self.plan = plan
        self.read_s = read_s
        self._loop = asyncio.get_running_loop()
        self._lanes = max(2, reader.read_concurrency)
        self._reads: dict[ChunkKey, asyncio.Task[None]] = {}
        self._holds: dict[ChunkKey, Lease] = {}
        self.pinned = 0
        """Chunks that somebody else keeps, out of the same share."""
        self._handles: dict[str, PrefetchHandle] = {}
        self._by_key: dict[ChunkKey, list[PrefetchHandle]] = {}
        self._looking: set[asyncio.Task[None]] = set()
        self._keys_looked_for = 0
        self._timer: asyncio.TimerHandle | None = None
        self._swept_s = self._loop.time()
        self._search_s = float("-inf")
        """When a victim may be looked for again, after there was none."""
        self._pumping = False
        self._closed = False
        reader.cpu.on_use = self.asked
        for tier in reader.mapped:
            tier.mappings.on_use = self.asked
        reader.flights.on_demand = self.asked
        reader.cpu.on_evict = self._evicted

    @property
    def held(self) -> int:
        """Chunks that are kept for somebody to come."""
        return len(self._holds)

    def has_room(self, key: ChunkKey) -> bool:
        """Whether a chunk that is hot may be kept, too: within the share, and leaving reads and writes theirs."""
        kept = len(self._holds) + len(self._reads) + self.pinned
        return (kept + 1) * self.plan.chunk_bytes <= self.plan.settings.share_bytes and self.reader.cpu.spares(key)

    def hand_over(self, key: ChunkKey) -> Lease | None:
        """The hold on a chunk, for whoever keeps it from now on: he counts as the one that it was fetched for."""
        self.plan.transfers.asked([key])
        return self._holds.pop(key, None)

    def is_in_flight(self, key: ChunkKey) -> bool:
        return key in self._reads

    def begin(self, prediction: Prediction, deadline_s: float) -> PrefetchHandle:
        """Act on an explicit hint. Tiers are asked first (until `deadline_s`, a loop time) what they have of it."""
        handle = PrefetchHandle(self, prediction.subject, prediction.keys)
        keys = len(handle.keys)
        if self._looking and self._keys_looked_for + keys > _MOST_LOOKED_FOR:
            handle._give_up(handle.keys, cancelled=True)
        if not handle.done:
            self._handles[handle.subject] = handle
            self._keys_looked_for += keys
            task = self._loop.create_task(self._look(handle, prediction, deadline_s), name="tiercache-prefetch")
            self._looking.add(task)
            task.add_done_callback(partial(self._looked, keys))
        return handle

    def _looked(self, keys: int, task: asyncio.Task[None]) -> None:
        self._keys_looked_for -= keys
        self._looking.discard(task)

    def offer(self, prediction: Prediction | None) -> None:
        """Act on what a predictor says; None says nothing."""
        if prediction is not None and not self._closed:
            self.plan.offer(prediction, self._loop.time())
            self.pump()

    def withdraw(self, handle: PrefetchHandle) -> None:
        if not handle.done:
            self.plan.withdraw("hints", handle.subject)
            handle._give_up(handle.keys, cancelled=True)

    def asked(self, key: ChunkKey) -> None:
        """Somebody came for a chunk that is held for him, or on its way for him."""
        self.plan.transfers.asked([key])
        self.plan.met(key)
        hold = self._holds.pop(key, None)
        if hold is not None:
            hold.release()
            self._pump_soon()

    def removed(self, key: ChunkKey) -> None:
        """A chunk that is held was removed from the hot cache: nobody can find it any more."""
        self.plan.transfers.removed(key)
        hold = self._holds.pop(key, None)
        if hold is not None:
            hold.release()
            self._pump_soon()

    def forget(self, handle: PrefetchHandle) -> None:
        """It has ended."""
        if self._handles.pop(handle.subject, None) is not None:
            for key in handle.keys[: handle._reach]:
                handles = self._by_key.get(key, [])
                if handle in handles:
                    handles.remove(handle)
                if not handles:
                    self._by_key.pop(key, None)

    def let_go(self) -> int:
        """Keep nothing any more; returns how many chunks may be evicted like others now."""
        count = len(self._holds)
        self.plan.transfers.finish()
        for hold in self._holds.values():
            hold.release()
        self._holds.clear()
        return count

    async def close(self) -> None:
        """End everything; who waits for a handle learns that the rest is cancelled."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for handle in list(self._handles.values()):
            handle._give_up(handle.keys, cancelled=True)
        tasks = [*self._looking, *self._reads.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.let_go()

    async def _look(self, handle: PrefetchHandle, prediction: Prediction, deadline_s: float) -> None:
        found = 0
        try:
            found, _ = await self.reader.lookup(prediction.keys, deadline_s)
        except Exception:
            # Somebody waits for the handle: all of it is missing then.
            logger.exception("a look-up failed unexpectedly")
        keys = prediction.keys[:found]
        handle._look_for(set(keys))
        if not handle.done:
            handle._reach = found
            for key in handle._left:
                self._by_key.setdefault(key, []).append(handle)
            self.reader.cpu.renew(keys)
            self.offer(replace(prediction, keys=keys))
            handle._looked = True
            self._end_if_expired(handle)

    def _pump_soon(self) -> None:
        """Once for all that happens in this turn of the loop."""
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self.pump)

    def pump(self) -> None:
        """Begin as many reads as there are lanes and the plan allows."""
        self._pumping = False
        if self._closed:
            return
        now_s = self._loop.time()
        self._begin_reads(now_s)
        if now_s >= self._swept_s + _SWEEP_S:
            self._swept_s = now_s
            self._release_unexpected()
            for handle in list(self._handles.values()):
                self._end_if_expired(handle)
        wakes = [wake_s for wake_s in (self.plan.wake_s(now_s),) if wake_s is not None]
        if now_s < self._search_s:
            wakes = [self._search_s]
        if self._holds or self._handles:
            wakes.append(self._swept_s + _SWEEP_S)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(min(wakes), self.pump) if wakes else None

    def _begin_reads(self, now_s: float) -> None:
        if now_s < self._search_s:
            return
        cpu = self.reader.cpu
        self._count_kept()
        while len(self._reads) < self._lanes and (fetch := self.plan.next(now_s, self._is_hot)) is not None:
            if not self.plan.finds_room(partial(cpu.next_victim, fetch.key), cpu.renew, fetch, now_s):
                # The others are worth no more and would find none either: each search takes milliseconds of the loop.
                self.plan.no_room(fetch, now_s)
                self._search_s = now_s + _SEARCH_PAUSE_S
                return
            self._reads[fetch.key] = self._loop.create_task(self._read(fetch), name="tiercache-prefetch")

    async def _read(self, fetch: Fetch) -> None:
        key = fetch.key
        hold: Lease | None = None
        try:
            hold = await self.reader.promote(key, self._loop.time() + self.read_s, fetch.parent)
        finally:
            del self._reads[key]
            self._tell(key, promoted=hold is not None)
            if hold is None:
                self.plan.transfers.failed(key)
            else:
                self.plan.transfers.fetched(key)
                if not hold.findable:  # removed as soon as it had come
                    self.plan.transfers.removed(key)
                if key in self.plan.transfers.ready:
                    self._keep(key, hold)
                else:
                    hold.release()  # whoever it was for has come meanwhile
            self._pump_soon()

    def _is_hot(self, key: ChunkKey) -> bool:
        """Asked by the plan about a chunk that is expected: if it is there already it is kept there."""
        if key in self._reads:
            return True  # somebody came for it already; whoever waits is told when it is here
        if not self.reader.has_at_hand(key):
            return False
        if key not in self._holds and self.has_room(key):
            hold = self.reader.hold(key)
            if hold is not None:
                self._keep(key, hold)
                self._count_kept()
        self._tell(key, promoted=True)
        return True

    def _evicted(self, keys: Sequence[ChunkKey]) -> None:
        self.plan.evicted(keys, self._loop.time())

    def _keep(self, key: ChunkKey, hold: Lease) -> None:
        old = self._holds.pop(key, None)
        if old is not None:
            old.release()
        self._holds[key] = hold

    def _count_kept(self) -> None:
        self.plan.kept_bytes = (len(self._holds) - len(self.plan.transfers.ready) + self.pinned) * self.plan.chunk_bytes

    def _release_unexpected(self) -> None:
        for key in [key for key in self._holds if not self.plan.expects(key)]:
            self._holds.pop(key).release()

    def _end_if_expired(self, handle: PrefetchHandle) -> None:
        """Its time is over: what is not on its way by now will not be fetched for it."""
        if handle._looked and not self.plan.acts_on("hints", handle.subject):
            handle._give_up([key for key in handle._left if key not in self._reads], cancelled=True)

    def _tell(self, key: ChunkKey, *, promoted: bool) -> None:
        for handle in list(self._by_key.get(key, ())):
            handle._settle(key, promoted=promoted)
