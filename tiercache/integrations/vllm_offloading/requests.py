"""State of vLLM's requests: which chunks were asked for, and the answers. Pure, without vLLM.

vLLM asks for one chunk at a time, again in each step until all have an answer. Chunks that memory knows to be present
are answered at once. The others form one question per step and request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from tiercache.integrations.vllm.hints import Wishes

Name = bytes
"""vLLM's name of a chunk: the hash of its tokens and all tokens before them, and its group."""
_GROUP_BYTES = 4
_Asked = tuple[Name, int | None]
"""A name, and the end of the chunk in its prompt if known."""


@dataclass
class TieredRequest:
    wishes: Wishes = field(default_factory=Wishes)
    answers: dict[Name, bool | None] = field(default_factory=dict)
    """True if a chunk is present; None while the lookup is in flight.

    An answer stays until the request ends, so that a chunk that cannot be loaded is not retried again and again."""
    ends: dict[Name, int] = field(default_factory=dict)
    """Ends of chunks in the prompt, for a request with hints."""
    waited_s: float = 0.0
    """Seconds waited for answers so far: one limit applies to all questions of a request."""
    stale: bool = False
    """True if the KV was computed before the cache was reset, perhaps with other weights."""

    @property
    def names(self) -> list[Name]:
        """The chunks of a request with hints, from the first to the last."""
        return sorted(self.ends, key=lambda name: self.ends[name])


@dataclass(frozen=True)
class Question:
    """The chunks of one request to look up, in vLLM's order."""

    request_id: str
    runs: list[list[Name]]
    """Runs of names: chunks after a gap in a run are useless. Each chunk of a window is a run of its own."""
    waited_s: float = 0.0
    """Seconds that the request has already waited for answers."""


class Answer(NamedTuple):
    request_id: str
    found: Mapping[Name, bool]
    took_s: float


class TieredRequests:
    """State of all requests in vLLM. Bound to the scheduler's thread. Holds a few bytes per chunk."""

    def __init__(self, is_there: Callable[[Name], bool]) -> None:
        """`is_there` returns True if memory knows that a chunk is present. It must not wait."""
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
        """Remove a request and return it. No call for the request follows."""
        self._unasked.pop(request_id, None)
        self._begun.pop(request_id, None)
        return self._requests.pop(request_id, None)

    def look_up(self, request_id: str, name: Name, end_token: int | None = None) -> bool | None:
        """Return True if the chunk, which ends at `end_token` of its prompt, is present; None means ask again."""
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
        """Return a question per request for the chunks that were looked up since the last call and are unknown."""
        unasked, self._unasked = self._unasked, {}
        return [
            Question(request_id, _runs(asked), self._requests[request_id].waited_s)
            for request_id, asked in unasked.items()
        ]

    def answer(self, answer: Answer) -> None:
        """Record an answer. Ignores answers for requests that have ended."""
        request = self._requests.get(answer.request_id)
        if request is not None:
            request.waited_s += answer.took_s
            for name, there in answer.found.items():
                if request.answers.get(name, False) is None:
                    request.answers[name] = there

    def could_not_load(self, request_id: str, names: Iterable[Name]) -> None:
        """Count these chunks as misses for this request from now on."""
        request = self._requests.get(request_id)
        if request is not None:
            request.answers.update(dict.fromkeys(names, False))

    def stores(self, request_id: str, ends: Mapping[Name, int]) -> None:
        """Record chunks of the request, with their ends in its prompt."""
        request = self._requests.get(request_id)
        if request is not None and request.wishes.at_the_end:
            request.ends.update(ends)

    def forgets(self, request_id: str) -> bool:
        """Return True if the request asks to forget the chunks that it stores."""
        request = self._requests.get(request_id)
        return request is not None and request.wishes.forget

    def begun(self) -> list[TieredRequest]:
        """Return the requests of sessions whose chunks have become known since the last call."""
        begun, self._begun = self._begun, {}
        return list(begun.values())

    def forget_everything(self) -> None:
        """Mark all requests as stale after a reset, since their KV may be from before it."""
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
    """Return True if two lookups belong to one run: vLLM walks forward through full attention, backward through windows."""
    (name, end), (next_name, next_end) = before, this
    return (
        end is not None
        and next_end is not None
        and next_end > end
        and next_name[-_GROUP_BYTES:] == name[-_GROUP_BYTES:]
    )
