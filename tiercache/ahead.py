"""What is known about requests to come: hints, sessions, workflows, and pins. `TierCache.ahead`.

A prediction becomes a promotion into the hot cache when the plan finds it worth its bandwidth; a wrong one costs that and
nothing else.
"""

from __future__ import annotations

import asyncio
from asyncio.events import _get_running_loop
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from math import isfinite
from operator import index

from tiercache.core.foresight import Foresight
from tiercache.core.keys import ChunkKey, check_keys
from tiercache.core.prediction import Sessions
from tiercache.core.prediction.base import Prediction
from tiercache.core.prefetch import PrefetchPlan, PrefetchSettings
from tiercache.errors import ConfigError
from tiercache.scheduler.prefetcher import Prefetcher, PrefetchHandle
from tiercache.scheduler.reader import Reader
from tiercache.tiers.cpu import CpuTier
from tiercache.tiers.leases import Lease

PIN_S = 600.0
_QUEUE = "queue"
_FIRST = 1 << 40
"""Requests that are here go before everything that is only predicted, and one after the other."""
_QUEUED_SHARES = 4
"""Of what the prefetcher may keep, so many times is remembered of the queue. What comes behind is read when it is asked for.
"""
_CERTAIN = 0.99
_SOON_S = 1.0
_WAITS_S = 60.0
"""How long what was fetched for a request is kept for it."""


