"""Decide which chunks to promote into the hot cache before they are asked for, and account for what came of it.

Predictions come from explicit hints, from requests that wait in an engine's queue, and from `SessionPredictor`, which
expects a session's next turn. `PrefetchPlan` holds them in one heap by priority and deadline and says which chunk to promote
next, within a share of the hot cache and a rate. Everything is pure and synchronous: times are seconds of one monotonic
clock and are passed in, so that the live cache and the replay simulator run the same code.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, count
from math import exp, inf, log2
from typing import NamedTuple

from tiercache.core.bucket import TokenBucket
from tiercache.core.keys import ChunkKey

HINTS, QUEUE, SESSIONS = SOURCES = ("hints", "queue", "sessions")

MAX_REQUEST_KEYS = 1 << 14
"""Keys of one prediction that are acted on. Dropping that many takes about a millisecond of the event loop."""
_MAX_KEYS = 1 << 18
"""Keys of all predictions together, about 70 MB. The oldest predictions are dropped for newer ones."""
_SESSION_PRIORITY = 1 << 40
"""Guesses go after everything that a program has said itself."""
_SWEEP_S = 1.0
_NO_ROOM_PAUSE_S = 0.1
_RENEWED = 4096
"""Chunks that are passed over in one search for a victim, which takes some milliseconds of the event loop."""
_TURNOVER_S = 60.0
"""Time constant of the average over evictions."""
_KEYS_AT_ONCE = 4096
"""Keys of expired predictions that are dropped in one call."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A prefix that will be needed. A newer prediction of the same source and subject replaces it."""

    source: str
    """One of `SOURCES`; accounts are kept by it."""
    subject: str
    """The subject of the prediction, such as a session."""
    keys: Sequence[ChunkKey]
    begin_s: float
    """The earliest time at which the prefix may be needed."""
    due_s: float
    """The deadline to aim at."""
    expires_s: float
    """The time from which the chunks are not worth keeping."""
    priority: int = 0
    """Smaller goes first, whatever the deadline."""
    promote_until_s: float = inf
    """The time from which nothing is promoted for it. Promoted chunks are kept until it expires."""


def hint(
    keys: Sequence[ChunkKey],
    now_s: float,
    subject: str,
    *,
    due_in_s: float = 0.0,
    ttl_s: float = 60.0,
    priority: int = 0,
) -> Prediction:
    """Return the prediction that `keys` are needed in `due_in_s` and not worth keeping `ttl_s` after that.

    Programs are wrong about the time by about half of it, so the chunks are wanted from half of the time on.
    """
    lead_s = max(0.0, due_in_s)
    return Prediction(HINTS, subject, keys, now_s + lead_s / 2, now_s + lead_s, now_s + lead_s + ttl_s, priority)


# The session predictor

_PER_OCTAVE = 4
_LEAST_S = 1 / 16
_BUCKETS = 96
"""Up to 2**20 s, twelve days. One more bucket counts the gaps that never ended."""
_PRIOR_WEIGHT = 4.0
"""The shared distribution weighs as much as this many gaps of the session itself."""
_LEAST_KNOWN = 8.0
"""Gaps of all sessions that must have been seen before anything is predicted."""
_PRESUMED_LOST_S = 3600.0
_EARLY, _LATE = 0.05, 0.95
"""Quantiles of the gaps between which a turn is expected."""


class Gaps:
    """Histogram of the gaps between two turns in quarter octaves. When `limit` gaps were counted, all counts are halved."""

    __slots__ = ("counts", "limit", "total")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.counts: dict[int, float] = {}
        self.total = 0.0

    def add(self, gap_s: float, weight: float = 1.0) -> None:
        """Count a gap; `inf` never ended. A negative weight takes one back."""
        bucket = _bucket(gap_s)
        before = self.counts.get(bucket, 0.0)
        self.counts[bucket] = max(0.0, before + weight)
        self.total += self.counts[bucket] - before
        if self.total > self.limit:
            self.counts = {bucket: number / 2 for bucket, number in self.counts.items()}
            self.total /= 2


class NextTurn(NamedTuple):
    """Times in seconds after a session's last turn."""

    begin_s: float
    due_s: float
    promote_until_s: float
    expires_s: float


