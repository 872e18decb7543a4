"""Removals from one tier: each when nothing of its key is under way there any more, and until it is done."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from tiercache.core.breaker import Breaker, BreakerSettings
from tiercache.core.keys import ChunkKey
from tiercache.errors import CacheClosed, TierUnavailable
from tiercache.tiers.base import Tier

logger = logging.getLogger("tiercache.writer")

_REMEMBERED_KEYS = 1 << 16
"""Keys whose removal is tried again, at about 200 bytes each."""
_RETRY_S = 1.0
"""Before those that failed are tried again, at least; the breaker's pauses grow."""
_AT_ONCE = 64
"""Removals by one task in one turn of the loop, from a tier that does not wait for anything."""


@dataclass(eq=False)
class Request:
    """The removal of the keys of one forget. A key is settled when it was removed, or that has failed once."""

    settled: asyncio.Future[None]
    """Done when all keys are."""
    left: int
    """Keys that are not settled."""
    error: Exception | None = None
    over: bool = False
    """Whether nobody waits for it any more."""
    timer: asyncio.TimerHandle | None = None
    """Calls the writer when the removal takes too long."""


@dataclass(frozen=True, eq=False, slots=True)
class _Wanted:
    """Shared by all keys of which it is true."""

    since_s: float
    requests: tuple[Request, ...]


_FAILED = _Wanted(float("-inf"), ())


