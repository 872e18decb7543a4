"""Execute the prefetch plan (`core/prefetch.py`): hints, requests in an engine's queue, sessions, and pins.

A promoted chunk is pinned until its access or until no hint or queued request expects it any more, within the budget.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from itertools import count
from math import isfinite
from operator import index

from tiercache.core.keys import ChunkKey, check_keys
from tiercache.core.prefetch import (
    PRELOAD,
    QUEUE,
    SESSIONS,
    PrefetchPlan,
    PrefetchProgress,
    PrefetchRequest,
    Promotion,
    SessionPredictor,
    hint,
)
from tiercache.errors import ConfigError
from tiercache.memory.slots import Lease
from tiercache.payloads import check_loop, check_seconds
from tiercache.scheduler.reads import Reader

logger = logging.getLogger("tiercache.prefetch")

_MAX_KEYS_LOOKED_UP = 1 << 18
"""Limit of keys with a prefetch lookup in flight; further prefetches are cancelled at once."""
_QUEUE_PRIORITY = -(1 << 40)
"""Priority of queued requests, in their order and before all predictions."""
_QUEUED_SHARES = 4
"""Limit of the queue in multiples of the prefetcher's share. Chunks beyond it are read on demand."""
_QUEUE_TTL_S = 60.0
_RECENT = "recent"
_PRELOAD_PRIORITY, _PRELOAD_TTL_S = 1 << 41, 3600.0
"""The warm start comes after all predictions."""


class PrefetchHandle:
    """The handle of one `cache.prefetch`.

    Awaiting it returns the progress once every chunk is promoted, missing or cancelled. Cancelling a task that awaits it
    does not cancel the prefetch; `cancel` does.
    """

    def __init__(self, prefetcher: Prefetcher, request: PrefetchRequest) -> None:
        self._prefetcher = prefetcher
        self._request = request
        self._ended = asyncio.Event()
        if request.progress.done:
            self._ended.set()
        request.on_done = self._ended.set

    @property
    def progress(self) -> PrefetchProgress:
        """The current progress."""
        return replace(self._request.progress, chunk_bytes=self._prefetcher.plan.chunk_bytes)

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def cancel(self) -> None:
        """Begin no more reads, and unpin the chunks, also after the end. Reads in flight still publish. Idempotent."""
        self._prefetcher.cancel(self._request)

    def __await__(self) -> Generator[object, None, PrefetchProgress]:
        yield from self._ended.wait().__await__()
        return self.progress