def next_turn(own: Gaps, prior: Gaps, window_s: float, least_chance: float) -> NextTurn | None:
    """Return when to promote the chunks of a session's next turn; None if there is no such time.

    The gaps of the session and those of all sessions are mixed as with a Dirichlet prior. A chunk that is promoted stays hot
    for `window_s`. Promote from the first time on, between two quantiles of the gaps, at which the turn comes within the
    window with at least `least_chance`, given that it has not come before, and until the chance is less.
    """
    weight = _PRIOR_WEIGHT / prior.total
    counts = [own.counts.get(bucket, 0.0) + weight * prior.counts.get(bucket, 0.0) for bucket in range(_BUCKETS + 1)]
    until = list(accumulate(counts, initial=0.0))
    total, returning = until[_BUCKETS + 1], until[_BUCKETS]
    last = next((bucket for bucket in range(_BUCKETS) if until[bucket + 1] >= _LATE * returning), _BUCKETS - 1)
    found = None
    for bucket in range(last + 1):
        if until[bucket + 1] < _EARLY * returning:
            continue
        begin_s = _begin_s(bucket)
        end = last + 1 if window_s == inf else min(last + 1, _bucket(begin_s + window_s))
        within = until[end] - until[bucket]
        if within > 0 and within >= least_chance * (total - until[bucket]):
            if found is None:
                half = until[bucket] + within / 2
                due = next(each for each in range(bucket, end) if until[each + 1] >= half)
                found = NextTurn(begin_s, _begin_s(due), begin_s, begin_s)
            found = found._replace(promote_until_s=_begin_s(bucket + 1), expires_s=_begin_s(end))
        elif found is not None:
            break
    return found


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
    keys: Sequence[ChunkKey] = ()
    ended_s: float | None = None
    """When the last turn ended; None while one is running."""
    lost: bool = False
    """Counted as a gap that never ends, until it does."""
    gaps: Gaps = field(default_factory=lambda: Gaps(32))


class SessionPredictor:
    """Learns the gaps between the turns of sessions, and predicts the next turn when one has ended.

    The least recently active sessions are forgotten beyond `limit` of them, or `limit_keys` that all of them have.
    """

    def __init__(self, limit: int = 10_000, limit_keys: int = 400_000) -> None:
        self.limit = limit
        self.limit_keys = limit_keys
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        """Sessions by name, the least recently active one first."""
        self._keys = 0
        self._gaps = Gaps(4096)
        self._waiting: OrderedDict[str, float] = OrderedDict()
        """End of the last turn of each session that may come back."""

    def __len__(self) -> int:
        return len(self._sessions)

    def began(self, session: str, now_s: float) -> bool:
        """Record that a turn begins. Return True if the session has come back at least once."""
        state = self._state(session, ())
        if state.ended_s is not None:
            if state.lost:
                self._gaps.add(inf, -1.0)
            gap_s = max(0.0, now_s - state.ended_s)
            self._gaps.add(gap_s)
            state.gaps.add(gap_s)
            state.ended_s, state.lost = None, False
        self._waiting.pop(session, None)
        return self.came_back(session)

    def ended(
        self, session: str, keys: Sequence[ChunkKey], now_s: float, window_s: float, least_chance: float
    ) -> Prediction | None:
        """Record that a turn has ended and return the prediction that the next one begins with `keys`.

        None while too little is known, or if no time is probable enough; see `next_turn`.
        """
        state = self._state(session, keys[:MAX_REQUEST_KEYS])
        if state.lost:
            self._gaps.add(inf, -1.0)
        state.ended_s, state.lost = now_s, False
        self._waiting[session] = now_s
        self._waiting.move_to_end(session)
        self._presume_lost(now_s)
        if self._gaps.total < _LEAST_KNOWN or not state.keys:
            return None
        turn = next_turn(state.gaps, self._gaps, window_s, least_chance)
        if turn is None:
            return None
        return Prediction(
            SESSIONS,
            session,
            state.keys,
            now_s + turn.begin_s,
            now_s + turn.due_s,
            now_s + turn.expires_s,
            _SESSION_PRIORITY,
            now_s + turn.promote_until_s,
        )

    def came_back(self, session: str) -> bool:
        """Return True if a turn of the session has followed another one."""
        state = self._sessions.get(session)
        return state is not None and state.gaps.total > 0

    def over(self, session: str) -> None:
        """Forget a session that is over. Nothing is learnt from that."""
        state = self._sessions.pop(session, None)
        self._waiting.pop(session, None)
        if state is not None:
            self._keys -= len(state.keys)

    def _state(self, session: str, keys: Sequence[ChunkKey]) -> _Session:
        """Return the session, with the keys of its last turn."""
        state = self._sessions.setdefault(session, _Session())
        self._sessions.move_to_end(session)
        self._keys += len(keys) - len(state.keys)
        state.keys = keys
        while len(self._sessions) > self.limit or (self._keys > self.limit_keys and len(self._sessions) > 1):
            forgotten, oldest = next(iter(self._sessions.items()))
            if oldest.ended_s is not None and not oldest.lost:
                self._gaps.add(inf)
            self.over(forgotten)
        return state

    def _presume_lost(self, now_s: float) -> None:
        """Count sessions that stay away as lost: without them only returns would be counted."""
        while self._waiting:
            session, ended_s = next(iter(self._waiting.items()))
            if now_s < ended_s + _PRESUMED_LOST_S:
                return
            del self._waiting[session]
            self._sessions[session].lost = True
            self._gaps.add(inf)


