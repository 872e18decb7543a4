"""Remove chunks from one tier: each removal begins when no read or write of its key is in flight, and is retried."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tiercache.core.breaker import Breaker, BreakerSettings
from tiercache.core.keys import ChunkKey
from tiercache.errors import CacheClosed, TierUnavailable
from tiercache.memory.workers import was_cancelled
from tiercache.tiers.base import Tier

logger = logging.getLogger("tiercache.writer")

_REMEMBERED_KEYS = 1 << 16
"""Limit of keys whose removal is retried, at about 200 bytes each."""
_RETRY_S = 1.0
"""Interval in seconds at which failed removals ask the breaker for another attempt. The breaker's pauses grow."""
_AT_ONCE = 64
"""Removals per task and iteration of the loop, for a tier that does not wait."""


@dataclass(eq=False)
class Request:
    """The removal of the keys of one forget. A key is settled when its removal has succeeded or failed once."""

    left: int
    """Number of keys that are not settled."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all keys are settled."""
    error: Exception | None = None
    over: bool = False
    """True once no caller waits for it."""


class Removals:
    """Removals from one tier. Bound to the event loop.

    Until a removal has ended the tier's traffic refuses its key, so a removal that hangs or fails never restores a
    chunk. It is retried until it succeeds or the cache is closed: failed removals are retried together when the breaker
    allows it. Each forget tries one key in any case, since one chunk that cannot be removed says little about others.

    The breaker is not that of writes: a full tier refuses writes, and removals make room there.

    Once no caller waits for them, at most `_REMEMBERED_KEYS` keys are kept for retries. The chunks of the others stay
    in the tier, and this process neither reads nor writes them there until the cache is closed (`KeyTraffic.refuse`).
    """

    def __init__(self, tier: Tier, deadline_s: float) -> None:
        """`deadline_s` is the time after which a removal counts as slow."""
        self.tier = tier
        self.breaker = Breaker(BreakerSettings(slow_s=deadline_s))
        self._wanted: dict[ChunkKey, tuple[Request, ...]] = tier.traffic.removing
        """Keys to remove, with the requests to notify."""
        self._due: deque[ChunkKey] = deque()
        """Keys with no operation in flight, to be tried now."""
        self._failed: dict[ChunkKey, None] = {}
        """Keys to be retried."""
        self._called = False
        """True if the next removal is tried even if the breaker refuses it, since each forget tries one key."""
        self.lanes: set[asyncio.Task[None]] = set()
        """Removals in flight."""
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception | None = None
        """The error of the latest failed removal."""
        self._closed = False
        tier.traffic.on_clear = self._begin

    def __len__(self) -> int:
        return len(self._wanted)

    async def ended(self, keys: Collection[ChunkKey], timeout_s: float | None = None) -> bool:
        """Wait until the removals of `keys` that are due have succeeded or failed once, for `timeout_s` at most.

        Return False if the tier still refuses one of `keys`.
        """
        unsettled = [key for key in keys if key in self._wanted and key not in self._failed]
        if unsettled and not self._closed:
            request = Request(len(unsettled))
            self.want(unsettled, request)
            try:
                async with asyncio.timeout(timeout_s):
                    await request.settled.wait()
            except TimeoutError:
                pass
            finally:
                self.leave(request)
        return not any(map(self.tier.traffic.refuses, keys))

    def request(self, keys: int) -> Request:
        """Begin a forget of `keys` distinct keys. The caller calls `leave` when it stops waiting for it."""
        self._called = True
        return Request(keys)

    def want(self, keys: Sequence[ChunkKey], request: Request) -> None:
        """Begin to remove some of the keys of `request`, or join removals in flight, which cover all earlier writes."""
        for key in keys:
            before = self._wanted.get(key)
            self._wanted[key] = (*(other for other in before or () if not other.over), request)
            is_clear = before is None and key not in self.tier.traffic.in_flight
            if is_clear or key in self._failed:
                self._failed.pop(key, None)
                self._due.append(key)
        self._add_lanes()

    def leave(self, request: Request) -> None:
        """Record that no caller waits for `request` any more. Keys beyond the limit are given up."""
        request.over = True
        excess = len(self._wanted) - _REMEMBERED_KEYS
        if excess <= 0 or self._closed:
            return
        unawaited = (key for key in (*self._failed, *self._due) if all(other.over for other in self._wanted[key]))
        given_up = list(islice(unawaited, excess))
        for key in given_up:
            self._failed.pop(key, None)
            self.tier.traffic.refuse(key)
            self._end(key)
        if given_up:
            self._due = deque(filter(self._wanted.__contains__, self._due))
            logger.warning(
                "%s: more than %d forgotten chunks could not be removed; %d others stay there, and are neither read nor "
                "written there until the cache is closed: find out why the tier does not remove them (%s)",
                self.tier.name, _REMEMBERED_KEYS, len(given_up), self._error or "it takes long",
            )  # fmt: skip

    def close(self) -> None:
        """Stop. Does not wait for removals that hang."""
        self._closed = True
        if self._wanted:
            logger.warning(
                "%s: %d forgotten chunks were not removed before the close; a durable tier has them after a restart",
                self.tier.name, len(self._wanted),
            )  # fmt: skip
        if self._timer is not None:
            self._timer.cancel()
        for lane in self.lanes:
            lane.cancel()
        self._due.clear()
        self._tell(self._wanted, CacheClosed(f"{self.tier.name}: the cache was closed before a chunk was removed"))

    def _begin(self, key: ChunkKey) -> None:
        """Called when the last read or write of a key to remove has ended."""
        if not self._closed:
            self._due.append(key)
            self._add_lanes()

    def _add_lanes(self) -> None:
        for _ in range(min(len(self._due), self.tier.traits.write_concurrency - len(self.lanes))):
            lane = asyncio.create_task(self._remove_due(), name=f"tiercache-remove-{self.tier.name}")
            self.lanes.add(lane)

    async def _remove_due(self) -> None:
        removed = 0
        try:
            while self._due and self._may_try():
                await self._remove(self._due.popleft())
                removed += 1
                if not removed % _AT_ONCE:
                    await asyncio.sleep(0)
        finally:
            # Leave here, not in a callback: a key due in between would get no lane, and this one takes no more keys.
            task = asyncio.current_task()
            assert task is not None
            self.lanes.discard(task)

    def _may_try(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        if self.tier.traffic.detached:
            due, self._due = self._due, deque()
            self._fail(due, TierUnavailable(f"{self.tier.name} is detached; forgotten chunks leave it when it is attached"))
            self._retry_later()
            return False
        if self.breaker.allows(now_s) or self._called:
            self._called = False
            return True
        if not self.breaker.probing(now_s):
            due, self._due = self._due, deque()
            self._fail(due, TierUnavailable(f"{self.tier.name}: removals failed and wait for a while: {self._error}"))
        self._retry_later()
        return False

    async def _remove(self, key: ChunkKey) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            await self.tier.remove(key)
        except (Exception, asyncio.CancelledError) as caught:
            if was_cancelled():
                raise
            self._error = error = (
                TierUnavailable(f"{self.tier.name}: a removal was cancelled")
                if isinstance(caught, (asyncio.CancelledError, CacheClosed))  # also of a tier that was detached
                else caught
            )
            if not self._closed:
                self.breaker.failed(loop.time(), began_s=began_s)
                self._fail([key], error)
                self._retry_later()
        else:
            self.breaker.succeeded(loop.time(), loop.time() - began_s)
            self._end(key)
        self._add_lanes()

    def _end(self, key: ChunkKey) -> None:
        """Allow operations on a key whose removal has succeeded or was given up."""
        self._tell([key], None)
        del self._wanted[key]

    def _fail(self, keys: Collection[ChunkKey], error: Exception) -> None:
        self._failed.update(dict.fromkeys(keys))
        self._tell(keys, error)

    def _tell(self, keys: Iterable[ChunkKey], error: Exception | None) -> None:
        """Notify the requests of `keys` that these are settled."""
        for key in keys:
            requests, self._wanted[key] = self._wanted[key], ()
            for request in requests:
                request.left -= 1
                request.error = request.error or error
                if not request.left:
                    request.settled.set()

    def _retry_later(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(_RETRY_S, self._retry)

    def _retry(self) -> None:
        """Retry the failed removals when the breaker allows it."""
        self._timer = None
        if self.tier.traffic.detached or not self.breaker.would_allow(asyncio.get_running_loop().time()):
            self._retry_later()
            return
        self._due.extend(self._failed)
        self._failed.clear()
        self._add_lanes()
