"""What is known of vLLM's requests: which of their chunks were asked for, and what the answers were. Pure: no vLLM.

vLLM asks for one chunk at a time, again in each step until all have an answer. What memory knows to be there is said at
once. The rest is asked in one question a step, by request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from tiercache.integrations.vllm.hints import Wishes

Name = bytes
"""vLLM's, of a chunk: the hash of its tokens and all before them, and its group."""
_GROUP_BYTES = 4
_Asked = tuple[Name, int | None]
"""And where it ends in its prompt, if that is known."""


@dataclass
class TieredRequest:
    wishes: Wishes = field(default_factory=Wishes)
    answers: dict[Name, bool | None] = field(default_factory=dict)
    """Whether a chunk is there; None while that is being asked. It stays as it is until the request ends, so that a chunk
    that cannot be loaded is not tried again and again."""
    ends: dict[Name, int] = field(default_factory=dict)
    """Of a request with wishes: where its chunks end in its prompt."""
    waited_s: float = 0.0
    """For answers so far, in seconds: there is one limit for all that it asks."""
    stale: bool = False
    """Its KV was computed before the cache was reset, perhaps with other weights."""

    @property
    def names(self) -> list[Name]:
        """Of a request with wishes: its chunks, from the first to the last."""
        return sorted(self.ends, key=lambda name: self.ends[name])


@dataclass(frozen=True)
class Question:
    """The chunks of one request that are to be looked for, in the order in which vLLM asked."""

    request_id: str
    runs: list[list[Name]]
    """What lies behind a gap in one of these is of no use. Of windows each chunk is one by itself."""
    waited_s: float = 0.0
    """What the request has waited for answers before."""


class Answer(NamedTuple):
    request_id: str
    found: Mapping[Name, bool]
    took_s: float


class TieredRequests:
    """Belongs to the scheduler's thread. Holds a few bytes a chunk of the requests that vLLM has."""

    def __init__(self, is_there: Callable[[Name], bool]) -> None:
        """`is_there`: whether memory knows that a chunk is there; must not wait."""
        self._is_there = is_there
        self._requests: dict[str, TieredRequest] = {}
        self._unasked: dict[str, list[_Asked]] = {}
        self._begun: dict[str, TieredRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def is_stale(self, request_id: str) -> bool:
        request = self._requests.get(request_id)
        return request is not None and request.stale

    def begin(self, request_id: str, wishes: Wishes) -> None:
        self._requests[request_id] = TieredRequest(wishes)

    def end(self, request_id: str) -> TieredRequest | None:
        """No call for it follows."""
        self._unasked.pop(request_id, None)
        self._begun.pop(request_id, None)
        return self._requests.pop(request_id, None)

    def look_up(self, request_id: str, name: Name, end_token: int | None = None) -> bool | None:
        """Whether the chunk is there, which ends at that token of its prompt; None: ask again."""
        request = self._requests.setdefault(request_id, TieredRequest())
        if request.wishes.at_the_end:
            if request.wishes.session and not request.ends:
                self._begun[request_id] = request
            request.ends[name] = end_token or 0
        if name in request.answers:
            return request.answers[name]
        if self._is_there(name):
            return True
        request.answers[name] = None
        self._unasked.setdefault(request_id, []).append((name, end_token))
        return None

    def questions(self) -> list[Question]:
        """What is to be asked now: what was looked up since the last call and is not known."""
        unasked, self._unasked = self._unasked, {}
        return [
            Question(request_id, _runs(asked), self._requests[request_id].waited_s)
            for request_id, asked in unasked.items()
        ]

    def answer(self, answer: Answer) -> None:
        """What a question brought. Of a request that has ended nobody wants to know."""
        request = self._requests.get(answer.request_id)
        if request is not None:
            request.waited_s += answer.took_s
            for name, there in answer.found.items():
                if request.answers.get(name, False) is None:
                    request.answers[name] = there

    def could_not_load(self, request_id: str, names: Iterable[Name]) -> None:
        """For this request they are misses from now on."""
        request = self._requests.get(request_id)
        if request is not None:
            request.answers.update(dict.fromkeys(names, False))

    def stores(self, request_id: str, ends: Mapping[Name, int]) -> None:
        """Its chunks, and where they end in its prompt."""
        request = self._requests.get(request_id)
        if request is not None and request.wishes.at_the_end:
            request.ends.update(ends)

    def forgets(self, request_id: str) -> bool:
        """Whether it wishes to have forgotten what it stores."""
        request = self._requests.get(request_id)
        return request is not None and request.wishes.forget

    def begun(self) -> list[TieredRequest]:
        """Requests of sessions whose chunks are known, which they were not at the last call."""
        begun, self._begun = self._begun, {}
        return list(begun.values())

    def forget_everything(self) -> None:
        """The cache was reset. What those compute who are here may come from before."""
        self._unasked.clear()
        for request in self._requests.values():
            request.stale = True
            request.answers.clear()


def _runs(asked: list[_Asked]) -> list[list[Name]]:
    runs = [[asked[0][0]]]
    for before, this in pairwise(asked):
        if _continues(before, this):
            runs[-1].append(this[0])
        else:
            runs.append([this[0]])
    return runs


def _continues(before: _Asked, this: _Asked) -> bool:
    """vLLM walks forward through layers that see every token, and backward through windows."""
    (name, end), (next_name, next_end) = before, this
    return (
        end is not None
        and next_end is not None
        and next_end > end
        and next_name[-_GROUP_BYTES:] == name[-_GROUP_BYTES:]
    )