class Prefetcher:
    """Promotes chunks for later requests, and pins chunks: `TierCache.ahead`.

    All methods belong to the event loop and raise RuntimeError elsewhere. Only `close` waits. A wrong prediction costs
    only the bandwidth that the settings allow.
    """

    def __init__(
        self,
        reader: Reader,
        plan: PrefetchPlan,
        *,
        on_continued: Callable[[Sequence[ChunkKey]], None] | None = None,
    ) -> None:
        """Lookups and reads have the deadlines of `reader`. `on_continued` is called with the chunks of sessions that
        have a further turn.
        """
        self.plan = plan
        self.sessions = SessionPredictor()
        self._reader = reader
        self._on_continued = on_continued
        self._loop = asyncio.get_running_loop()
        self._lanes = max(2, sum(tier.tier.traits.read_concurrency + 2 for tier in reader.tiers))
        self._numbers = count()
        self._preloads = count()
        self._reads: dict[ChunkKey, asyncio.Task[None]] = {}
        self._kept: dict[ChunkKey, Lease] = {}
        """Pins of the chunks that the plan keeps."""
        self._pins: dict[ChunkKey, tuple[Lease, asyncio.TimerHandle]] = {}
        self._lookups: dict[asyncio.Task[None], PrefetchRequest] = {}
        self._keys_looked_up = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        reader.cpu.on_pinned_access, reader.cpu.on_forget = self._used, self._removed
        for tier in reader.mapped:
            tier.mappings.on_pinned_access, tier.mappings.on_forget = self._used, self._removed
        reader.on_demand = self._used

    @property
    def promotes(self) -> bool:
        """True if there is a hot cache to promote into, or a tier that can be mapped."""
        return self._reader.cpu.keep or bool(self._reader.mapped)

    @property
    def held(self) -> int:
        """Number of chunks kept hot for a request."""
        return len(self._kept)

    @property
    def pinned(self) -> int:
        """Number of pinned chunks."""
        return len(self._pins)

    def prefetch(self, keys: Sequence[ChunkKey], due_in_s: float, ttl_s: float, priority: int) -> PrefetchHandle:
        """Prefetch as `TierCache.prefetch` does."""
        if not isfinite(due_in_s):
            raise ValueError(f"deadline: expected a number of seconds, found {due_in_s}")
        check_seconds("ttl", ttl_s)
        priority = index(priority)
        if not self.promotes:
            raise ConfigError(
                "prefetch: local_cpu is false, so there is no hot cache to promote into; set local_cpu: true"
            )
        check_keys(keys)
        now_s = self._loop.time()
        request = hint(keys, now_s, next(self._numbers), due_in_s, ttl_s, priority)
        if self._lookups and self._keys_looked_up + len(request.keys) > _MAX_KEYS_LOOKED_UP:
            request.cancel()
        handle = PrefetchHandle(self, request)
        if not handle.done:
            self._keys_looked_up += len(request.keys)
            task = self._loop.create_task(self._look_up(request), name="tiercache-prefetch")
            self._lookups[task] = request
            task.add_done_callback(self._lookups.pop)
        return handle

    def cancel(self, request: PrefetchRequest) -> None:
        """Stop promoting for a request, and unpin the chunks promoted for it."""
        request.cancel()
        self.plan.withdraw(request.source, request.subject)
        self._pump_at(self._loop.time())

    def queued(self, keys: Sequence[ChunkKey]) -> None:
        """Record that a request for `keys` was appended to the engine's queue."""
        self._reader.cpu.renew(keys)
        if self._closed or self._reader.prefix_at_hand(keys) == len(keys):
            return
        most = self.plan.share_bytes // self.plan.chunk_bytes
        if self.plan.keys_of[QUEUE] >= _QUEUED_SHARES * most:
            return
        keys = keys[:most]
        if not self.plan.has(QUEUE, keys[-1]):
            now_s, priority = self._loop.time(), _QUEUE_PRIORITY + next(self._numbers)
            self.plan.offer(PrefetchRequest(QUEUE, keys[-1], keys, now_s, now_s, now_s + _QUEUE_TTL_S, priority), now_s)
            self.pump()

    def preload(self, keys: Sequence[ChunkKey]) -> PrefetchRequest:
        """Promote the chunks that were hot before a restart, the hottest first, while slots are free."""
        now_s = self._loop.time()
        request = PrefetchRequest(PRELOAD, _RECENT, keys, now_s, now_s, now_s + _PRELOAD_TTL_S, _PRELOAD_PRIORITY)
        self.plan.offer(request, now_s)
        self.pump()
        return request

    def served(self, keys: Sequence[ChunkKey]) -> None:
        """Record that a request for `keys` was served: the queued requests that end with any of them are over."""
        if self.plan.keys_of[PRELOAD]:
            for key in keys:
                if key not in self._kept:
                    self.plan.used(key, hot=True)
        if self.plan.keys_of[QUEUE]:
            for key in keys:
                self.plan.withdraw(QUEUE, key)
            self._pump_at(self._loop.time())

    def began(self, session: str, keys: Sequence[ChunkKey]) -> None:
        """Record that a turn of `session` has begun, which needs `keys`."""
        check_loop(self._loop)
        check_keys(keys)
        for key in keys:
            if key not in self._kept:
                self.plan.used(key, hot=self._reader.has_at_hand(key))
        self.plan.withdraw(SESSIONS, session)
        if self.sessions.began(session, self._loop.time()) and self._on_continued is not None:
            self._on_continued(keys)
        self.pump()

    def ended(self, session: str, keys: Sequence[ChunkKey]) -> None:
        """Record that a turn has ended; the session's next turn begins with `keys`."""
        check_loop(self._loop)
        check_keys(keys)
        now_s = self._loop.time()
        prediction = self.sessions.ended(session, keys, now_s)
        if self.sessions.came_back(session) and self._on_continued is not None:
            self._on_continued(keys)
        if prediction is not None and self.promotes and not self._closed:
            self.plan.offer(prediction, now_s)
            self.pump()

    def over(self, session: str) -> None:
        """Record that a session has ended for good; chunks promoted for it may be evicted."""
        check_loop(self._loop)
        self.sessions.over(session)
        self.plan.withdraw(SESSIONS, session)
        self.pump()

    def pin(self, keys: Sequence[ChunkKey], ttl_s: float = 600.0) -> int:
        """Keep the hot chunks of `keys` for `ttl_s` seconds from now, and return how many are pinned.

        Call `prefetch` before for chunks that are not hot. Pins and prefetched chunks together use at most the
        prefetcher's share of the hot cache, and leave reads and writes their part of it. A pin counts as an access to a
        prefetched chunk. A closed cache pins no chunk.
        """
        check_loop(self._loop)
        check_keys(keys)
        check_seconds("ttl_s", ttl_s)
        pinned = 0
        for key in dict.fromkeys(keys) if not self._closed else ():
            lease: Lease | None
            if (pin := self._pins.pop(key, None)) is not None:
                lease = pin[0]
                pin[1].cancel()
            elif (lease := self._kept.pop(key, None)) is not None:
                self.plan.used(key, hot=True)
            else:
                lease = self._pin_in_share(key)
            if lease is not None:
                self._pins[key] = lease, self._loop.call_later(ttl_s, self.unpin, [key])
                pinned += 1
            self.plan.pinned = len(self._pins)
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
        self.plan.pinned = len(self._pins)
        self._pump_at(self._loop.time())

    def release_all(self) -> None:
        """Drop all prefetches, and release the chunks that are kept for them."""
        self.plan.clear()
        self._release(self.plan.take_unexpected())

    async def close(self) -> None:
        """End all reads, lookups and pins. Handles report the rest of their chunks as cancelled."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for request in self._lookups.values():
            request.cancel()
        self.release_all()
        tasks = [*self._lookups, *self._reads.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.unpin(list(self._pins))

    async def _look_up(self, request: PrefetchRequest) -> None:
        found, keys = 0, request.keys
        try:
            found, _ = await self._reader.lookup(keys)
        except Exception:
            logger.exception("a lookup failed unexpectedly")  # all chunks count as missing
        finally:
            self._keys_looked_up -= len(keys)
        if request.truncate(found):
            self._reader.cpu.renew(request.keys)
            self.plan.offer(request, self._loop.time())
            self.pump()

    # Promotions

    def pump(self) -> None:
        """Begin as many reads as lanes and plan allow, and release chunks that are no longer expected."""
        now_s = self._loop.time()
        self.plan.run_timers(now_s)
        self._release(self.plan.take_unexpected())
        if not self._reader.cpu.pool.free:
            self.plan.cut(PRELOAD, _RECENT)
        while len(self._reads) < self._lanes and (promotion := self.plan.next(now_s, self._pin_hot)) is not None:
            self._reads[promotion.key] = self._loop.create_task(self._read(promotion), name="tiercache-prefetch")
        if (wake_s := self.plan.wake_s(now_s)) is not None:
            self._pump_at(wake_s)

    def _pump_at(self, time_s: float) -> None:
        """Pump at `time_s` of the loop, once for all events until then."""
        if self._closed:  # a timer would keep the whole cache until then
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(time_s, self.pump)

    async def _read(self, promotion: Promotion) -> None:
        key = promotion.key
        lease: Lease | None = None
        try:
            parent, time = promotion.parent, None
            if promotion.source == PRELOAD:  # a list is not a prefix
                parent, time = None, -next(self._preloads)
            lease = await self._reader.promote(key, self._loop.time() + self._reader.settings.deadline_s, parent, time)
        finally:
            del self._reads[key]
            kept = self.plan.ended(promotion, promoted=lease is not None)
            if lease is not None and kept:
                self._kept[key] = lease
                if not lease.findable:
                    self._removed(key)
            elif lease is not None:
                lease.release()
            self._pump_at(self._loop.time())

    def _pin_hot(self, key: ChunkKey, pin: bool) -> bool | None:
        """Called by the plan for an expected chunk; see `PrefetchPlan.next`."""
        if not self._reader.has_at_hand(key):
            return None
        if not pin or (lease := self._pin_in_share(key)) is None:
            return False
        self._kept[key] = lease
        return True

    def _pin_in_share(self, key: ChunkKey) -> Lease | None:
        """Pin a hot chunk if it fits into the share and leaves reads and writes their part."""
        return self._reader.pin(key) if self.plan.has_room and self._reader.cpu.spares(key) else None

    def _release(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            lease = self._kept.pop(key, None)
            if lease is not None:
                lease.release()
                self._pump_at(self._loop.time())

    # Called by the reader and the destination tier

    def _used(self, key: ChunkKey) -> None:
        """Called on an access to a chunk that is kept, pinned or in flight."""
        self.plan.used(key, hot=True)
        self._release([key])

    def _removed(self, key: ChunkKey) -> None:
        """Called when a kept or pinned chunk was removed from the hot cache."""
        self.unpin([key])
        self.plan.removed(key)
        self._release([key])
