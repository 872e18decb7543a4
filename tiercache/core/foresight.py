"""All that is known of requests to come: the predictors, the plan that they feed, and what has to be thought about again.

Pure, as its parts are. A driver (the live cache's `Ahead`, or the simulator) tells it what sessions do, and calls `think`
when `think_s` has come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from tiercache.core.alarms import Alarms
from tiercache.core.keys import ChunkKey
from tiercache.core.prediction import Hints, Prediction, Sessions, Workflows
from tiercache.core.prefetch import PrefetchPlan

_AGAIN_LEAST_S = 1.0
_AGAIN_SHARE = 0.25
"""Of the time that a session has been idle: the least until it is thought about again."""
_AT_ONCE = 2048
"""Keys of sessions that are thought about again in one go: a few milliseconds."""
_SESSION = 16
"""What a session takes of these beside its keys."""

PREDICTORS = ("hints", "sessions", "workflows")


class Foresight:
    """What sessions and workflows predict is offered to `plan`. Times are seconds of one monotonic clock.

    What a prediction says fades: half of its probability may pass without a request. So an idle session is thought about
    again then, at growing intervals, for as long as there is something to say about it.
    """

    def __init__(self, plan: PrefetchPlan, use: Collection[str] = PREDICTORS) -> None:
        """Of `use`, what sessions and workflows do is learnt; hints are offered by the caller."""
        self.plan = plan
        self.hints = Hints()
        self.sessions = Sessions()
        self.workflows = Workflows()
        self._use = frozenset(use)
        self._steps: OrderedDict[str, list[str]] = OrderedDict()
        """Subjects of what was predicted to follow a run's last step: as many in all as there may be steps."""
        self._subjects = 0
        self._again: OrderedDict[str, float] = OrderedDict()
        """By session that is to be thought about again: when its last turn ended. No more than there are sessions."""
        self._alarms: Alarms[str] = Alarms()

    @property
    def think_s(self) -> float | None:
        """When to call `think`; None: not before a turn has ended."""
        return self._alarms.next_s

    def began(self, session: str, keys: Sequence[ChunkKey], step: str, now_s: float) -> bool:
        """A request of `session` (and, in a workflow, of that step) has come, for `keys`. Returns whether the session has
        come back by now."""
        self._come(session)
        if "sessions" in self._use:
            self.sessions.arrived(session, now_s)
            self._let_go()
        if step and "workflows" in self._use:
            self.workflows.arrived(session, step, keys, now_s)
        return self.sessions.came_back(session)

    def ended(self, session: str, keys: Sequence[ChunkKey], step: str, kind: str, now_s: float) -> bool:
        """That request is answered; `keys` are what the session's next one will begin with. Returns the same."""
        if "sessions" in self._use:
            prediction = self.sessions.finished(session, keys, now_s, kind)
            self._let_go()
            self._offer(session, prediction, now_s, now_s)
        if step and "workflows" in self._use:
            found = self.workflows.finished(session, step, now_s)
            for prediction in found:
                self.plan.offer(prediction, now_s)
            if found:
                self._withdraw_others(session, {prediction.subject for prediction in found})
                self._steps[session] = [prediction.subject for prediction in found]
                self._subjects += len(found)
                while self._subjects > self.workflows.limit and len(self._steps) > 1:
                    self._withdraw_steps(next(iter(self._steps)))
        return self.sessions.came_back(session)

    def over(self, session: str) -> None:
        """It will not come back."""
        self._come(session)
        self.sessions.over(session)
        self.workflows.over(session)

    def think(self, now_s: float) -> None:
        """Say what is to be said by now of the sessions that are due: of some of them, if they are many. `think_s` tells
        whether there are more."""
        left = _AT_ONCE
        while left > 0 and (at_s := self._alarms.next_s) is not None and at_s <= now_s:
            session = self._alarms.pop()
            ended_s = self._again.pop(session)
            prediction = self.sessions.predict(session, now_s)
            self._offer(session, prediction, ended_s, now_s)
            left -= _SESSION if prediction is None else _SESSION + len(prediction.keys)

    def _come(self, session: str) -> None:
        """Nobody waits for it any more."""
        self._do_not_think_of(session)
        self.plan.withdraw(self.sessions.name, session)
        self._withdraw_steps(session)

    def _let_go(self) -> None:
        """Of sessions that had to be forgotten nothing is expected any more."""
        for session in self.sessions.take_forgotten():
            self._do_not_think_of(session)
            self.plan.withdraw(self.sessions.name, session)

    def _withdraw_steps(self, run: str) -> None:
        self._withdraw_others(run, set())

    def _withdraw_others(self, run: str, stay: Collection[str]) -> None:
        """What was predicted to follow the run's last step, but for what is still."""
        subjects = self._steps.pop(run, [])
        self._subjects -= len(subjects)
        for subject in subjects:
            if subject not in stay:
                self.plan.withdraw(self.workflows.name, subject)

    def _offer(self, session: str, prediction: Prediction | None, ended_s: float, now_s: float) -> None:
        if prediction is None:
            return
        self.plan.offer(prediction, now_s)
        at_s = max(prediction.expected_s, now_s + max(_AGAIN_LEAST_S, _AGAIN_SHARE * (now_s - ended_s)))
        self._again[session] = ended_s
        self._again.move_to_end(session)
        self._alarms.set(session, at_s)
        if len(self._again) > self.sessions.limit:
            forgotten = next(iter(self._again))
            self._do_not_think_of(forgotten)
            self.plan.withdraw(self.sessions.name, forgotten)

    def _do_not_think_of(self, session: str) -> None:
        self._again.pop(session, None)
        self._alarms.cancel(session)