# Accounts


@dataclass
class Account:
    """Bytes of one source. `promoted = used + late + evicted + wasted + bytes in flight or not used yet`."""

    promoted_bytes: int = 0
    """Bytes whose promotion began."""
    used_bytes: int = 0
    """Bytes that were hot when they were read."""
    late_bytes: int = 0
    """Bytes that were in flight when they were read."""
    evicted_bytes: int = 0
    """Bytes that were evicted before they were used."""
    wasted_bytes: int = 0
    """Bytes that were not used before the prediction expired, or before the chunk was removed."""
    cancelled_bytes: int = 0
    """Bytes that were predicted and not promoted: the prediction was withdrawn or expired, or the read failed."""

    @property
    def lost_bytes(self) -> int:
        return self.evicted_bytes + self.wasted_bytes

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


class Accounts:
    """The chunks that are being promoted, or were promoted and not used yet, and an account for each source."""

    def __init__(self, chunk_bytes: int) -> None:
        self.by_source: dict[str, Account] = {}
        self.in_flight: dict[ChunkKey, str] = {}
        """Source by key."""
        self.ready: dict[ChunkKey, str] = {}
        """Source by key that is in the hot cache and not used yet."""
        self._chunk_bytes = chunk_bytes

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are in flight or ready."""
        return (len(self.ready) + len(self.in_flight)) * self._chunk_bytes

    def began(self, key: ChunkKey, source: str) -> None:
        self.in_flight[key] = source
        self._of(source).promoted_bytes += self._chunk_bytes

    def arrived(self, key: ChunkKey) -> bool:
        """Record that a promotion has ended in the hot cache. Return False if the chunk was used meanwhile."""
        source = self.in_flight.pop(key, None)
        if source is None:
            return False
        self.ready[key] = source
        return True

    def failed(self, key: ChunkKey) -> None:
        source = self.in_flight.pop(key, None)
        if source is not None:
            self._of(source).promoted_bytes -= self._chunk_bytes
            self._of(source).cancelled_bytes += self._chunk_bytes

    def cancelled(self, chunks: int, source: str) -> None:
        self._of(source).cancelled_bytes += chunks * self._chunk_bytes

    def used(self, key: ChunkKey) -> None:
        if (source := self.ready.pop(key, None)) is not None:
            self._of(source).used_bytes += self._chunk_bytes
        elif (source := self.in_flight.pop(key, None)) is not None:
            self._of(source).late_bytes += self._chunk_bytes

    def evicted(self, key: ChunkKey) -> None:
        if (source := self.ready.pop(key, None)) is not None:
            self._of(source).evicted_bytes += self._chunk_bytes

    def wasted(self, key: ChunkKey) -> None:
        if (source := self.ready.pop(key, None)) is not None:
            self._of(source).wasted_bytes += self._chunk_bytes

    def finish(self) -> None:
        """Count everything that is not used by now as wasted."""
        self.ready |= self.in_flight
        self.in_flight.clear()
        for key in list(self.ready):
            self.wasted(key)

    def _of(self, source: str) -> Account:
        return self.by_source.setdefault(source, Account())


# The plan


@dataclass(frozen=True)
class PrefetchSettings:
    hot_bytes: int
    """Size of the hot cache."""
    share_bytes: int
    """The most that chunks may take of it which were promoted and not used yet, or are kept for a prediction, or pinned."""
    bytes_per_s: float = 0.0
    """Rate limit of promotions; 0: none."""
    transfer_bytes_per_s: float = 1e9
    """Bandwidth of the tiers. A promotion begins earlier by the time of its transfer."""
    margin_s: float = 3.0
    """A promotion begins this much earlier in addition."""
    least_probability: float = 0.8
    """The least chance that a predicted turn comes while its chunks are hot; below it, nothing is promoted for it."""
    burst_s: float = 0.25
    """Seconds' worth of `bytes_per_s` that may go at once."""


