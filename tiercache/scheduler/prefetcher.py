"""Carry out the prefetch plan (`core/prefetch.py`): hints, requests in an engine's queue, sessions, and pins.

A promoted chunk is pinned until it is read or no prediction expects it any more, within the byte budget of the plan.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import isfinite
from operator import index

from tiercache.checks import check_loop, check_seconds
from tiercache.core.keys import ChunkKey, check_keys
from tiercache.core.prefetch import (
    HINTS,
    QUEUE,
    SESSIONS,
    Account,
    Prediction,
    PrefetchPlan,
    PrefetchSettings,
    Promotion,
    SessionPredictor,
    hint,
)
from tiercache.errors import ConfigError
from tiercache.scheduler.reads import Reader
from tiercache.tiers.leases import Lease

logger = logging.getLogger("tiercache.prefetch")

_SWEEP_S = 1.0
_MAX_KEYS_LOOKED_UP = 1 << 18
"""Keys of prefetches whose look-ups are in flight; further prefetches are cancelled at once."""
_QUEUE_PRIORITY = -(1 << 40)
"""Requests in the queue are served before everything that is only predicted, in their order."""
_QUEUED_SHARES = 4
"""The queue is remembered up to this many times the prefetcher's share. Chunks beyond that are read on demand."""
_QUEUE_TTL_S = 60.0
_BEGUN_TTL_S = 10.0
"""The time that chunks are kept for a turn that has begun and has not read them yet."""


@dataclass(frozen=True)
class PrefetchProgress:
    """Progress of one prefetch, in chunks of `chunk_bytes` each (a shorter tail counts as whole)."""

    asked: int
    found: int
    """Length of the contiguous prefix that some tier has; the others are `missing`."""
    in_flight: int
    promoted: int
    """Chunks in the hot cache: read from a tier, or there already."""
    missing: int
    """Found in no tier, behind such a gap, or failed to be read."""
    cancelled: int
    """Not promoted because of `cancel`, a closed cache, or the end of the `ttl`."""
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
    """The handle of one `cache.prefetch`.

    Awaiting it returns the progress once every chunk is promoted, missing or cancelled. Cancelling a task that awaits it
    does not cancel the prefetch; `cancel` does.
    """

    def __init__(self, prefetcher: Prefetcher, subject: str, keys: Sequence[ChunkKey]) -> None:
        self.subject = subject
        self.keys: Sequence[ChunkKey] = keys
        """Empty when the prefetch has ended."""
        self.offered = False
        """True once the tiers were asked and the plan has the prediction."""
        self._prefetcher = prefetcher
        self._found = 0
        self._left: set[ChunkKey] = set(keys)
        self._asked = len(self._left)
        self._promoted = 0
        self._cancelled = 0
        self._ended = asyncio.Event()
        if not self._left:
            self._ended.set()

    @property
    def progress(self) -> PrefetchProgress:
        """The progress at this moment."""
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
        """Begin no more reads. Reads in flight still publish; their chunks are not pinned. Idempotent."""
        if not self.done:
            self._prefetcher.withdraw(self)
            self.give_up(cancelled=True)

    def __await__(self) -> Generator[object, None, PrefetchProgress]:
        yield from self._ended.wait().__await__()
        return self.progress

    # Called by the prefetcher

    def found(self, keys: Sequence[ChunkKey]) -> None:
        """Record that a tier has `keys`; the others are missing."""
        there = set(keys)
        self._found = len(there)
        self._left &= there
        self._end_if_done()

    def settle(self, key: ChunkKey, *, promoted: bool) -> None:
        if key in self._left:
            self._left.discard(key)
            self._promoted += promoted
            self._end_if_done()

    def give_up(self, *, cancelled: bool, but_in_flight: bool = False) -> None:
        left = {key for key in self._left if but_in_flight and self._prefetcher.is_in_flight(key)}
        if cancelled:
            self._cancelled += len(self._left) - len(left)
        self._left = left
        self._end_if_done()

    def _end_if_done(self) -> None:
        if not self._left:
            self._ended.set()
            self._prefetcher.forget(self)
            self.keys = ()


