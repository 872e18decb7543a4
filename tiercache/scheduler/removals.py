"""Removals from one tier: each begins when no read or write of its key is in flight there, and goes on until it is done."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from tiercache.core.breaker import Breaker, BreakerSettings
from tiercache.core.keys import ChunkKey
from tiercache.errors import CacheClosed, TierUnavailable
from tiercache.memory.workers import was_cancelled
from tiercache.tiers.base import Tier

logger = logging.getLogger("tiercache.writer")

_REMEMBERED_KEYS = 1 << 16
"""Keys whose removal is tried again, at about 200 bytes each."""
_RETRY_S = 1.0
"""The least pause before those that failed are tried again; the breaker's pauses grow."""
_AT_ONCE = 64
"""Removals by one task in one turn of the loop, from a tier that does not wait for anything."""


@dataclass(eq=False)
class Request:
    """The removal of the keys of one forget. A key is settled when it was removed, or that has failed once."""

    settled: asyncio.Future[None]
    """Done when all keys are settled."""
    left: int
    """Keys that are not settled."""
    error: Exception | None = None
    over: bool = False
    """True once no caller waits for it."""


class Removals:
    """All methods belong to the event loop. Until a removal has ended the tier's traffic refuses its key, so one that hangs
    or fails never brings a chunk back. It is tried again until it succeeds or the cache is closed: those that failed are
    tried in turn, one timer for all of them, as the breaker allows. Each forget tries one key in any case: one chunk that
    cannot be removed says little about others.

    The breaker is not that of writes: a full tier refuses writes, and removals make room there.

    Once no caller waits for them, at most `_REMEMBERED_KEYS` keys are kept to be tried again. The chunks of the others stay
    in the tier, and this process neither reads nor writes them there until the cache is closed (`KeyTraffic.refuse`).
    """

    def __init__(self, tier: Tier, deadline_s: float) -> None:
        """`deadline_s` is how long one removal may take before it counts as slow, and how long a write waits for it."""
        self.tier = tier
        self.breaker = Breaker(BreakerSettings(slow_s=deadline_s))
        self._deadline_s = deadline_s
        self._wanted: dict[ChunkKey, tuple[Request, ...] | None] = {}
        """Keys to be removed, with the requests that they belong to; None where that has failed and is tried again."""
        self._due: deque[ChunkKey] = deque()
        """Keys with nothing in flight. First those to be tried now, then those that failed."""
        self._now = 0
        """How many of them are to be tried now."""
        self._called = False
        """True if the next one is tried whatever the breaker says: each forget tries one."""
        self._lanes: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._retry_at_s = 0.0
        """The loop time of the timer."""
        """For the next attempt at those that failed."""
        self._requests: dict[Request, None] = {}
        """Those that are not settled, in their order."""
        self._error: Exception | None = None
        """Why the latest one that failed did."""
        self._progress = asyncio.Event()
        """Set when a removal has ended or failed."""
        self._closed = False
        tier.traffic.on_clear = self._begin

    def __len__(self) -> int:
        return len(self._wanted)

    async def ended(self, key: ChunkKey) -> bool:
        """Wait until `key` is not to be removed. Return False where that has failed, or takes longer than the deadline."""
        if not self.tier.traffic.refuses(key):
            return True
        try:
            async with asyncio.timeout(self._deadline_s):
                while self.tier.traffic.refuses(key):
                    if self._closed or self._wanted.get(key) is None:
                        return False
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            return False
        return True

    def request(self, keys: int) -> Request:
        """Begin a request for so many keys, all different. The caller says with `leave` when it stops waiting for it."""
        request = Request(asyncio.get_running_loop().create_future(), keys)
        self._requests[request] = None
        self._settle_one(request, 0, None)
        self._called = True
        return request

    def want(self, keys: Sequence[ChunkKey], request: Request) -> None:
        """Begin to remove some of the keys of `request`, or join removals in flight: since those were wanted nothing was
        written."""
        wanted = self._wanted
        new = [key for key in keys if key not in wanted]
        if len(new) < len(keys):
            for key in filter(wanted.__contains__, keys):
                self._join(key, request)
            self._now = len(self._due)  # some may have failed before, and are tried again
        wanted.update(dict.fromkeys(new, (request,)))
        clear = [key for key in new if self.tier.traffic.want_removal(key)]
        self._due.extendleft(reversed(clear))
        self._now += len(clear)
        self._add_lanes()

    def leave(self, request: Request) -> None:
        """Say that no caller waits for `request` any more. Keys that are too many to be remembered are given up."""
        request.over = True
        excess = len(self._wanted) - _REMEMBERED_KEYS
        if excess <= 0 or self._closed:
            return
        kept: list[ChunkKey] = []
        given_up = 0
        while self._due and given_up < excess:
            key = self._due.pop()
            if not all(other.over for other in self._wanted[key] or ()):
                kept.append(key)
                continue
            self._settle(self._wanted.pop(key), None)
            self.tier.traffic.refuse(key)
            self.tier.traffic.removed(key)
            given_up += 1
        self._due.extend(reversed(kept))
        self._now = min(self._now, len(self._due))
        if given_up:
            logger.warning(
                "%s: more than %d forgotten chunks could not be removed; %d others stay there, and are neither read nor "
                "written there until the cache is closed: find out why the tier does not remove them (%s)",
                self.tier.name, _REMEMBERED_KEYS, given_up, self._error or "it takes long",
            )  # fmt: skip
            self._progress.set()

    async def settled(self) -> None:
        """Wait until each key that was forgotten by now is removed, or that has failed once."""
        if self._requests:
            await asyncio.wait([request.settled for request in self._requests])

    def close(self) -> None:
        """Stop. Does not wait for removals that hang."""
        self._closed = True
        if self._wanted:
            logger.warning(
                "%s: %d forgotten chunks were not removed before the close; a durable tier has them after a restart",
                self.tier.name, len(self._wanted),
            )  # fmt: skip
        self._now = 0
        self._progress.set()
        if self._timer is not None:
            self._timer.cancel()
        for lane in self._lanes:
            lane.cancel()
        closed = CacheClosed(f"{self.tier.name}: the cache was closed before a chunk was removed")
        for request in tuple(self._requests):
            self._settle_one(request, request.left, closed)

    def _join(self, key: ChunkKey, request: Request) -> None:
        before = self._wanted[key] or ()
        for other in before:
            if other.over:
                self._settle_one(other, 1, None)
        self._wanted[key] = (*(other for other in before if not other.over), request)

    def _begin(self, key: ChunkKey) -> None:
        """Called when the last read or write of a key that is to be removed has ended."""
        if self._closed:
            return
        self._due.appendleft(key)
        self._now += 1
        self._add_lanes()

    def _add_lanes(self) -> None:
        for _ in range(min(self._now, self.tier.traits.write_concurrency - len(self._lanes))):
            lane = asyncio.create_task(self._remove_due(), name=f"tiercache-remove-{self.tier.name}")
            self._lanes.add(lane)

    async def _remove_due(self) -> None:
        removed = 0
        try:
            while self._now and self._may_try():
                self._now -= 1
                await self._remove(self._due.popleft())
                removed += 1
                if not removed % _AT_ONCE:
                    await asyncio.sleep(0)
        finally:
            # Now, not when callbacks run: what is due in between would find a lane that takes no more.
            task = asyncio.current_task()
            assert task is not None
            self._lanes.discard(task)

    def _may_try(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        if self.breaker.allows(now_s) or self._called:
            self._called = False
            return True
        if not self.breaker.probing(now_s):
            unavailable = TierUnavailable(f"{self.tier.name}: removals failed and wait for a while: {self._error}")
            for key in islice(self._due, self._now):
                self._fail(key, unavailable)
            self._now = 0
        self._retry_later()
        return False

    async def _remove(self, key: ChunkKey) -> None:
        loop, traffic = asyncio.get_running_loop(), self.tier.traffic
        answered, began_s = traffic.answered, loop.time()
        try:
            await self.tier.remove(key)
            took_s = loop.time() - began_s
            if traffic.questions or traffic.answered != answered:
                # Look-ups may have seen the chunk before it went, and told the tier's index since, or tell it only now.
                if traffic.questions:
                    await asyncio.wait(list(traffic.questions))
                await self.tier.remove(key)
        except (Exception, asyncio.CancelledError) as caught:
            if was_cancelled():
                raise
            cancelled = TierUnavailable(f"{self.tier.name}: a removal was cancelled")
            error = caught if isinstance(caught, Exception) else cancelled
            if not self._closed:
                if self._wanted[key] is None:
                    logger.info("%s: a chunk could still not be removed: %s", self.tier.name, error)
                self._error = error
                self.breaker.failed(loop.time(), began_s=began_s)
                self._due.append(key)
                self._fail(key, error)
                self._retry_later()
            return
        self.breaker.succeeded(loop.time(), took_s)
        requests = self._wanted.pop(key)
        traffic.removed(key)
        self._settle(requests, None)
        self._progress.set()
        self._add_lanes()

    def _fail(self, key: ChunkKey, error: Exception) -> None:
        requests, self._wanted[key] = self._wanted[key], None
        self._settle(requests, error)
        self._progress.set()

    def _settle(self, requests: tuple[Request, ...] | None, error: Exception | None) -> None:
        for request in requests or ():
            self._settle_one(request, 1, error)

    def _settle_one(self, request: Request, keys: int, error: Exception | None) -> None:
        request.left -= keys
        request.error = request.error or error
        if not request.left and request in self._requests:
            del self._requests[request]
            request.settled.set_result(None)

    def _retry_later(self) -> None:
        """Retry when the breaker allows it, or earlier if that is due already. A probe in flight delays that for long; when
        it fails, only the breaker's pause counts."""
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        at_s = loop.time() + max(_RETRY_S, self.breaker.wait_s(loop.time()))
        if self._timer is not None:
            if self._retry_at_s <= at_s:
                return
            self._timer.cancel()
        self._retry_at_s = at_s
        self._timer = loop.call_at(at_s, self._retry)

    def _retry(self) -> None:
        self._timer = None
        self._now = len(self._due)
        self._add_lanes()
