"""Remove chunks from one tier: each removal begins when no read or write of its key is in flight, and is retried."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from tiercache.core.breaker import Breaker
from tiercache.core.keys import ChunkKey
from tiercache.errors import CacheClosed, TierCacheError, TierUnavailable
from tiercache.memory.workers import was_cancelled
from tiercache.tiers.base import Tier

logger = logging.getLogger("tiercache.writer")

_REMEMBERED_KEYS = 1 << 16
"""Limit of keys whose removal is retried, at about 200 bytes each."""
_RETRY_S = 1.0
"""Interval in seconds at which failed removals ask the breaker for another attempt. The breaker's pauses grow."""
_AT_ONCE = 64
"""Removals per task and iteration of the loop, for a tier that does not wait."""

Attempt = asyncio.Future[Exception | None]
"""An attempt to remove a key: done with None when the chunk is removed, and with the error when that has failed."""


class Removals:
    """Removals from one tier. Bound to the event loop.

    Until a removal has ended the tier's traffic refuses its key, so a removal that hangs or fails never restores a
    chunk. It is retried until it succeeds or the cache is closed: failed removals are retried together when the breaker
    allows it. Each forget tries one key in any case, since one chunk that cannot be removed says little about others.

    The breaker is not that of writes: a full tier refuses writes, and removals make room there.

    Once no forget waits for them, at most `_REMEMBERED_KEYS` keys are kept for retries. The chunks of the others stay
    in the tier, and this process neither reads nor writes them there until the cache is closed (`KeyTraffic.refuse`).
    """

    def __init__(self, tier: Tier, deadline_s: float) -> None:
        """`deadline_s` is the time after which a removal counts as slow."""
        self.tier = tier
        self.breaker = Breaker(deadline_s)
        self._attempts: dict[ChunkKey, Attempt | None] = tier.traffic.removing
        """Keys to remove, each with its attempt that has not ended, or None if the latest attempt has failed."""
        self._due: deque[ChunkKey] = deque()
        """Keys with no operation in flight, to be tried now."""
        self._must_try = False
        """True if the next removal is tried even if the breaker refuses it, since each forget tries one key."""
        self.lanes: set[asyncio.Task[None]] = set()
        """Removals in flight."""
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception | None = None
        """The error of the latest failed removal."""
        self._closed = False
        tier.traffic.on_clear = self._is_clear

    def try_one(self) -> None:
        """Try the next removal even if the breaker refuses it. Called at the start of each forget."""
        self._must_try = True

    def begin(self, keys: Sequence[ChunkKey]) -> list[Attempt]:
        """Begin to remove `keys`, or join attempts that have not ended, which cover all earlier writes."""
        attempts = []
        for key in keys:
            attempt = self._attempts.get(key)
            if attempt is None:
                attempt = self._attempts[key] = asyncio.get_running_loop().create_future()
                if key not in self.tier.traffic.in_flight:
                    self._due.append(key)
            attempts.append(attempt)
        self._add_lanes()
        return attempts

    async def ended(self, key: ChunkKey, timeout_s: float) -> bool:
        """Wait for the attempt to remove `key`, if there is one, for `timeout_s` at most.

        Return False if the tier still refuses the key.
        """
        attempt = self._attempts.get(key)
        if attempt is not None:
            await asyncio.wait([attempt], timeout=timeout_s)
        return not self.tier.traffic.refuses(key)

    async def tried(self) -> None:
        """Wait until the removal of each key has succeeded or failed once. Cancellation changes nothing."""
        await all_ended([attempt for attempt in self._attempts.values() if attempt is not None])

    def give_up_excess(self, keys: Collection[ChunkKey]) -> None:
        """Called when a forget of `keys` waits no longer: give up those that exceed `_REMEMBERED_KEYS`."""
        excess = len(self._attempts) - _REMEMBERED_KEYS
        if excess <= 0 or self._closed:
            return
        given_up = set(islice(filter(self._attempts.__contains__, keys), excess))
        self._due = deque(key for key in self._due if key not in given_up)
        reason = (
            f"{self.tier.name}: more than {_REMEMBERED_KEYS} forgotten chunks could not be removed; {len(given_up)} others "
            "stay there, and are neither read nor written there until the cache is closed: find out why the tier does not "
            f"remove them ({self._error or 'it takes long'})"
        )
        for key in given_up:
            self.tier.traffic.refuse(key)
            self._end(key, TierUnavailable(reason))
        if given_up:
            logger.warning(reason)

    def close(self) -> None:
        """Stop. Does not wait for removals that hang."""
        self._closed = True
        if self._attempts:
            logger.warning(
                "%s: %d forgotten chunks were not removed before the close; a durable tier has them after a restart",
                self.tier.name, len(self._attempts),
            )  # fmt: skip
        if self._timer is not None:
            self._timer.cancel()
        for lane in self.lanes:
            lane.cancel()
        self._due.clear()
        error = CacheClosed(f"{self.tier.name}: the cache was closed before a chunk was removed")
        self._fail(list(self._attempts), error)

    def _is_clear(self, key: ChunkKey) -> None:
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
        """Return True if the next due key may be tried now. If not, all due keys fail, except during a probe."""
        now_s = asyncio.get_running_loop().time()
        if self.tier.traffic.detached:
            self._fail_due(f"{self.tier.name} is detached; forgotten chunks leave it when it is attached")
            return False
        if self.breaker.allows(now_s) or self._must_try:
            self._must_try = False
            return True
        if self.breaker.probing(now_s):
            self._retry_later()  # in case the probe hangs
        else:
            self._fail_due(f"{self.tier.name}: removals wait for a while: {self._error}")
        return False

    async def _remove(self, key: ChunkKey) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            await self.tier.remove(key)
        except (Exception, asyncio.CancelledError) as caught:
            if was_cancelled():
                raise
            self._error = error = self._reported(caught)
            self.breaker.failed(loop.time(), began_s=began_s)
            self._fail([key], error)
        else:
            self.breaker.succeeded(loop.time(), loop.time() - began_s)
            self._end(key)
        self._add_lanes()

    def _reported(self, caught: BaseException) -> TierCacheError:
        """Return the error for the callers of a removal that `caught` ended."""
        if isinstance(caught, (asyncio.CancelledError, CacheClosed)):  # also of a tier that was detached
            return TierUnavailable(f"{self.tier.name}: a removal was cancelled")
        if isinstance(caught, TierCacheError):
            return caught
        error = TierUnavailable(f"{self.tier.name}: a removal failed: {caught or type(caught).__name__}")
        error.__cause__ = caught
        return error

    def _end(self, key: ChunkKey, error: Exception | None = None) -> None:
        """Take out a key that is removed, or given up because of `error`."""
        attempt = self._attempts.pop(key, None)
        if attempt is not None:
            attempt.set_result(error)

    def _fail(self, keys: Collection[ChunkKey], error: Exception) -> None:
        """End the attempts to remove `keys`; they are retried later."""
        for key in keys:
            attempt = self._attempts.get(key)
            if attempt is not None:
                self._attempts[key] = None
                attempt.set_result(error)
        self._retry_later()

    def _fail_due(self, reason: str) -> None:
        due, self._due = self._due, deque()
        self._fail(due, TierUnavailable(reason))

    def _retry_later(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(_RETRY_S, self._retry)

    def _retry(self) -> None:
        """Retry the failed removals when the breaker allows it."""
        self._timer = None
        if self.tier.traffic.detached or not self.breaker.would_allow(asyncio.get_running_loop().time()):
            self._retry_later()
        else:
            self.begin([key for key, attempt in self._attempts.items() if attempt is None])


async def all_ended(attempts: Iterable[Attempt]) -> None:
    """Wait for `attempts` one by one: to wait for thousands at once would block the loop. Cancellation changes nothing."""
    for attempt in attempts:
        if not attempt.done():
            await asyncio.wait([attempt])
