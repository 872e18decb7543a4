"""Decide which chunks to promote into the hot cache before a request needs them, and account for the result.

Requests come from explicit hints, from an engine's queue, from `SessionPredictor`, which expects a session's next
turn, and from what was hot before a restart. `PrefetchPlan` holds them in one heap by priority and deadline and returns
the chunk to promote next, within a share of the hot cache and a rate. Everything is pure and synchronous: times are
seconds of one monotonic clock and are passed in, so that the live cache and the replay simulator run the same code.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from math import inf, log2
from typing import TypeAlias

from tiercache.core.admission import RateLimit
from tiercache.core.keys import ChunkKey

HINTS, QUEUE, SESSIONS, PRELOAD = SOURCES = ("hints", "queue", "sessions", "preload")
PREDICTIONS = (SESSIONS, PRELOAD)
"""Sources whose chunks are not pinned: a wrong prediction must cost no room."""

MAX_REQUEST_KEYS = 1 << 14
"""Largest number of keys of a request; the rest is ignored. Dropping this many takes some milliseconds of the event loop."""
_MAX_KEYS = 1 << 18
"""Largest number of keys of all requests, about 50 MB. The oldest requests are dropped for newer requests."""
_SESSION_PRIORITY = 1 << 40
"""Priority of predictions, after all explicit hints."""
_KEYS_AT_ONCE = 4096
"""Keys of expired requests dropped in one call."""
_MARGIN_S = 3.0
"""Promotions begin this many seconds before the chunks may be needed."""
_BURST_S = 0.25
"""Burst of the rate limit, in seconds."""


@dataclass
class PrefetchProgress:
    """Progress of one prefetch, in chunks of `chunk_bytes` each (a shorter tail counts as whole)."""

    asked: int
    found: int = 0
    """Length of the contiguous prefix that some tier has; the others are `missing`."""
    in_flight: int = 0
    promoted: int = 0
    """Chunks in the hot cache, promoted or there already."""
    missing: int = 0
    """Chunks in no tier, after a gap, or with a failed read."""
    cancelled: int = 0
    """Chunks not promoted because of `cancel`, a closed cache, or the end of the `ttl`."""
    chunk_bytes: int = 0

    @property
    def done(self) -> bool:
        return self.promoted + self.missing + self.cancelled == self.asked

    @property
    def promoted_bytes(self) -> int:
        return self.promoted * self.chunk_bytes

    @property
    def found_bytes(self) -> int:
        return self.found * self.chunk_bytes


@dataclass(slots=True, eq=False)
class PrefetchRequest:
    """A prefix that will be needed. Repeated keys count once."""

    source: str
    """A source in `SOURCES`, under which the request is accounted."""
    subject: Hashable
    """The name of the request, for example a session. A newer request of the same source and subject replaces it."""
    keys: Sequence[ChunkKey]
    begin_s: float
    """The earliest time at which the prefix may be needed."""
    due_s: float
    """The target deadline."""
    expires_s: float
    """The time from which the chunks are not worth keeping."""
    priority: int = 0
    """Requests of smaller priority come first, whatever the deadline."""
    progress: PrefetchProgress = field(init=False)
    """Progress of its chunks. It is done once all are promoted, but they are kept until the request expires."""
    on_done: Callable[[], None] | None = field(init=False, default=None)
    """Called once, when the progress is done."""
    cursor: int = field(init=False, default=0)
    """Position before which every key is promoted, missing or in flight."""

    def __post_init__(self) -> None:
        unique = list(dict.fromkeys(self.keys))
        self.keys = unique[:MAX_REQUEST_KEYS]
        self.progress = PrefetchProgress(len(unique), cancelled=len(unique) - len(self.keys))

    def truncate(self, found: int) -> bool:
        """Record that the tiers have only the first `found` keys. Return True if a chunk is left to promote."""
        if self.progress.done:
            return False
        self.progress.found = found
        self.progress.missing += len(self.keys) - found
        self.keys = self.keys[:found]
        self._tell()
        return not self.progress.done

    def settle(self, *, promoted: bool) -> None:
        """Record that a chunk is hot, or could not be read."""
        self.progress.promoted += promoted
        self.progress.missing += not promoted
        self._tell()

    def cancel(self) -> None:
        """Count every chunk that is not promoted or missing as cancelled, those in flight included."""
        progress = self.progress
        progress.cancelled = progress.asked - progress.promoted - progress.missing
        progress.in_flight = 0
        self._tell()

    def _tell(self) -> None:
        if self.progress.done and self.on_done is not None:
            self.on_done()
            self.on_done = None


def hint(
    keys: Sequence[ChunkKey], now_s: float, subject: Hashable, due_in_s: float, ttl_s: float = 60.0, priority: int = 0
) -> PrefetchRequest:
    """Return the request for `keys`, which are needed in `due_in_s` and kept until `ttl_s` after that.

    Programs misjudge the time by about half of it, so the chunks may be needed from half of the time on.
    """
    lead_s = max(0.0, due_in_s)
    return PrefetchRequest(HINTS, subject, keys, now_s + lead_s / 2, now_s + lead_s, now_s + lead_s + ttl_s, priority)


# The session predictor

_PER_OCTAVE = 4
_LEAST_S = 1 / 16
_BUCKETS = 96
"""Number of buckets, up to 2**20 s, twelve days. Another bucket counts the gaps that never ended."""
_PRIOR_WEIGHT = 4.0
"""Weight of the shared distribution, as a number of gaps of the session itself."""
_LEAST_KNOWN = 8
"""Gaps of all sessions before the first prediction."""
_MOST_GAPS, _MOST_OWN_GAPS = 4096, 32
_PRESUMED_LOST_S = 3600.0
_LEAST_CHANCE = 0.8
"""Least chance that a turn comes in its window; below it, there is no prediction."""
_WINDOW_S = 600.0
"""Longest time for which a turn is expected."""


def count_gap(gaps: Counter[int], gap_s: float, limit: int) -> None:
    """Count a gap between two turns in quarter octaves; `inf` for a gap that never ended.

    Beyond `limit` gaps, all counts are halved, so that older gaps weigh less.
    """
    gaps[_bucket(gap_s)] += 1
    if gaps.total() > limit:
        for bucket, number in gaps.items():
            gaps[bucket] = (number + 1) // 2


def next_turn(own: Counter[int], prior: Counter[int]) -> tuple[float, float] | None:
    """Return the start and end of the time in which a session's next turn is expected, in seconds after its last turn.

    Returns None if no time is probable enough. The gaps of the session and those of all sessions are mixed as with a
    Dirichlet prior. The time begins with the first gap from which on the turn comes within the window with a chance of
    at least `_LEAST_CHANCE`, given that it has not come before.
    """
    weight = _PRIOR_WEIGHT / prior.total()
    until = list(accumulate((own[bucket] + weight * prior[bucket] for bucket in range(_BUCKETS + 1)), initial=0.0))
    for bucket in range(_BUCKETS):
        begin_s = _begin_s(bucket)
        end = _bucket(begin_s + _WINDOW_S)
        within = until[end] - until[bucket]
        if until[bucket + 1] > until[bucket] and within >= _LEAST_CHANCE * (until[-1] - until[bucket]):
            return begin_s, _begin_s(end)
    return None


def _bucket(gap_s: float) -> int:
    if gap_s <= _LEAST_S:
        return 0
    if gap_s == inf:
        return _BUCKETS
    return min(_BUCKETS - 1, 1 + int(_PER_OCTAVE * log2(gap_s / _LEAST_S)))


def _begin_s(bucket: int) -> float:
    return _LEAST_S * 2 ** ((bucket - 1) / _PER_OCTAVE) if bucket else 0.0


@dataclass(slots=True)
class _Session:
    active_s: float = -inf
    """Time at which the last turn began or ended."""
    idle: bool = False
    """True if the last turn has ended and the next has not begun."""
    gaps: Counter[int] = field(default_factory=Counter)


class SessionPredictor:
    """Learns the gaps between the turns of sessions, and predicts the next turn after a turn has ended.

    Sessions without activity for an hour, and the least recently active sessions beyond `limit`, are forgotten. They
    count as gaps that never end: otherwise only returns would be counted.
    """

    def __init__(self, limit: int = 10_000) -> None:
        self.limit = limit
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        """Sessions by name, least recently active first."""
        self._gaps: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._sessions)

    def began(self, session: str, now_s: float) -> bool:
        """Record that a turn begins. Return True if the session has at least two turns."""
        state = self._active(session, now_s)
        if state.idle:
            gap_s = max(0.0, now_s - state.active_s)
            count_gap(self._gaps, gap_s, _MOST_GAPS)
            count_gap(state.gaps, gap_s, _MOST_OWN_GAPS)
        state.active_s, state.idle = now_s, False
        return self.came_back(session)

    def ended(self, session: str, keys: Sequence[ChunkKey], now_s: float) -> PrefetchRequest | None:
        """Record that a turn has ended, and return the request for `keys`, with which the next turn begins.

        Returns None while too little is known, or if no time is probable enough; see `next_turn`.
        """
        state = self._active(session, now_s)
        state.active_s, state.idle = now_s, True
        if self._gaps.total() < _LEAST_KNOWN or not keys:
            return None
        turn = next_turn(state.gaps, self._gaps)
        if turn is None:
            return None
        begin_s, end_s = now_s + turn[0], now_s + turn[1]
        return PrefetchRequest(SESSIONS, session, keys, begin_s, begin_s, end_s, _SESSION_PRIORITY)

    def came_back(self, session: str) -> bool:
        """Return True if the session has had at least two turns."""
        state = self._sessions.get(session)
        return state is not None and bool(state.gaps)

    def over(self, session: str) -> None:
        """Forget a session that is over, without learning from it."""
        self._sessions.pop(session, None)

    def _active(self, session: str, now_s: float) -> _Session:
        state = self._sessions.setdefault(session, _Session())
        self._sessions.move_to_end(session)
        while (oldest := next(iter(self._sessions.values()))) is not state and (
            len(self._sessions) > self.limit or now_s > oldest.active_s + _PRESUMED_LOST_S
        ):
            self._sessions.popitem(last=False)
            if oldest.idle:
                count_gap(self._gaps, inf, _MOST_GAPS)
        return state


# The plan


@dataclass
class Account:
    """Bytes of one source. `promoted = used + late + wasted + bytes in flight or not accessed yet`."""

    promoted_bytes: int = 0
    """Bytes whose promotion began."""
    used_bytes: int = 0
    """Bytes that were hot at their access."""
    late_bytes: int = 0
    """Bytes that were in flight at their access."""
    wasted_bytes: int = 0
    """Bytes without an access before the request expired, or before the chunk was removed."""
    cancelled_bytes: int = 0
    """Bytes that were requested and not promoted: the request was withdrawn or expired, or the read failed."""


@dataclass(slots=True, eq=False)
class Promotion:
    """A chunk in flight to the hot cache, or there without an access yet."""

    key: ChunkKey
    parent: ChunkKey | None
    """The previous chunk in its prefix."""
    source: str
    """The source under which it is accounted."""
    requests: list[PrefetchRequest]
    """The requests that expect it."""
    in_flight: bool = True
    counted: bool = False
    """True if its outcome is in the account, or it was hot already."""


_Heap: TypeAlias = list[tuple[tuple[float, float], int, PrefetchRequest]]


class PrefetchPlan:
    """Requests by priority and deadline, and the results for their chunks.

    The driver calls `run_timers`, and `next` until it returns None, begins each promotion, reports its end by `ended`,
    and sleeps until `wake_s` or until something changes. It pins the chunks that the plan keeps until they are accessed
    or removed, or until `take_unexpected` returns them. Chunks of predictions are not kept: a wrong prediction must
    cost no room.
    """

    def __init__(self, chunk_bytes: int, share_bytes: int, bytes_per_s: float = 0.0) -> None:
        """`share_bytes` limits the chunks in the hot cache that are in flight, kept, or pinned by the driver for other
        reasons.

        `bytes_per_s` limits the rate of promotions; 0 means no limit.
        """
        self.chunk_bytes = chunk_bytes
        self.share_bytes = share_bytes
        self.pinned = 0
        """Number of chunks that the driver has pinned for other reasons."""
        self.accounts: dict[str, Account] = {}
        """Accounts by source."""
        self.keys_of: Counter[str] = Counter()
        """Number of keys by source."""
        bytes_per_s = bytes_per_s or inf
        self._rate = RateLimit(bytes_per_s, max(chunk_bytes, bytes_per_s * _BURST_S), bytes_per_s * _BURST_S)
        self._requests: dict[tuple[str, Hashable], PrefetchRequest] = {}
        """Requests by source and subject, oldest first."""
        self._numbers = count()
        self._open: _Heap = []
        """Open requests by priority and deadline, including dropped requests until they are popped."""
        self._timers: _Heap = []
        """Requests by the time at which they open or expire, including dropped requests until they are popped."""
        self._promotions: dict[ChunkKey, Promotion] = {}
        """Chunks that are in flight or kept."""
        self._predicted: dict[ChunkKey, Promotion] = {}
        """Chunks that were promoted for a prediction, without an access yet."""
        self._unexpected: list[ChunkKey] = []

    def offer(self, request: PrefetchRequest, now_s: float) -> None:
        """Add a request; it replaces an older request of the same source and subject."""
        self.withdraw(request.source, request.subject)
        self._requests[request.source, request.subject] = request
        self.keys_of[request.source] += len(request.keys)
        self._push(self._timers, (max(now_s, request.begin_s - _MARGIN_S), 0.0), request)
        while self.keys_of.total() > _MAX_KEYS and len(self._requests) > 1:
            self._drop(next(iter(self._requests.values())))

    def withdraw(self, source: str, subject: Hashable) -> None:
        """Stop promoting and keeping chunks for a request."""
        request = self._requests.get((source, subject))
        if request is not None:
            self._drop(request)

    def clear(self) -> None:
        """Drop all requests. Chunks in flight count as wasted."""
        for request in list(self._requests.values()):
            self._drop(request)
        for promotion in self._promotions.values():
            self._count_wasted(promotion)

    def has(self, source: str, subject: Hashable) -> bool:
        """Return True if the latest request of the subject was not withdrawn and has not expired."""
        return (source, subject) in self._requests

    def cut(self, source: str, subject: Hashable) -> None:
        """Promote no more chunks for a request, and keep account of those that were promoted."""
        request = self._requests.get((source, subject))
        if request is not None:
            self._account(source).cancelled_bytes += (len(request.keys) - request.cursor) * self.chunk_bytes
            request.cursor = len(request.keys)

    @property
    def has_room(self) -> bool:
        """True if one more chunk fits into the share."""
        return (len(self._promotions) + self.pinned + 1) * self.chunk_bytes <= self.share_bytes

    def run_timers(self, now_s: float) -> None:
        """Open and drop requests that are due, a bounded number of keys at once."""
        left = _KEYS_AT_ONCE
        while left > 0 and self._timers and self._timers[0][0][0] <= now_s:
            request = heapq.heappop(self._timers)[2]
            left -= 1
            if not self._holds(request):
                continue
            if now_s >= request.expires_s:
                left -= len(request.keys)
                self._drop(request)
            else:
                self._push(self._open, (request.priority, request.due_s), request)
                self._push(self._timers, (request.expires_s, 0.0), request)

    def next(self, now_s: float, hot: Callable[[ChunkKey, bool], bool | None]) -> Promotion | None:
        """Return the chunk to promote now, which counts as begun; None if there is no chunk or no budget: see `wake_s`.

        `hot(key, pin)` returns None for a chunk that has to be promoted, True for a hot chunk that it has pinned, which
        it does if `pin` is true and there is room, and False for any other chunk. The plan keeps the pinned chunks.
        """
        while self._open and self.has_room and self._rate.allows(self.chunk_bytes, now_s):
            request = self._open[0][2]
            if request.cursor >= len(request.keys):
                heapq.heappop(self._open)
                continue
            if request.source == PRELOAD and request.progress.in_flight:
                return None  # one at a time, so that the hottest get the last slots
            key, parent = request.keys[request.cursor], request.keys[request.cursor - 1] if request.cursor else None
            request.cursor += 1
            promotion = self._promotions.get(key)
            if promotion is not None:
                if promotion.in_flight or request.source not in PREDICTIONS:
                    promotion.requests.append(request)
            elif (pinned := hot(key, request.source not in PREDICTIONS)) is None:
                promotion = self._promotions[key] = Promotion(key, parent, request.source, [request])
                request.progress.in_flight += 1
                self._account(request.source).promoted_bytes += self.chunk_bytes
                self._rate.take(self.chunk_bytes)
                return promotion
            elif pinned:
                self._promotions[key] = Promotion(key, parent, request.source, [request], False, counted=True)
            if promotion is not None and promotion.in_flight:
                request.progress.in_flight += 1
            else:
                request.settle(promoted=True)
        return None

    def wake_s(self, now_s: float) -> float | None:
        """Return when to call `run_timers` and `next` again unless an event comes first; None means only after an event."""
        times = [self._timers[0][0][0]] if self._timers else []
        if self._open and self.has_room and not self._rate.allows(self.chunk_bytes, now_s):
            times.append(now_s + max(1e-6, self._rate.wait_s(self.chunk_bytes)))
        return max(now_s, min(times)) if times else None

    def ended(self, promotion: Promotion, *, promoted: bool) -> bool:
        """Record how a promotion has ended. Return True if the plan keeps the chunk, so that the driver should pin it."""
        promotion.in_flight = False
        for request in promotion.requests:
            request.progress.in_flight -= 1
            request.settle(promoted=promoted)
        expected = promoted and bool(promotion.requests) and not promotion.counted
        pinned_for = [request for request in promotion.requests if request.source not in PREDICTIONS]
        if expected and pinned_for:
            promotion.requests = pinned_for
            return True
        del self._promotions[promotion.key]
        if expected:
            self.removed(promotion.key)
            self._predicted[promotion.key] = promotion
        elif promoted:
            self._count_wasted(promotion)
        elif not promotion.counted:
            self._account(promotion.source).promoted_bytes -= self.chunk_bytes
            self._account(promotion.source).cancelled_bytes += self.chunk_bytes
        return False

    def used(self, key: ChunkKey, *, hot: bool) -> None:
        """Record an access to a chunk that was `hot` or not. The plan no longer keeps the chunk."""
        promotion = self._promotions.get(key)
        if promotion is not None and promotion.in_flight:
            if not promotion.counted:
                promotion.counted = True
                self._account(promotion.source).late_bytes += self.chunk_bytes
        elif hot:
            for promotion in self._taken(key):
                if not promotion.counted:
                    self._account(promotion.source).used_bytes += self.chunk_bytes
        else:
            self.removed(key)

    def removed(self, key: ChunkKey) -> None:
        """Record that a chunk has left the hot cache. The plan no longer keeps the chunk."""
        for promotion in self._taken(key):
            self._count_wasted(promotion)

    def _taken(self, key: ChunkKey) -> list[Promotion]:
        """Remove and return the promotions of a chunk that has arrived and was not accessed."""
        found = [self._predicted.pop(key)] if key in self._predicted else []
        if key in self._promotions and not self._promotions[key].in_flight:
            found.append(self._promotions.pop(key))
        return found

    def take_unexpected(self) -> list[ChunkKey]:
        """Return, once, the kept chunks that no request expects any more."""
        keys, self._unexpected = self._unexpected, []
        return keys

    def _drop(self, request: PrefetchRequest) -> None:
        del self._requests[request.source, request.subject]
        self.keys_of[request.source] -= len(request.keys)
        self._account(request.source).cancelled_bytes += (len(request.keys) - request.cursor) * self.chunk_bytes
        for key in request.keys[: request.cursor]:
            for promotions in (self._promotions, self._predicted):
                promotion = promotions.get(key)
                if promotion is not None and request in promotion.requests:
                    promotion.requests.remove(request)
                    if not promotion.requests and not promotion.in_flight:
                        del promotions[key]
                        self._count_wasted(promotion)
                        if promotions is self._promotions:
                            self._unexpected.append(key)
        request.keys = ()
        request.cancel()

    def _holds(self, request: PrefetchRequest) -> bool:
        return self._requests.get((request.source, request.subject)) is request

    def _push(self, heap: _Heap, order: tuple[float, float], request: PrefetchRequest) -> None:
        heapq.heappush(heap, (order, next(self._numbers), request))
        if len(heap) > 2 * len(self._requests) + 64:
            heap[:] = [entry for entry in heap if self._holds(entry[2])]
            heapq.heapify(heap)

    def _count_wasted(self, promotion: Promotion) -> None:
        if not promotion.counted:
            promotion.counted = True
            self._account(promotion.source).wasted_bytes += self.chunk_bytes

    def _account(self, source: str) -> Account:
        return self.accounts.setdefault(source, Account())
