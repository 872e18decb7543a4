"""Simulate programs: their announcements of requests, and the hints and predictions of their turns."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random

from tiercache.core.keys import ChunkKey
from tiercache.core.prefetch import HINTS, SESSIONS, PrefetchPlan, SessionPredictor, hint
from tiercache.replay.formats import Request
from tiercache.replay.setting import Setting


class Announcements:
    """Schedule of announcements. Pure; tell it each arrival and each end.

    A program announces a request `lead_s` before its arrival (or the lead in the request itself), but not before the
    answer to its previous request has ended.
    """

    def __init__(self, lead_s: float) -> None:
        self.lead_s = lead_s
        self._coming: dict[str, deque[Request]] = {}
        self._running: Counter[str] = Counter()

    def at_s(self, request: Request) -> float:
        """Return the time of the announcement if no answer is running. Call once per request, in the trace's order."""
        if request.session is not None:
            self._coming.setdefault(request.session, deque()).append(request)
        return self._at_s(request)

    def may(self, request: Request, now_s: float) -> bool:
        """Return True if the request may be announced now."""
        run = request.session
        if now_s >= request.time_s:
            return False
        return run is None or (run not in self._running and self._coming[run][0] is request)

    def arrived(self, request: Request) -> None:
        run = request.session
        if run is not None:
            coming = self._coming[run]
            coming.popleft()
            if not coming:
                del self._coming[run]
            self._running[run] += 1

    def ended(self, request: Request, now_s: float) -> Request | None:
        """Record the end of an answer. Return the next request of its session if it is to be announced at once."""
        run = request.session
        if run is None:
            return None
        self._running[run] -= 1
        if self._running[run]:
            return None
        del self._running[run]
        coming = self._coming.get(run)
        if not coming or self._at_s(coming[0]) > now_s or not self.may(coming[0], now_s):
            return None
        return coming[0]

    def _at_s(self, request: Request) -> float:
        return max(0.0, request.time_s - (self.lead_s if request.lead_s is None else request.lead_s))


class Programs:
    """Timers that drive the session predictor and the prefetch plan of the live cache."""

    def __init__(self, setting: Setting, block_bytes: int, renew: Callable[[Sequence[ChunkKey]], None]) -> None:
        """`renew` is called with announced keys, to protect them from eviction."""
        self.plan = PrefetchPlan(block_bytes, int(setting.prefetch_share * setting.ram_blocks) * block_bytes)
        self._announcements = Announcements(setting.hint_lead_s)
        self._error = setting.hint_error
        self._chance = Random(0)
        self._renew = renew
        self._announces = HINTS in setting.prefetch
        self._sessions = SessionPredictor() if SESSIONS in setting.prefetch else None
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._turns: dict[str, int] = {}

    @property
    def next_s(self) -> float:
        """Time of the next event."""
        return self._timers[0][0] if self._timers else float("inf")

    def fire(self) -> None:
        """Process the events that are due."""
        now_s = self.next_s
        while self._timers and self._timers[0][0] <= now_s:
            at_s, _, call = heapq.heappop(self._timers)
            call(at_s)

    def looking_ahead(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Yield the requests, after setting timers for the announcements of later requests.

        Iterates twice over `requests`: the longest lead says how far ahead to look.
        """
        if not self._announces:
            yield from requests
            return
        longest_s = max([self._announcements.lead_s, *(one.lead_s for one in requests if one.lead_s is not None)])
        ahead: deque[Request] = deque()
        source = iter(requests)
        for request in source:
            ahead.append(request)
            self._will_announce(request)
            while ahead and ahead[0].time_s + longest_s < request.time_s:
                yield ahead.popleft()
        yield from ahead

    def arrived(self, request: Request, first_token_s: float, decode_tokens_per_s: float) -> None:
        """Record an arrival. Call after the plan has recorded the access."""
        now_s, run = request.time_s, request.session
        if self._announces:
            self.plan.withdraw(HINTS, request.subject)
            self._announcements.arrived(request)
        if run is None:
            return
        self._turns[run] = turn = self._turns.get(run, 0) + 1
        if self._sessions is not None:
            self._sessions.began(run, now_s)
            self.plan.withdraw(SESSIONS, run)
        took_s = request.duration_s
        if took_s is None:
            took_s = first_token_s - now_s + request.output_tokens / decode_tokens_per_s
        self._at(now_s + took_s, lambda at_s: self._ended(request, run, turn, at_s))

    def _ended(self, request: Request, run: str, turn: int, now_s: float) -> None:
        if self._announces and (following := self._announcements.ended(request, now_s)) is not None:
            self._announce(following, now_s)
        if self._sessions is None or self._turns.get(run) != turn:
            return
        prediction = self._sessions.ended(run, request.keys, now_s)
        if prediction is not None:
            self.plan.offer(prediction, now_s)

    def _will_announce(self, request: Request) -> None:
        self._at(self._announcements.at_s(request), lambda at_s: self._announce(request, at_s))

    def _announce(self, request: Request, now_s: float) -> None:
        if not self._announcements.may(request, now_s):
            return
        self._renew(request.keys)
        due_in_s = (request.time_s - now_s) * (1 + self._error * self._chance.uniform(-1, 1))
        self.plan.offer(hint(request.keys, now_s, request.subject, due_in_s), now_s)

    def _at(self, time_s: float, call: Callable[[float], None]) -> None:
        heapq.heappush(self._timers, (time_s, next(self._numbers), call))