class _Request:
    """A prediction that is acted on."""

    __slots__ = ("cursor", "expires_s", "keys", "name", "number", "open", "promote_until_s", "rank", "used")

    def __init__(self, prediction: Prediction, number: int) -> None:
        self.name = prediction.source, prediction.subject
        self.keys = list(dict.fromkeys(prediction.keys[:MAX_REQUEST_KEYS]))
        self.number = number
        self.rank = float(prediction.priority), prediction.due_s
        self.promote_until_s = min(prediction.promote_until_s, prediction.expires_s)
        self.expires_s = prediction.expires_s
        self.open = False
        """Chunks may be promoted for it now."""
        self.cursor = 0
        """Every key before this position is resident, in flight, used, or cannot be had."""
        self.used: set[ChunkKey] = set()


class _Heap:
    """Requests by rank. Entries that were replaced or removed are dropped when they come up, or are more than half."""

    def __init__(self) -> None:
        self._ranks: dict[_Request, tuple[float, float]] = {}
        self._heap: list[tuple[tuple[float, float], int, _Request]] = []

    def set(self, request: _Request, rank: tuple[float, float]) -> None:
        if self._ranks.get(request) == rank:
            return
        self._ranks[request] = rank
        heapq.heappush(self._heap, (rank, request.number, request))
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(rank, request.number, request) for request, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def remove(self, request: _Request) -> None:
        self._ranks.pop(request, None)

    @property
    def first(self) -> tuple[tuple[float, float], _Request] | None:
        heap, ranks = self._heap, self._ranks
        while heap and ranks.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return (heap[0][0], heap[0][2]) if heap else None


@dataclass(frozen=True, slots=True)
class Promotion:
    """A chunk to promote now, and the chunk before it in its prefix."""

    key: ChunkKey
    parent: ChunkKey | None
    position: int
    request: _Request