class Ahead:
    """All methods belong to the event loop (from elsewhere they are RuntimeErrors), and none waits.

    `on_continued` is called with the chunks of requests of sessions that have come back at least once.
    """

    def __init__(
        self,
        cpu: CpuTier,
        reader: Reader,
        settings: PrefetchSettings,
        chunk_bytes: int,
        read_s: float,
        on_continued: Callable[[Sequence[ChunkKey]], None],
    ) -> None:
        self.cpu = cpu
        self.plan = PrefetchPlan(settings, chunk_bytes)
        self.foresight = Foresight(self.plan)
        self.prefetcher = Prefetcher(reader, self.plan, read_s=read_s)
        self._on_continued = on_continued
        self._loop = asyncio.get_running_loop()
        self._thinking: asyncio.TimerHandle | None = None
        self._closed = False
        self._queue: deque[Prediction] = deque()
        self._numbers = count(-_FIRST)
        self._pins: dict[ChunkKey, tuple[Lease, asyncio.TimerHandle]] = {}
        self._reader = reader
        cpu.on_forget = self._removed
        for tier in reader.mapped:
            tier.mappings.on_forget = self._removed

    @property
    def sessions(self) -> Sessions:
        return self.foresight.sessions

    @property
    def promotes(self) -> bool:
        """Whether there is a hot cache to promote into, or a tier that can be mapped."""
        return self.cpu.keep or bool(self._reader.mapped)

    @property
    def pinned(self) -> int:
        """Chunks that are pinned now."""
        return len(self._pins)

    def prefetch(
        self, keys: Sequence[ChunkKey], due_in_s: float, ttl_s: float, priority: int, look_s: float
    ) -> PrefetchHandle:
        """See `TierCache.prefetch`."""
        if not isfinite(due_in_s):
            raise ValueError(f"deadline: expected a number of seconds, found {due_in_s}")
        check_seconds("ttl", ttl_s)
        priority = index(priority)
        if not self.promotes:
            raise ConfigError("prefetch: local_cpu is false, so there is no hot cache to promote into; set local_cpu: true")
        check_keys(keys)
        now_s = self._loop.time()
        hint = self.foresight.hints.announce(keys, now_s, due_in_s=due_in_s, ttl_s=ttl_s, priority=priority)
        return self.prefetcher.begin(hint, now_s + look_s)

    def queued(self, keys: Sequence[ChunkKey]) -> None:
        """A request for `keys` is here and waits for its turn, behind those that came before it."""
        self.cpu.renew(keys)
        if self._reader.prefix_at_hand(keys) == len(keys):
            return
        while self._queue and not any(self.plan.expects(key) for key in self._queue[0].keys):
            self.plan.withdraw(_QUEUE, self._queue.popleft().subject)  # its turn has come, or its time is over
        most = self.plan.settings.share_bytes // self.plan.chunk_bytes
        if sum(len(prediction.keys) for prediction in self._queue) >= _QUEUED_SHARES * most:
            return
        number = next(self._numbers)
        now_s = self._loop.time()
        prediction = Prediction(
            _QUEUE, str(number), keys[:most], _CERTAIN, now_s, now_s, now_s + _SOON_S, number, _WAITS_S
        )
        self._queue.append(prediction)
        self.prefetcher.offer(prediction)

    def served(self, keys: Sequence[ChunkKey]) -> None:
        """A request for `keys` had its turn. Nobody waits for what the first of these in the queue needs, fetched or not."""
        if self._queue:
            came = set(keys)
            for prediction in self._queue:
                if prediction.keys[-1] in came:
                    self._queue.remove(prediction)
                    self.plan.withdraw(_QUEUE, prediction.subject)
                    break

    def began(self, session: str, keys: Sequence[ChunkKey], step: str = "") -> None:
        """A request of `session` (and, in a workflow, of that step) has come, for `keys`."""
        check_loop(self._loop)
        check_keys(keys)
        if self.foresight.began(session, keys, step, self._loop.time()):
            self._on_continued(keys)
        self._carry_out()

    def ended(self, session: str, keys: Sequence[ChunkKey], step: str = "", kind: str = "") -> None:
        """That request is answered; `keys` are what the session's next one will begin with.

        `kind` says how it ended, in words of the program's own: after "tool" one is sooner back than after "user".
        """
        check_loop(self._loop)
        check_keys(keys)
        if self.foresight.ended(session, keys, step, kind, self._loop.time()):
            self._on_continued(keys)
        self._carry_out()

    def over(self, session: str) -> None:
        """It will not come back; what was fetched for it may be evicted."""
        check_loop(self._loop)
        self.foresight.over(session)
        self._carry_out()

    def pin(self, keys: Sequence[ChunkKey], ttl_s: float = PIN_S) -> int:
        """Keep those of `keys` hot that are, for `ttl_s` from now; returns how many are pinned. Prefetch the others first.

        Together with what is prefetched, pins take no more than the prefetcher's share of the hot cache, and leave reads and
        writes their part of it. A chunk that was prefetched counts as used then. A closed cache pins nothing.
        """
        check_loop(self._loop)
        check_keys(keys)
        check_seconds("ttl_s", ttl_s)
        if self._closed:
            return 0
        pinned = 0
        for key in keys:
            old = self._pins.pop(key, None)
            if old is not None:
                old[1].cancel()
                lease: Lease | None = old[0]
            else:
                lease = self.prefetcher.hand_over(key)
                if lease is None and self.prefetcher.has_room(key):
                    lease = self._reader.hold(key)
            if lease is not None:
                self._pins[key] = lease, self._loop.call_later(ttl_s, self.unpin, [key])
                pinned += 1
            self.prefetcher.pinned = len(self._pins)
        return pinned

    def unpin(self, keys: Sequence[ChunkKey]) -> None:
        """Let `keys` be evicted like others."""
        check_loop(self._loop)
        check_keys(keys)
        for key in keys:
            pin = self._pins.pop(key, None)
            if pin is not None:
                pin[1].cancel()
                pin[0].release()
        self.prefetcher.pinned = len(self._pins)

    def _removed(self, key: ChunkKey) -> None:
        """A chunk that was held or pinned is not in the hot cache any more."""
        self.unpin([key])
        self.prefetcher.removed(key)

    def _carry_out(self) -> None:
        """Fetch what the plan wants by now, and come back when there is something to think about."""
        if self._closed:
            return
        self.prefetcher.pump()
        if self._thinking is not None:
            self._thinking.cancel()
        think_s = self.foresight.think_s
        self._thinking = None if think_s is None else self._loop.call_at(think_s, self._think)

    def _think(self) -> None:
        self.foresight.think(self._loop.time())
        self._carry_out()

    async def close(self) -> None:
        self._closed = True
        if self._thinking is not None:
            self._thinking.cancel()
        self.unpin(list(self._pins))
        await self.prefetcher.close()


def check_loop(loop: asyncio.AbstractEventLoop | None) -> None:
    """Raises RuntimeError unless that is the one that runs: from elsewhere, all that a cache has would be torn apart."""
    if _get_running_loop() is not loop:
        raise RuntimeError(
            "the cache belongs to the event loop that started it, and this call comes from elsewhere; use "
            "asyncio.run_coroutine_threadsafe(..., loop) or CacheThread, or open a cache of its own on this loop"
        )


def check_number(name: str, seconds: float) -> None:
    """Raises ValueError for what is not a number: no time ever comes to it. Without an end, and over already, are times."""
    if seconds != seconds:
        raise ValueError(f"{name}: expected a number of seconds, found {seconds}")


def check_seconds(name: str, value_s: float) -> None:
    """Raises ValueError unless it is a length of time: a timer that is not a number upsets all others."""
    if not (isfinite(value_s) and value_s >= 0):
        raise ValueError(f"{name}: expected a number of seconds from 0 on, found {value_s}")
