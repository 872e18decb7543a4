"""A finished turn predicts the next one: when, from the session's own gaps and the population's, and which chunks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tiercache.core.keys import ChunkKey
from tiercache.core.prediction.base import KEY_HELD_BYTES, Prediction
from tiercache.core.prediction.gaps import Gaps

_OWN_LIMIT = 32
_MOST_KINDS = 256
"""Words for how a turn ended that gaps are learnt apart for; further ones share one distribution."""
_LEAST_KNOWN = 8.0
"""Gaps that must have been seen before anything is said."""
_LONG = 0.9
_HORIZON = 0.95
"""A prediction ends when so much of its probability has passed."""
_SESSION_BYTES = 2048
"""Of a session, its own gaps included, without its keys."""


@dataclass(slots=True)
class _Session:
    keys: Sequence[ChunkKey] = ()
    ended_s: float = 0.0
    kind: str = ""
    answered: bool = False
    own: Gaps | None = None
    presumed_lost: bool = False


@dataclass
class Sessions:
    """Gaps from the end of a turn to the beginning of the next one, by how the turn ended ("tool": a program will be back;
    an answer to a person may wait for days).

    Whether it comes at all is the population's to say, and a session that stays away longer than nine in ten counts as
    lost until it is back. When it comes, its own gaps have a say in: `own_weight` of them weigh as much as all others'
    together. The least recent sessions are forgotten beyond `limit` of them, or `limit_bytes` that all of them take.
    """

    limit: int = 10_000
    limit_bytes: int = 32 << 20
    own_weight: float = 4.0
    name: str = field(default="sessions", init=False)

    def __post_init__(self) -> None:
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._population: dict[str, Gaps] = {}
        self._forgotten: list[str] = []
        self.held_bytes = 0

    def arrived(self, session: str, now_s: float) -> None:
        """A turn begins: the gap before it is known now."""
        state = self._state(session)
        if state.answered:
            if state.presumed_lost:
                self._of(state.kind).forget_lost()
                state.presumed_lost = False
            gap_s = max(0.0, now_s - state.ended_s)
            self._of(state.kind).add(gap_s)
            if state.own is None:
                state.own = Gaps(_OWN_LIMIT)
            state.own.add(gap_s)
        state.answered = False

    def finished(
        self, session: str, keys: Sequence[ChunkKey], now_s: float, kind: str | None = None
    ) -> Prediction | None:
        """A turn ended at `now_s`; `keys` are what the next one will begin with. None while too little is known."""
        state = self._state(session)
        self.held_bytes += (len(keys) - len(state.keys)) * KEY_HELD_BYTES
        state.keys, state.ended_s, state.kind, state.answered = keys, now_s, kind or "", True
        self._keep_within_limits()
        return self.predict(session, now_s)

    def predict(self, session: str, now_s: float) -> Prediction | None:
        """What is to be said now of a session whose last turn has ended; None when it is running, or too little is known."""
        state = self._sessions.get(session)
        if state is None or not state.answered or not state.keys:
            return None
        gaps = self._of(state.kind)
        if gaps.count < _LEAST_KNOWN:
            return None
        idle_s = max(0.0, now_s - state.ended_s)
        if not state.presumed_lost and idle_s > gaps.quantile(_LONG):
            # Who is gone never says so. Without those who stay away, only returns would be counted.
            state.presumed_lost = True
            gaps.add_lost()
        earliest_s = gaps.quantile(0.05, idle_s)
        expected_s = gaps.quantile(0.5, idle_s)
        latest_s = gaps.quantile(_HORIZON, idle_s)
        probability = gaps.probability(idle_s, idle_s, latest_s)
        if state.own is not None and state.own.ends_after(idle_s):
            share = state.own.count / (state.own.count + self.own_weight)
            expected_s += share * (state.own.quantile(0.5, idle_s) - expected_s)
        since_s = state.ended_s
        return Prediction(
            self.name,
            session,
            state.keys,
            probability,
            since_s + earliest_s,
            since_s + min(max(earliest_s, expected_s), latest_s),
            since_s + latest_s,
        )

    def over(self, session: str) -> None:
        """The program says that it will not come back; nothing is learnt from that."""
        state = self._sessions.pop(session, None)
        if state is not None:
            self.held_bytes -= _SESSION_BYTES + len(state.keys) * KEY_HELD_BYTES

    def take_forgotten(self) -> list[str]:
        """Sessions that had to go since this was asked last: nothing will be said of them."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def __len__(self) -> int:
        return len(self._sessions)

    def came_back(self, session: str) -> bool:
        """Whether a turn of it has continued another one."""
        state = self._sessions.get(session)
        return state is not None and state.own is not None

    def _state(self, session: str) -> _Session:
        state = self._sessions.get(session)
        if state is None:
            state = self._sessions[session] = _Session()
            self.held_bytes += _SESSION_BYTES
            self._keep_within_limits()
        else:
            self._sessions.move_to_end(session)
        return state

    def _keep_within_limits(self) -> None:
        while len(self._sessions) > self.limit or (self.held_bytes > self.limit_bytes and self._sessions):
            session, state = self._sessions.popitem(last=False)
            self._lose(state)
            self.held_bytes -= _SESSION_BYTES + len(state.keys) * KEY_HELD_BYTES
            self._forgotten.append(session)
            del self._forgotten[: -self.limit]

    def _lose(self, state: _Session) -> None:
        if state.answered and not state.presumed_lost:
            self._of(state.kind).add_lost()

    def _of(self, kind: str) -> Gaps:
        gaps = self._population.get(kind)
        if gaps is None:
            if len(self._population) >= _MOST_KINDS:
                kind = ""
            gaps = self._population.setdefault(kind, Gaps())
        return gaps