class PrefetchPlan:
    """Requests by priority and deadline, and what became of their chunks.

    The driver calls `next` until it returns None, begins each promotion, and sleeps until `wake_s` or until something
    changes. It reports how each promotion ended to `accounts` or by `no_room`, and what was `used` and `evicted`.
    """

    def __init__(self, settings: PrefetchSettings, chunk_bytes: int) -> None:
        self.settings = settings
        self.chunk_bytes = chunk_bytes
        self.kept_bytes = 0
        """Bytes of the share that the driver keeps besides promoted chunks: hot chunks that are expected, and pins."""
        self.accounts = Accounts(chunk_bytes)
        self._requests: dict[tuple[str, str], _Request] = {}
        """Requests by source and subject, the oldest one first."""
        self._numbers = count()
        self._keys = 0
        self._owners: dict[ChunkKey, tuple[_Request, int]] = {}
        """The most urgent request that expects a key, and the position in it, by key."""
        self._ready = _Heap()
        """Open requests with keys behind the cursor, by priority and deadline."""
        self._timers = _Heap()
        """Every request, by the time at which it opens or expires."""
        burst_bytes = settings.bytes_per_s * settings.burst_s
        self._bucket = TokenBucket(settings.bytes_per_s, max(chunk_bytes, burst_bytes), burst_bytes)
        self._paused_until_s = -inf
        self._swept_s = -inf
        self._turnover_bytes = 0.0
        self._turnover_at_s = 0.0

    def offer(self, prediction: Prediction, now_s: float) -> None:
        """Act on a prediction; it replaces an older one of the same source and subject."""
        old = self._requests.get((prediction.source, prediction.subject))
        if old is not None:
            self._drop(old)
        if now_s > prediction.expires_s or not prediction.keys:
            return
        speed = min(self.settings.transfer_bytes_per_s, self.settings.bytes_per_s or inf)
        transfer_s = len(prediction.keys) * self.chunk_bytes / speed
        request = _Request(prediction, next(self._numbers))
        start_s = prediction.begin_s - transfer_s - self.settings.margin_s
        self._requests[request.name] = request
        self._keys += len(request.keys)
        owners = self._owners
        for position, key in enumerate(request.keys):
            owner = owners.get(key)
            if owner is None or owner[0].rank > request.rank:
                owners[key] = request, position
        self._timers.set(request, (max(now_s, start_s), 0.0))
        while self._keys > _MAX_KEYS and len(self._requests) > 1:
            self._drop(next(iter(self._requests.values())))

    def withdraw(self, source: str, subject: str, now_s: float, keep_s: float = 0.0) -> None:
        """Promote nothing more for a prediction. Chunks that were promoted for it are expected for another `keep_s`."""
        request = self._requests.get((source, subject))
        if request is None:
            return
        if keep_s <= 0:
            self._drop(request)
            return
        self._cancel_rest(request)
        request.expires_s = now_s + keep_s
        self._timers.set(request, (request.expires_s, 0.0))

    def has(self, source: str, subject: str) -> bool:
        """Return True if the latest prediction counts: it was not withdrawn, used up or replaced, and has not expired."""
        return (source, subject) in self._requests

    def expects(self, key: ChunkKey) -> bool:
        return key in self._owners

    def next(self, now_s: float, resident: Callable[[ChunkKey], bool]) -> Promotion | None:
        """Return the chunk to promote now; it counts as begun. None if there is none, or no budget: see `wake_s`.

        `resident` says that a chunk needs no promotion: it is hot, or no tier has it.
        """
        self._run_timers(now_s)
        if now_s < self._paused_until_s or not self._has_tokens(now_s):
            return None
        while self._has_room() and (first := self._ready.first) is not None:
            request = first[1]
            position = self._advance(request, resident)
            if position == len(request.keys):
                self._ready.remove(request)
                continue
            if not self._has_room():  # hot chunks that `resident` has pinned took it
                break
            request.cursor = position + 1
            key = request.keys[position]
            self.accounts.began(key, request.name[0])
            self._bucket.take(self.chunk_bytes)
            return Promotion(key, request.keys[position - 1] if position else None, position, request)
        return None

    def wake_s(self, now_s: float) -> float | None:
        """Return when to call `next` again if nothing is reported before; None: not before something is."""
        times = []
        if self._ready.first is not None:
            wait_s = _SWEEP_S
            if not self._has_tokens(now_s):
                wait_s = max(1e-6, self._bucket.wait_s(self.chunk_bytes))
            times.append(self._paused_until_s if now_s < self._paused_until_s else now_s + wait_s)
        if (first := self._timers.first) is not None:
            times.append(first[0][0])
        if self.accounts.ready:
            times.append(self._swept_s + _SWEEP_S)
        return max(now_s, min(times)) if times else None

    def find_room(
        self,
        next_victim: Callable[[], ChunkKey | None],
        renew: Callable[[Sequence[ChunkKey]], object],
        promotion: Promotion,
    ) -> bool:
        """Return True if what the hot cache would evict next may go for `promotion`. Otherwise report `no_room`.

        `next_victim` returns None if nothing has to go. A chunk that a request expects which is at least as urgent is passed
        over, and all that this request expects is renewed.
        """
        left = _RENEWED
        while left > 0 and (victim := next_victim()) is not None:
            owner = self._owners.get(victim)
            if owner is None or owner[0].rank > promotion.request.rank:
                break
            renew([key for key in owner[0].keys if self._owns(owner[0], key)])
            left -= len(owner[0].keys)
        return left > 0

    def no_room(self, promotion: Promotion, now_s: float) -> None:
        """Report that a promotion has found no room. It is tried again a little later."""
        self.accounts.failed(promotion.key)
        request = promotion.request
        self._paused_until_s = now_s + _NO_ROOM_PAUSE_S
        if self._requests.get(request.name) is request and request.open:
            request.cursor = min(request.cursor, promotion.position)
            request.open = False
            self._ready.remove(request)
            self._timers.set(request, (now_s + _SWEEP_S, 0.0))

    def used(self, keys: Iterable[ChunkKey]) -> None:
        """Report that chunks were asked for. None of them is promoted again for the request that expected it."""
        for key in keys:
            self.accounts.used(key)
            owner = self._owners.pop(key, None)
            if owner is not None:
                request = owner[0]
                request.used.add(key)
                if len(request.used) == len(request.keys):
                    self._drop(request)

    def evicted(self, keys: Sequence[ChunkKey], now_s: float) -> None:
        """Report evictions from the hot cache. Chunks that are expected are promoted again."""
        self._turnover_bytes = self._turnover(now_s) + len(keys) * self.chunk_bytes
        self._turnover_at_s = max(now_s, self._turnover_at_s)
        if not self._owners and not self.accounts.ready:
            return
        for key in keys:
            self.accounts.evicted(key)
            owner = self._owners.get(key)
            if owner is not None and owner[0].open:
                request, position = owner
                request.cursor = min(request.cursor, position)
                self._ready.set(request, request.rank)

    def lifetime_s(self, now_s: float) -> float:
        """Return how long an unused chunk stays in the hot cache at the rate of the latest evictions."""
        turnover = self._turnover(now_s) / _TURNOVER_S
        return self.settings.hot_bytes / turnover if turnover > 0 else inf

    def _turnover(self, now_s: float) -> float:
        return self._turnover_bytes * exp(-max(0.0, now_s - self._turnover_at_s) / _TURNOVER_S)

    def _advance(self, request: _Request, resident: Callable[[ChunkKey], bool]) -> int:
        """Move the cursor to the next key that has to be promoted; return its position."""
        keys, in_flight = request.keys, self.accounts.in_flight
        position = request.cursor
        while position < len(keys):
            key = keys[position]
            if not (key in request.used or key in in_flight or resident(key)):
                break
            position += 1
        request.cursor = position
        return position

    def _run_timers(self, now_s: float) -> None:
        """Open and drop requests whose time has come, a bounded number of keys at once, and give up what is not expected."""
        left = _KEYS_AT_ONCE
        while left > 0 and (first := self._timers.first) is not None and first[0][0] <= now_s:
            request = first[1]
            left -= 1
            if now_s >= request.expires_s:
                left -= len(request.keys)
                self._drop(request)
            elif now_s >= request.promote_until_s:
                self._cancel_rest(request)
                self._timers.set(request, (request.expires_s, 0.0))
            else:
                request.open = True
                self._ready.set(request, request.rank)
                self._timers.set(request, (request.promote_until_s, 0.0))
        if now_s >= self._swept_s + _SWEEP_S:
            self._swept_s = now_s
            for key in [key for key in self.accounts.ready if key not in self._owners]:
                self.accounts.wasted(key)

    def _cancel_rest(self, request: _Request) -> None:
        self.accounts.cancelled(len(request.keys) - request.cursor, request.name[0])
        request.cursor = len(request.keys)
        request.open = False
        self._ready.remove(request)

    def _drop(self, request: _Request) -> None:
        self._cancel_rest(request)
        self._timers.remove(request)
        del self._requests[request.name]
        self._keys -= len(request.keys)
        for key in request.keys:
            if self._owns(request, key):
                del self._owners[key]

    def _owns(self, request: _Request, key: ChunkKey) -> bool:
        owner = self._owners.get(key)
        return owner is not None and owner[0] is request

    def _has_room(self) -> bool:
        return self.accounts.waiting_bytes + self.kept_bytes + self.chunk_bytes <= self.settings.share_bytes

    def _has_tokens(self, now_s: float) -> bool:
        return not self.settings.bytes_per_s or self._bucket.has(self.chunk_bytes, now_s)
