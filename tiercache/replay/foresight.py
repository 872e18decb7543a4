"""What the cache of a simulation knows of the future: the real predictors and the real plan, on simulated time."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random

from tiercache.core.keys import ChunkKey
from tiercache.core.prediction import Hints, Prediction, Sessions, Workflows
from tiercache.core.prefetch import PrefetchPlan, PrefetchSettings
from tiercache.replay.formats import Request
from tiercache.replay.setting import Setting

_AGAIN_LEAST_S = 1.0
_AGAIN_SHARE = 0.25
"""Of the time that a session has been idle: the least until it is thought about again."""


class Foresight:
    """Timers, predictors and a plan. What the driver of a live cache does with tasks is done here by `until`."""

    def __init__(self, setting: Setting, block_bytes: int, renew: Callable[[Sequence[ChunkKey]], None]) -> None:
        """`renew` is called with keys that are announced, so that they are not evicted meanwhile."""
        self.plan = PrefetchPlan(
            PrefetchSettings(
                hot_bytes=setting.ram_blocks * block_bytes,
                share_bytes=int(setting.prefetch_share * setting.ram_blocks) * block_bytes,
                bytes_per_s=setting.prefetch_bytes_per_s,
                transfer_bytes_per_s=setting.hardware.flash_read_bytes_per_s,
                least_probability=setting.least_probability,
            ),
            block_bytes,
        )
        self._lead_s = setting.hint_lead_s
        self._error = setting.hint_error
        self._chance = Random(0)
        self._renew = renew
        self._hints = Hints() if "hints" in setting.prefetch else None
        self._sessions = Sessions() if "sessions" in setting.prefetch else None
        self._workflows = Workflows() if "workflows" in setting.prefetch else None
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._turns: dict[str, int] = {}
        self._running: dict[str, int] = {}
        self._coming: dict[str, deque[tuple[float, Request]]] = {}
        self._offered: dict[str, list[str]] = {}

    @property
    def next_s(self) -> float:
        """When the next timer is due."""
        return self._timers[0][0] if self._timers else float("inf")

    def fire(self) -> None:
        """Run the next timer."""
        at_s, _, call = heapq.heappop(self._timers)
        call(at_s)

    def looking_ahead(self, requests: Iterable[Request]) -> Iterator[Request]:
        """The requests, with timers set for the announcements of those to come."""
        if self._hints is None:
            yield from requests
            return
        ahead: deque[Request] = deque()
        source = iter(requests)
        for request in source:
            ahead.append(request)
            self._will_announce(request)
            while ahead and ahead[0].time_s + self._lead_s < request.time_s:
                yield ahead.popleft()
        yield from ahead

    def arrived(self, request: Request, first_token_s: float, decode_tokens_per_s: float) -> None:
        """After the plan was told what was asked for."""
        now_s, run = request.time_s, request.session
        if self._hints is not None:
            self.plan.withdraw("hints", _subject(request))
        if run is None:
            return
        if run in self._coming:
            self._coming[run].popleft()
            if not self._coming[run]:
                del self._coming[run]
        self._turns[run] = turn = self._turns.get(run, 0) + 1
        self._running[run] = self._running.get(run, 0) + 1
        if self._sessions is not None:
            self._sessions.arrived(run, now_s)
            self.plan.withdraw("sessions", run)
        if self._workflows is not None and request.step is not None:
            self._workflows.arrived(run, request.step, request.keys, now_s)
            for subject in self._offered.pop(run, ()):
                self.plan.withdraw("workflows", subject)
        took_s = request.duration_s
        if took_s is None:
            took_s = first_token_s - now_s + request.output_tokens / decode_tokens_per_s
        self._at(now_s + took_s, lambda at_s: self._ended(request, run, turn, at_s))

    def _ended(self, request: Request, run: str, turn: int, now_s: float) -> None:
        self._running[run] -= 1
        if not self._running[run]:
            del self._running[run]
            coming = self._coming.get(run)
            if coming and coming[0][0] <= now_s:
                self._announce(coming[0][1], now_s)
        if self._turns.get(run) != turn:
            return
        if self._sessions is not None:
            self._offer(self._sessions.finished(run, request.keys, now_s, request.ended), run, turn, now_s, now_s)
        if self._workflows is not None and request.step is not None:
            found = self._workflows.finished(run, request.step, now_s)
            for prediction in found:
                self.plan.offer(prediction, now_s)
            self._offered[run] = [prediction.subject for prediction in found]

    def _offer(self, prediction: Prediction | None, run: str, turn: int, ended_s: float, now_s: float) -> None:
        """And think again when half of its probability has passed without a request."""
        if prediction is None:
            return
        self.plan.offer(prediction, now_s)
        pause_s = max(_AGAIN_LEAST_S, _AGAIN_SHARE * (now_s - ended_s))
        again_s = max(prediction.expected_s, now_s + pause_s)
        self._at(again_s, lambda at_s: self._again(run, turn, ended_s, at_s))

    def _again(self, run: str, turn: int, ended_s: float, now_s: float) -> None:
        if self._sessions is not None and self._turns.get(run) == turn:
            self._offer(self._sessions.predict(run, now_s), run, turn, ended_s, now_s)

    def _will_announce(self, request: Request) -> None:
        lead_s = self._lead_s if request.lead_s is None else request.lead_s
        at_s = max(0.0, request.time_s - lead_s)
        if request.session is not None:
            self._coming.setdefault(request.session, deque()).append((at_s, request))
        self._at(at_s, lambda at_s: self._announce(request, at_s))

    def _announce(self, request: Request, now_s: float) -> None:
        """A program knows what it sends next once it has the last answer, not before."""
        assert self._hints is not None
        run = request.session
        if now_s >= request.time_s:
            return
        if run is not None and (self._running.get(run) or self._coming[run][0][1] is not request):
            return
        self._renew(request.keys)
        due_in_s = (request.time_s - now_s) * (1 + self._error * self._chance.uniform(-1, 1))
        self.plan.offer(
            self._hints.announce(request.keys, now_s, due_in_s=due_in_s, subject=_subject(request)), now_s
        )

    def _at(self, time_s: float, call: Callable[[float], None]) -> None:
        heapq.heappush(self._timers, (time_s, next(self._numbers), call))


def _subject(request: Request) -> str:
    return request.session if request.session is not None else f"@{id(request)}"
