"""Workflow graphs: step B follows step A, and begins with a prefix that is known."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tiercache.core.keys import ChunkKey
from tiercache.core.prediction.base import KEY_HELD_BYTES, Prediction
from tiercache.core.prediction.gaps import Gaps

_LEAST_SEEN = 3
_MOST_FOLLOWERS = 64
_STEP_BYTES = 1024
_FOLLOWER_BYTES = 2048
"""Its gaps."""


@dataclass(slots=True)
class _Step:
    prefix: Sequence[ChunkKey] = ()
    """What all its latest requests began with."""
    seen: int = 0
    followed: dict[str, Gaps] = field(default_factory=dict)
    """By the step that came next: how long after this one had ended."""

    @property
    def held_bytes(self) -> int:
        return _STEP_BYTES + len(self.prefix) * KEY_HELD_BYTES + len(self.followed) * _FOLLOWER_BYTES


class Workflows:
    """Learns, from the steps that runs go through, which step follows which, how soon, and with which shared prefix.

    `limit` bounds the steps (the least recent is forgotten) and the runs that are under way, `limit_bytes` what the steps
    take; a step has few followers.
    """

    name = "workflows"

    def __init__(
        self, limit: int = 10_000, least_probability: float = 0.05, *, limit_bytes: int = 32 << 20
    ) -> None:
        self.limit = limit
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.least_probability = least_probability
        self._steps: OrderedDict[str, _Step] = OrderedDict()
        self._runs: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def arrived(self, run: str, step: str, keys: Sequence[ChunkKey], now_s: float) -> None:
        """A request of `step` begins in `run`."""
        state = self._step(step)
        held_bytes = state.held_bytes
        state.prefix = keys if not state.seen else _common(state.prefix, keys)
        state.seen += 1
        self.held_bytes += state.held_bytes - held_bytes
        before = self._runs.pop(run, None)
        if before is not None:
            name, ended_s = before
            self._gaps(name, step).add(max(0.0, now_s - ended_s))
        self._keep_within_limits()

    def finished(self, run: str, step: str, now_s: float) -> list[Prediction]:
        """`step` ended in `run`: what may follow, the most probable first."""
        self._runs[run] = step, now_s
        self._runs.move_to_end(run)
        if len(self._runs) > self.limit:
            _, (name, _) = self._runs.popitem(last=False)
            self._gaps(name, "").add_lost()
        followed = self._step(step).followed
        self._keep_within_limits()
        total = sum(gaps.count for gaps in followed.values())
        if total < _LEAST_SEEN:
            return []
        found = []
        for next_step, gaps in followed.items():
            state = self._steps.get(next_step)
            probability = gaps.count / total
            if state is None or not state.prefix or probability < self.least_probability:
                continue
            earliest_s, expected_s, latest_s = (gaps.quantile(part) for part in (0.05, 0.5, 0.95))
            found.append(
                Prediction(
                    self.name,
                    f"{run}>{next_step}",
                    state.prefix,
                    probability,
                    now_s + earliest_s,
                    now_s + expected_s,
                    now_s + latest_s,
                )
            )
        return sorted(found, key=lambda prediction: -prediction.probability)

    def over(self, run: str) -> None:
        """The run has ended; what its last step was followed by is: nothing."""
        last = self._runs.pop(run, None)
        if last is not None:
            self._gaps(last[0], "").add_lost()
            self._keep_within_limits()

    def _gaps(self, name: str, follower: str) -> Gaps:
        """How long after step `name` that follower came. Of too many followers the one seen least is forgotten."""
        followed = self._step(name).followed
        gaps = followed.get(follower)
        if gaps is None:
            if len(followed) >= _MOST_FOLLOWERS:
                del followed[min(followed, key=lambda other: followed[other].count)]
                self.held_bytes -= _FOLLOWER_BYTES
            gaps = followed[follower] = Gaps(256)
            self.held_bytes += _FOLLOWER_BYTES
        return gaps

    def _step(self, name: str) -> _Step:
        state = self._steps.get(name)
        if state is None:
            state = self._steps[name] = _Step()
            self.held_bytes += state.held_bytes
        else:
            self._steps.move_to_end(name)
        return state

    def _keep_within_limits(self) -> None:
        """Called when nothing of a step is held on to: the last one may be too large itself."""
        while len(self._steps) > self.limit or (self.held_bytes > self.limit_bytes and self._steps):
            _, forgotten = self._steps.popitem(last=False)
            self.held_bytes -= forgotten.held_bytes


def _common(one: Sequence[ChunkKey], other: Sequence[ChunkKey]) -> Sequence[ChunkKey]:
    length = min(len(one), len(other))
    for position in range(length):
        if one[position] != other[position]:
            return one[:position]
    return one[:length]