class Removals:
    """All methods belong to the event loop. Until a removal has ended the tier's traffic refuses its key, so one that hangs
    or fails never brings a chunk back. It is tried again until it succeeds or the cache is closed: those that failed are
    tried in turn, one timer for all of them, as the breaker allows. Each forget tries one of its keys in any case: one chunk
    that cannot be removed says little about others.

    The breaker is not that of writes: a full tier refuses writes, and removals make room there.

    Once nobody waits for them, at most `_REMEMBERED_KEYS` keys are kept to be tried again. The chunks of the others stay in
    the tier, and this process neither reads nor writes them there until the cache is closed (`KeyTraffic.refuse`).
    """

    def __init__(
        self, tier: Tier, patience_s: float, on_end: Callable[[ChunkKey], None], on_stall: Callable[[], None]
    ) -> None:
        """`on_end` is called when a key may be written again, `on_stall` when for some keys that may take long: their
        removal failed, or has not ended for `patience_s`."""
        self.tier = tier
        self.patience_s = patience_s
        self.breaker = Breaker(BreakerSettings(slow_s=patience_s))
        self._on_end = on_end
        self._on_stall = on_stall
        self._wanted: dict[ChunkKey, _Wanted] = {}
        self._due: deque[ChunkKey] = deque()
        """Nothing is under way of these. First those to be tried now, then those that failed."""
        self._now = 0
        """How many of them are to be tried now."""
        self._called = False
        """Whether the next one is tried whatever the breaker says: each forget tries one."""
        self._lanes: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        """For the next attempt at those that failed."""
        self._requests: dict[Request, None] = {}
        """Those that are not settled, in their order."""
        self._error: Exception | None = None
        """Why the latest one that failed did."""
        self._closed = False
        tier.traffic.on_clear = self._begin

    def __len__(self) -> int:
        return len(self._wanted)

    def stalled(self, key: ChunkKey) -> bool:
        """Whether it makes no sense to wait for the removal of `key`."""
        wanted = self._wanted.get(key)
        if wanted is None:
            return self.tier.traffic.refuses(key)
        # A timer may be early by its resolution.
        return asyncio.get_running_loop().time() - wanted.since_s >= 0.99 * self.patience_s

    def want(self, keys: Sequence[ChunkKey]) -> Request:
        """Begin to remove `keys`, all different, or join removals that are under way: since those were wanted nothing was
        written. Whoever waits for the request says with `leave` when that ends."""
        loop, wanted = asyncio.get_running_loop(), self._wanted
        request = Request(loop.create_future(), len(keys))
        if not keys:
            request.settled.set_result(None)
            return request
        self._requests[request] = None
        request.timer = loop.call_later(self.patience_s, self._on_stall)
        new = [key for key in keys if key not in wanted]
        if len(new) < len(keys):
            for key in filter(wanted.__contains__, keys):
                self._join(key, request)
            self._now = len(self._due)  # some may have failed before, and are tried again
        wanted.update(dict.fromkeys(new, _Wanted(loop.time(), (request,))))
        clear = [key for key in new if self.tier.traffic.want_removal(key)]
        self._due.extendleft(reversed(clear))
        self._now += len(clear)
        self._called = True
        self._add_lanes()
        return request

    def leave(self, request: Request) -> None:
        """Nobody waits for it any more. What is too much to be remembered is given up."""
        request.over = True
        excess = len(self._wanted) - _REMEMBERED_KEYS
        if excess <= 0 or self._closed:
            return
        kept: list[ChunkKey] = []
        given_up = 0
        while self._due and given_up < excess:
            key = self._due.pop()
            if not all(other.over for other in self._wanted[key].requests):
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
            self._on_stall()

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
        if self._timer is not None:
            self._timer.cancel()
        for lane in self._lanes:
            lane.cancel()
        closed = CacheClosed(f"{self.tier.name}: the cache was closed before a chunk was removed")
        for request in tuple(self._requests):
            self._settle_one(request, request.left, closed)

    def _join(self, key: ChunkKey, request: Request) -> None:
        wanted = self._wanted[key]
        for other in wanted.requests:
            if other.over:
                self._settle_one(other, 1, None)
        waiting = (other for other in wanted.requests if not other.over)
        self._wanted[key] = _Wanted(wanted.since_s, (*waiting, request))

    def _begin(self, key: ChunkKey) -> None:
        """Nothing is under way of it any more."""
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
                self._settle(self._wanted[key], unavailable)
                self._wanted[key] = _FAILED
            self._now = 0
            self._on_stall()
        self._retry_later()
        return False

    async def _remove(self, key: ChunkKey) -> None:
        loop, traffic = asyncio.get_running_loop(), self.tier.traffic
        answered, began_s = traffic.answered, loop.time()
        try:
            await self.tier.remove(key)
            took_s = loop.time() - began_s
            if traffic.questions or traffic.answered != answered:
                # They may have seen the chunk before it went, and have told the tier's index since, or tell it only now.
                if traffic.questions:
                    await asyncio.wait(list(traffic.questions))
                await self.tier.remove(key)
        except Exception as error:
            if not self._closed:
                self._failed(key, error, began_s)
            return
        self.breaker.succeeded(loop.time(), took_s)
        wanted = self._wanted.pop(key)
        traffic.removed(key)
        self._settle(wanted, None)
        self._on_end(key)
        self._add_lanes()

    def _failed(self, key: ChunkKey, error: Exception, began_s: float) -> None:
        self._error = error
        self.breaker.failed(asyncio.get_running_loop().time(), began_s=began_s)
        wanted, self._wanted[key] = self._wanted[key], _FAILED
        if wanted is _FAILED:
            logger.info("%s: a chunk could still not be removed: %s", self.tier.name, error)
        self._settle(wanted, error)
        self._due.append(key)
        self._on_stall()
        self._retry_later()

    def _settle(self, wanted: _Wanted, error: Exception | None) -> None:
        for request in wanted.requests:
            self._settle_one(request, 1, error)

    def _settle_one(self, request: Request, keys: int, error: Exception | None) -> None:
        request.left -= keys
        request.error = request.error or error
        if not request.left and request in self._requests:
            del self._requests[request]
            request.settled.set_result(None)
            if request.timer is not None:
                request.timer.cancel()

    def _retry_later(self) -> None:
        if self._timer is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(_RETRY_S, self.breaker.wait_s(loop.time())), self._retry)

    def _retry(self) -> None:
        self._timer = None
        self._now = len(self._due)
        self._add_lanes()