class Prefetcher:
    """Promotes chunks for requests to come, and pins chunks: `TierCache.ahead`.

    All methods belong to the event loop and raise RuntimeError elsewhere. None but `close` waits. A wrong prediction costs
    the bandwidth that the settings allow and nothing else.
    """

    def __init__(
        self,
        reader: Reader,
        settings: PrefetchSettings,
        chunk_bytes: int,
        *,
        read_s: float = 10.0,
        on_continued: Callable[[Sequence[ChunkKey]], None] | None = None,
    ) -> None:
        """`read_s` is the timeout of the read of one chunk. `on_continued` is called with the chunks of sessions that came
        back."""
        self.plan = PrefetchPlan(settings, chunk_bytes)
        self._reader = reader
        self._read_s = read_s
        self._on_continued = on_continued
        self.sessions = SessionPredictor()
        self._loop = asyncio.get_running_loop()
        self._lanes = max(2, reader.read_concurrency)
        self._numbers = count()
        self._reads: dict[ChunkKey, asyncio.Task[None]] = {}
        self._held: dict[ChunkKey, Lease] = {}
        self._pins: dict[ChunkKey, tuple[Lease, asyncio.TimerHandle]] = {}
        self._queue: deque[Prediction] = deque()
        self._handles: dict[str, PrefetchHandle] = {}
        self._by_key: dict[ChunkKey, list[PrefetchHandle]] = {}
        self._lookups: set[asyncio.Task[None]] = set()
        self._keys_looked_up = 0
        self._timer: asyncio.TimerHandle | None = None
        self._swept_s = self._loop.time()
        self._pumping = False
        self._closed = False
        reader.cpu.on_pinned_access, reader.cpu.on_forget = self._used, self._removed
        for tier in reader.mapped:
            tier.mappings.on_pinned_access, tier.mappings.on_forget = self._used, self._removed
        reader.on_demand = self._used
        reader.cpu.on_evict = self._evicted

    @property
    def promotes(self) -> bool:
        """True if there is a hot cache to promote into, or a tier that can be mapped."""
        return self._reader.cpu.keep or bool(self._reader.mapped)

    @property
    def accounts(self) -> dict[str, Account]:
        """The outcome of prefetching by source, in bytes."""
        return self.plan.accounts.by_source

    @property
    def held(self) -> int:
        """Chunks that are kept hot for a prediction now."""
        return len(self._held)

    @property
    def pinned(self) -> int:
        """Chunks that are pinned now."""
        return len(self._pins)

    def prefetch(
        self, keys: Sequence[ChunkKey], due_in_s: float, ttl_s: float, priority: int, look_s: float
    ) -> PrefetchHandle:
        """Prefetch as `TierCache.prefetch`. `look_s` is the timeout of the look-up."""
        if not isfinite(due_in_s):
            raise ValueError(f"deadline: expected a number of seconds, found {due_in_s}")
        check_seconds("ttl", ttl_s)
        priority = index(priority)
        if not self.promotes:
            raise ConfigError(
                "prefetch: local_cpu is false, so there is no hot cache to promote into; set local_cpu: true"
            )
        check_keys(keys)
        now_s, subject = self._loop.time(), f"#{next(self._numbers)}"
        prediction = hint(keys, now_s, subject, due_in_s=due_in_s, ttl_s=ttl_s, priority=priority)
        handle = PrefetchHandle(self, subject, keys)
        if self._lookups and self._keys_looked_up + len(keys) > _MAX_KEYS_LOOKED_UP:
            handle.give_up(cancelled=True)
        if not handle.done:
            self._handles[subject] = handle
            self._keys_looked_up += len(keys)
            task = self._loop.create_task(self._look_up(handle, prediction, now_s + look_s), name="tiercache-prefetch")
            self._lookups.add(task)
            task.add_done_callback(partial(self._lookup_ended, len(keys)))
        return handle

    def queued(self, keys: Sequence[ChunkKey]) -> None:
        """Record that a request for `keys` was appended to the engine's queue."""
        self._reader.cpu.renew(keys)
        if self._closed or self._reader.prefix_at_hand(keys) == len(keys):
            return
        while self._queue and not self.plan.has(QUEUE, self._queue[0].subject):
            self._queue.popleft()
        most = self.plan.settings.share_bytes // self.plan.chunk_bytes
        if sum(len(prediction.keys) for prediction in self._queue) >= _QUEUED_SHARES * most:
            return
        now_s, number = self._loop.time(), next(self._numbers)
        priority = _QUEUE_PRIORITY + number
        prediction = Prediction(QUEUE, str(number), keys[:most], now_s, now_s, now_s + _QUEUE_TTL_S, priority)
        self._queue.append(prediction)
        self.plan.offer(prediction, now_s)
        self.pump()

    def served(self, keys: Sequence[ChunkKey]) -> None:
        """Record that the first request for `keys` in the engine's queue was served."""
        if self._queue:
            served = set(keys)
            for prediction in self._queue:
                if prediction.keys[-1] in served:
                    self._queue.remove(prediction)
                    self.plan.withdraw(QUEUE, prediction.subject, self._loop.time())
                    break

    def began(self, session: str, keys: Sequence[ChunkKey]) -> None:
        """Record that a turn of `session` has begun, which needs `keys`."""
        check_loop(self._loop)
        check_keys(keys)
        now_s = self._loop.time()
        self.plan.withdraw(SESSIONS, session, now_s, _BEGUN_TTL_S)
        if self.sessions.began(session, now_s) and self._on_continued is not None:
            self._on_continued(keys)
        self.pump()

    def ended(self, session: str, keys: Sequence[ChunkKey], kind: str = "") -> None:
        """Record that a turn has ended; the session's next one will begin with `keys`. `kind` has no effect."""
        check_loop(self._loop)
        check_keys(keys)
        now_s, plan = self._loop.time(), self.plan
        least_chance = plan.settings.least_probability
        prediction = self.sessions.ended(session, keys, now_s, plan.lifetime_s(now_s), least_chance)
        if self.sessions.came_back(session) and self._on_continued is not None:
            self._on_continued(keys)
        if prediction is not None and not self._closed:
            plan.offer(prediction, now_s)
            self.pump()

    def over(self, session: str) -> None:
        """Record that a session will not come back; chunks that were promoted for it may be evicted."""
        check_loop(self._loop)
        self.sessions.over(session)
        self.plan.withdraw(SESSIONS, session, self._loop.time())
        self.pump()

    def pin(self, keys: Sequence[ChunkKey], ttl_s: float = 600.0) -> int:
        """Keep those of `keys` that are hot for `ttl_s` seconds from now; return how many are pinned. Prefetch the others
        first.

        Pins and prefetched chunks together take no more than the prefetcher's share of the hot cache, and leave reads and
        writes their part of it. A prefetched chunk that is pinned counts as used. A closed cache pins nothing.
        """
        check_loop(self._loop)
        check_keys(keys)
        check_seconds("ttl_s", ttl_s)
        pinned = 0
        for key in keys if not self._closed else ():
            lease: Lease | None
            if (pin := self._pins.pop(key, None)) is not None:
                lease = pin[0]
                pin[1].cancel()
            elif key in self._held:
                lease = self._held.pop(key)
                self.plan.used([key])
            else:
                lease = self._reader.pin(key) if self._has_room(key) else None
            if lease is not None:
                self._pins[key] = lease, self._loop.call_later(ttl_s, self.unpin, [key])
                pinned += 1
        return pinned

    def unpin(self, keys: Sequence[ChunkKey]) -> None:
        """Unpin `keys`; they may be evicted."""
        check_loop(self._loop)
        check_keys(keys)
        for key in keys:
            pin = self._pins.pop(key, None)
            if pin is not None:
                pin[1].cancel()
                pin[0].release()

    def release_all(self) -> None:
        """Release the chunks that are kept for predictions."""
        self.plan.accounts.finish()
        while self._held:
            self._held.popitem()[1].release()

    async def close(self) -> None:
        """End all reads, look-ups and pins. Handles report the rest of their chunks as cancelled."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for handle in list(self._handles.values()):
            handle.give_up(cancelled=True)
        tasks = [*self._lookups, *self._reads.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.unpin(list(self._pins))
        self.release_all()

    # Handles

    def is_in_flight(self, key: ChunkKey) -> bool:
        return key in self._reads

    def withdraw(self, handle: PrefetchHandle) -> None:
        self.plan.withdraw(HINTS, handle.subject, self._loop.time())

    def forget(self, handle: PrefetchHandle) -> None:
        """Drop a handle that has ended."""
        if self._handles.pop(handle.subject, None) is not None and handle.offered:
            for key in handle.keys:
                handles = self._by_key.get(key, [])
                if handle in handles:
                    handles.remove(handle)
                if not handles:
                    self._by_key.pop(key, None)

    async def _look_up(self, handle: PrefetchHandle, prediction: Prediction, deadline_s: float) -> None:
        found = 0
        try:
            found, _ = await self._reader.lookup(prediction.keys, deadline_s)
        except Exception:
            logger.exception("a look-up failed unexpectedly")  # all chunks count as missing
        keys = prediction.keys[:found]
        handle.found(keys)
        if not handle.done and not self._closed:
            handle.keys, handle.offered = keys, True
            for key in dict.fromkeys(keys):
                self._by_key.setdefault(key, []).append(handle)
            self._reader.cpu.renew(keys)
            self.plan.offer(replace(prediction, keys=keys), self._loop.time())
            self.pump()
            self._end_if_expired(handle)

    def _lookup_ended(self, keys: int, task: asyncio.Task[None]) -> None:
        self._keys_looked_up -= keys
        self._lookups.discard(task)

    def _end_if_expired(self, handle: PrefetchHandle) -> None:
        """Cancel the chunks that are not in flight of a prefetch that the plan has dropped."""
        if handle.offered and not self.plan.has(HINTS, handle.subject):
            handle.give_up(cancelled=True, but_in_flight=True)

    def _tell(self, key: ChunkKey, *, promoted: bool) -> None:
        for handle in list(self._by_key.get(key, ())):
            handle.settle(key, promoted=promoted)

    # Promotions

    def pump(self) -> None:
        """Begin as many reads as there are lanes and the plan allows, and release chunks that are not expected any more."""
        self._pumping = False
        if self._closed:
            return
        now_s = self._loop.time()
        self._begin_reads(now_s)
        if now_s >= self._swept_s + _SWEEP_S:
            self._swept_s = now_s
            for key in [key for key in self._held if not self.plan.expects(key)]:
                self._held.pop(key).release()
            for handle in list(self._handles.values()):
                self._end_if_expired(handle)
        wakes = []
        if self._held or self._handles:
            wakes.append(self._swept_s + _SWEEP_S)
        if len(self._reads) < self._lanes and (wake_s := self.plan.wake_s(now_s)) is not None:
            wakes.append(wake_s)  # otherwise the next read that ends pumps
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(min(wakes), self.pump) if wakes else None

    def _pump_soon(self) -> None:
        """Pump once for all events in this iteration of the loop."""
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self.pump)

    def _begin_reads(self, now_s: float) -> None:
        cpu, plan = self._reader.cpu, self.plan
        self._count_kept()
        while len(self._reads) < self._lanes and (promotion := plan.next(now_s, self._is_hot)) is not None:
            key = promotion.key
            if plan.find_room(partial(cpu.next_victim, key), cpu.renew, promotion):
                self._reads[key] = self._loop.create_task(self._read(promotion), name="tiercache-prefetch")
            else:
                plan.no_room(promotion, now_s)

    async def _read(self, promotion: Promotion) -> None:
        key = promotion.key
        lease: Lease | None = None
        try:
            lease = await self._reader.promote(key, self._loop.time() + self._read_s, promotion.parent)
        finally:
            del self._reads[key]
            self._tell(key, promoted=lease is not None)
            if lease is None:
                self.plan.accounts.failed(key)
            else:
                self._keep_promoted(key, lease)
            self._pump_soon()

    def _keep_promoted(self, key: ChunkKey, lease: Lease) -> None:
        if not self.plan.accounts.arrived(key):
            lease.release()  # it was used meanwhile
        elif not lease.findable:
            self.plan.accounts.wasted(key)
            lease.release()
        else:
            self._keep(key, lease)

    def _is_hot(self, key: ChunkKey) -> bool:
        """Called by the plan for a chunk that is expected. Keeps it hot if it is."""
        if key in self._reads:
            return True  # handles are settled when the read ends
        if not self._reader.has_at_hand(key):
            return False
        if key not in self._held and self._has_room(key):
            lease = self._reader.pin(key)
            if lease is not None:
                self._keep(key, lease)
                self._count_kept()
        self._tell(key, promoted=True)
        return True

    def _has_room(self, key: ChunkKey) -> bool:
        """Return True if one more hot chunk may be kept: within the share, and leaving reads and writes theirs."""
        kept = len(self._held) + len(self._reads) + len(self._pins)
        return (kept + 1) * self.plan.chunk_bytes <= self.plan.settings.share_bytes and self._reader.cpu.spares(key)

    def _keep(self, key: ChunkKey, lease: Lease) -> None:
        old = self._held.pop(key, None)
        if old is not None:
            old.release()
        self._held[key] = lease

    def _count_kept(self) -> None:
        kept = len(self._held) - len(self.plan.accounts.ready) + len(self._pins)
        self.plan.kept_bytes = kept * self.plan.chunk_bytes

    # Called by the reader and the memory that it reads into

    def _used(self, key: ChunkKey) -> None:
        """Called when a chunk that is kept or in flight is read."""
        self.plan.used([key])
        self._release(key)

    def _removed(self, key: ChunkKey) -> None:
        """Called when a chunk that is kept or pinned was removed from the hot cache."""
        self.unpin([key])
        self.plan.accounts.wasted(key)
        self._release(key)

    def _release(self, key: ChunkKey) -> None:
        lease = self._held.pop(key, None)
        if lease is not None:
            lease.release()
            self._pump_soon()

    def _evicted(self, keys: Sequence[ChunkKey]) -> None:
        self.plan.evicted(keys, self._loop.time())
