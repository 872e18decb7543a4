"""The plan of the prefetcher: which predicted chunks to bring into the hot cache now, and an account of what came of it.

Pure: no I/O, no clock. A driver (the simulator, or the asynchronous prefetcher) tells it what is predicted, what was asked
for, what arrived and what was evicted, and asks it what to fetch next. A wrong prediction costs the bandwidth that the
settings allow and nothing else: it displaces nothing that is expected sooner, and demand reads go first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from math import exp

from tiercache.core.keys import ChunkKey
from tiercache.core.prediction.base import Prediction

_RUN = 32
"""Chunks that are fetched for one prediction before others are looked at again."""
_RANKED = 64
"""Predictions that are compared for each run; which ones they are is found out once a second."""
_RENEWED = 4096
"""Chunks that are expected sooner and may be passed over in the search for a victim: some milliseconds."""
_SWEEP_S = 1.0
_TURNOVER_S = 60.0
"""Over which evictions are averaged (exponentially)."""
_STALE = 64
"""Entries of a heap that may be out of date, beside as many as are not."""
_MOST_KEYS = 1 << 18
"""Of all predictions together: some 70 MB. Of more, the ones that were made first are not acted on any more."""
_CLEARED = 4096
"""Keys of predictions that count no more, which are cleared away in one go."""
_ENDED = 512
"""Predictions whose time is over, which are ended in one go."""
_NEAR_S = 0.05
"""Rates are not told apart below so short a time."""


@dataclass(frozen=True)
class PrefetchSettings:
    """`bytes_per_s` 0: no limit but the tier's own speed."""

    hot_bytes: int
    """The size of the hot cache."""
    share_bytes: int
    """Of these: the most that chunks may take which were prefetched and not used yet."""
    bytes_per_s: float = 0.0
    transfer_bytes_per_s: float = 1e9
    """What the tier gives; how long before it is needed a transfer has to begin follows from it."""
    margin_s: float = 3.0
    """Begin so much earlier than the transfer's length asks for."""
    least_probability: float = 0.8
    """That a chunk is used before it is evicted, as the hot cache turns over now: below it, no transfer. What is wasted of
    the bytes that are prefetched is at most the rest, as far as the predictions are right."""
    advantage: float = 2.0
    """How many times likelier per second than its victim a chunk must be."""
    burst_s: float = 0.25
    """Of `bytes_per_s`: how much may go at once."""


@dataclass
class Account:
    """Bytes of one predictor. `fetched = used + late + evicted + wasted + what is still waiting to be used`."""

    fetched_bytes: int = 0
    """Whose transfer began."""
    used_bytes: int = 0
    """In the hot cache when they were asked for."""
    late_bytes: int = 0
    """Still on their way when they were asked for."""
    evicted_bytes: int = 0
    """Evicted before they were used."""
    wasted_bytes: int = 0
    """Not used by the time that the prediction allowed, or until the end, or before somebody removed them."""
    cancelled_bytes: int = 0
    """Planned and not fetched any more: asked for before, withdrawn, or expired. Cost nothing."""

    @property
    def lost_bytes(self) -> int:
        return self.evicted_bytes + self.wasted_bytes

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Fetch:
    """A chunk to bring into the hot cache now, and the chunk before it in its prefix."""

    key: ChunkKey
    parent: ChunkKey | None
    predictor: str
    rate: float
    """Expected uses per second: what it is weighed against its victim by."""
    deadline_s: float
    priority: int


class _Entry:
    """A prediction that is acted on. `cursor`: every key before it is resident, on its way, or cannot be had."""

    __slots__ = ("active", "alarm_s", "cursor", "number", "paused_until_s", "prediction")

    def __init__(self, prediction: Prediction, number: int) -> None:
        self.prediction = prediction
        self.number = number
        self.cursor = 0
        self.active = True
        self.paused_until_s = float("-inf")
        self.alarm_s: float | None = None
        """When it is looked at again; None: it is due, or there is nothing to fetch."""

    @property
    def expires_s(self) -> float:
        return self.prediction.latest_s + self.prediction.grace_s

    def rate(self, now_s: float) -> float:
        """Expected uses per second: of the half of the probability that lies before `expected_s`, or of the other half."""
        prediction = self.prediction
        end_s = prediction.expected_s if now_s < prediction.expected_s else prediction.latest_s
        if now_s > end_s:
            end_s = self.expires_s
        return prediction.probability / 2 / max(_NEAR_S, end_s - now_s)


_NOBODY: tuple[_Entry | None, int] = (None, 0)


class PrefetchPlan:
    """All methods are synchronous and take the time (seconds of one monotonic clock) where they need it.

    The driver's loop: `next` until it returns None, begin each fetch, then sleep until `wake_s` or until something changes.
    It reports `fetched` or `failed` for each, `asked` for every request, `evicted` for whatever leaves the hot cache.
    """

    def __init__(self, settings: PrefetchSettings, chunk_bytes: int) -> None:
        self.settings = settings
        self.chunk_bytes = chunk_bytes
        self.accounts: dict[str, Account] = {}
        self.kept_bytes = 0
        """Of the share: what the driver keeps besides what was fetched (hot chunks that are expected, and pins)."""
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._keys_held = 0
        self._due: dict[int, _Entry] = {}
        """Whose time has come, by number."""
        self._alarms: list[tuple[float, int, _Entry]] = []
        self._ends: list[tuple[float, int, _Entry]] = []
        self._ranked: list[_Entry] = []
        self._ranked_s = float("-inf")
        self._numbers = count()
        self._owners: dict[ChunkKey, tuple[_Entry, int]] = {}
        """Who is expected first for a key. Who is not `active` any more counts as nobody."""
        self._dropped: deque[tuple[_Entry, Sequence[ChunkKey], int]] = deque()
        """Who may own keys still though he is not active, those keys, and from where on they are not cleared away yet."""
        self._in_flight: dict[ChunkKey, str] = {}
        self._ready: dict[ChunkKey, str] = {}
        self._swept_s = float("-inf")
        self._clearing_s = float("-inf")
        self._current: _Entry | None = None
        self._current_left = 0
        self._tokens_bytes = settings.bytes_per_s * settings.burst_s
        self._tokens_at_s: float | None = None
        self._turnover_bytes = 0.0
        self._turnover_at_s = 0.0

    # What is predicted

    def offer(self, prediction: Prediction, now_s: float) -> None:
        """Act on a prediction; it replaces an older one of the same predictor and subject."""
        name = prediction.predictor, prediction.subject
        old = self._entries.get(name)
        if old is not None:
            self._drop(name, old)
        if now_s > prediction.latest_s + prediction.grace_s or not prediction.keys:
            return
        entry = self._entries[name] = _Entry(prediction, next(self._numbers))
        self._keys_held += len(prediction.keys)
        owners = self._owners
        rate = entry.rate(now_s)
        for position, key in enumerate(prediction.keys):
            owner = owners.get(key)
            if owner is None or not owner[0].active or owner[0].rate(now_s) <= rate:
                owners[key] = entry, position
        heapq.heappush(self._ends, (entry.expires_s, entry.number, entry))
        self._reopen(entry)
        self._current = None
        while self._keys_held > _MOST_KEYS and len(self._entries) > 1:
            self._withdraw(next(iter(self._entries)))
        # Twice what comes, so that what is left behind does not grow.
        self._clear(2 * len(prediction.keys))

    def withdraw(self, predictor: str, subject: str) -> None:
        """It will not come true (or has). Chunks that were fetched for it stay, and are used or evicted."""
        self._withdraw((predictor, subject))
        self._clear(_CLEARED)

    def _withdraw(self, name: tuple[str, str]) -> None:
        entry = self._entries.get(name)
        if entry is not None:
            missing = len(entry.prediction.keys) - entry.cursor
            self._account(name[0]).cancelled_bytes += missing * self.chunk_bytes
            self._drop(name, entry)

    def acts_on(self, predictor: str, subject: str) -> bool:
        """Whether its latest prediction still counts: it was neither withdrawn nor has its time run out."""
        return (predictor, subject) in self._entries

    # What to do

    def next(self, now_s: float, resident: Callable[[ChunkKey], bool]) -> Fetch | None:
        """The chunk to fetch now; it counts as begun. None when there is none, or no budget: see `wake_s`.

        `resident` says that a chunk needs no fetch: it is hot, or no tier has it.
        """
        chunk_bytes = self.chunk_bytes
        if not self._has_room():
            self._expire(now_s)
            return None
        if not self._has_tokens(now_s):
            self._expire(now_s)
            return None
        while (entry := self._choose(now_s)) is not None:
            keys = entry.prediction.keys
            position = entry.cursor
            while position < len(keys) and (keys[position] in self._in_flight or resident(keys[position])):
                position += 1
            if position == len(keys):
                entry.cursor = position
                self._current = None
                self._due.pop(entry.number, None)
                continue
            if not self._has_room():  # what is hot already was kept, and took it
                entry.cursor = position
                return None
            entry.cursor = position + 1
            key, prediction = keys[position], entry.prediction
            self._in_flight[key] = prediction.predictor
            self._account(prediction.predictor).fetched_bytes += chunk_bytes
            self._tokens_bytes -= chunk_bytes
            parent = keys[position - 1] if position else None
            return Fetch(
                key, parent, prediction.predictor, entry.rate(now_s), prediction.expected_s, prediction.priority
            )
        return None

    def wake_s(self, now_s: float) -> float | None:
        """When to ask `next` again, if nothing is reported before; None: only then."""
        if not self._has_tokens(now_s):
            return now_s + max(1e-6, (self.chunk_bytes - self._tokens_bytes) / self.settings.bytes_per_s)
        if self._due:
            return now_s + _SWEEP_S
        alarms = self._alarms
        while alarms and alarms[0][2].alarm_s != alarms[0][0]:
            heapq.heappop(alarms)
        return max(now_s + _SWEEP_S, alarms[0][0]) if alarms else None

    def yields_to(self, victim: ChunkKey, fetch: Fetch, now_s: float) -> bool:
        """Whether `victim` may be evicted for `fetch`: it is not expected, or much later."""
        owner = self._owners.get(victim)
        if owner is None or not owner[0].active:
            return True
        entry = owner[0]
        if entry.prediction.priority < fetch.priority:
            return False
        return entry.rate(now_s) * self.settings.advantage <= fetch.rate

    def finds_room(
        self,
        next_victim: Callable[[], ChunkKey | None],
        renew: Callable[[Sequence[ChunkKey]], None],
        fetch: Fetch,
        now_s: float,
    ) -> bool:
        """Whether what the hot cache would evict next may go for `fetch`. If not, say `no_room`.

        `next_victim` gives None when nothing has to go. A victim that is expected sooner is passed over, and everything
        that is expected with it is renewed.
        """
        left = _RENEWED
        while left > 0 and (victim := next_victim()) is not None and not self.yields_to(victim, fetch, now_s):
            entry = self._owners[victim][0]
            keys = entry.prediction.keys
            renew([key for key in keys if self._owners.get(key, _NOBODY)[0] is entry])
            left -= len(keys)
        return left > 0

    # What happened

    def fetched(self, key: ChunkKey) -> None:
        """Its transfer has ended and it is in the hot cache."""
        predictor = self._in_flight.pop(key, None)
        if predictor is not None:
            self._ready[key] = predictor

    def failed(self, key: ChunkKey) -> None:
        """It could not be had, or there was no room; no byte is charged."""
        predictor = self._in_flight.pop(key, None)
        if predictor is not None:
            account = self._account(predictor)
            account.fetched_bytes -= self.chunk_bytes
            account.cancelled_bytes += self.chunk_bytes

    def no_room(self, fetch: Fetch, now_s: float) -> None:
        """As `failed`: everything in the hot cache is expected sooner, or is leased. It is tried again a little later."""
        self.failed(fetch.key)
        owner = self._owners.get(fetch.key)
        if owner is not None and owner[0].active:
            entry, position = owner
            entry.cursor = min(entry.cursor, position)
            entry.paused_until_s = now_s + _SWEEP_S
            self._reopen(entry)
        self._current = None

    def asked(self, keys: Iterable[ChunkKey]) -> None:
        """A request needs `keys`: those that were fetched for it were used, those on their way are late."""
        ready, in_flight = self._ready, self._in_flight
        if not ready and not in_flight:
            return
        for key in keys:
            predictor = ready.pop(key, None)
            if predictor is not None:
                self._account(predictor).used_bytes += self.chunk_bytes
            elif key in in_flight:
                self._account(in_flight.pop(key)).late_bytes += self.chunk_bytes

    def met(self, key: ChunkKey) -> None:
        """Whoever was expected first for it has come: when it is evicted now, it is not fetched again for him."""
        self._owners.pop(key, None)

    def evicted(self, keys: Sequence[ChunkKey], now_s: float) -> None:
        """They left the hot cache."""
        self._turnover_bytes = self._turnover(now_s) + len(keys) * self.chunk_bytes
        self._turnover_at_s = now_s
        for key in keys:
            predictor = self._ready.pop(key, None)
            if predictor is not None:
                self._account(predictor).evicted_bytes += self.chunk_bytes
            owner = self._owners.get(key)
            if owner is not None:
                entry, position = owner
                if entry.active:
                    entry.cursor = min(entry.cursor, position)
                    self._reopen(entry)
                else:
                    del self._owners[key]

    def removed(self, key: ChunkKey) -> None:
        """Somebody removed it from the hot cache: it was fetched for nobody."""
        predictor = self._ready.pop(key, None)
        if predictor is not None:
            self._account(predictor).wasted_bytes += self.chunk_bytes

    def finish(self) -> None:
        """Nothing more will come: what was fetched and not used is wasted."""
        for predictor in self._ready.values():
            self._account(predictor).wasted_bytes += self.chunk_bytes
        for predictor in self._in_flight.values():
            self._account(predictor).wasted_bytes += self.chunk_bytes
        self._ready.clear()
        self._in_flight.clear()

    def lifetime_s(self, now_s: float) -> float:
        """How long a chunk that is not used should stay in the hot cache, if that goes on turning over as it did lately."""
        turnover = self._turnover(now_s) / _TURNOVER_S
        return self.settings.hot_bytes / turnover if turnover > 0 else float("inf")

    def _turnover(self, now_s: float) -> float:
        return self._turnover_bytes * exp(-max(0.0, now_s - self._turnover_at_s) / _TURNOVER_S)

    @property
    def waiting_bytes(self) -> int:
        """In the hot cache or on the way, and not used yet."""
        return (len(self._ready) + len(self._in_flight)) * self.chunk_bytes

    @property
    def ready(self) -> int:
        """Chunks that were fetched and not used yet."""
        return len(self._ready)

    def awaits(self, key: ChunkKey) -> bool:
        """Whether it was fetched and not used yet."""
        return key in self._ready

    def expects(self, key: ChunkKey) -> bool:
        """Whether somebody may still come for it."""
        return key in self._ready or self._owned(key)

    def _choose(self, now_s: float) -> _Entry | None:
        """The open prediction with the highest expected value, whose time has come."""
        if self._current is not None and self._current.active and self._current_left and self._open(self._current):
            self._current_left -= 1
            return self._current
        self._expire(now_s)
        woken = self._wake_up(now_s)
        best = None
        if now_s < self._ranked_s + _SWEEP_S:
            best = self._best([*self._ranked, *woken], now_s)
        if best is None:
            self._ranked_s = now_s
            best = self._best(list(self._due.values()), now_s)
        self._current, self._current_left = best, _RUN
        return best

    def _best(self, candidates: list[_Entry], now_s: float) -> _Entry | None:
        """The best of those that are due. The next ones are kept, so that not all are ranked for each run of chunks."""
        until_s = now_s + self.lifetime_s(now_s)
        least = self.settings.least_probability
        ranked = []
        for entry in candidates:
            if entry.number not in self._due:
                continue
            prediction = entry.prediction
            if not self._open(entry):
                del self._due[entry.number]
            # What is overdue is believed for its time of grace: whoever predicts may say something else by now.
            elif prediction.chance(min(now_s, prediction.expected_s), until_s) < least:
                self._alarm(entry, now_s + max(_SWEEP_S, (prediction.expected_s - now_s) / 8))
            else:
                ranked.append(entry)
        best = heapq.nlargest(_RANKED, ranked, key=lambda entry: (-entry.prediction.priority, entry.rate(now_s)))
        self._ranked = best
        return best[0] if best else None

    def _reopen(self, entry: _Entry) -> None:
        """There is something to fetch for it, now or later."""
        if self._open(entry):
            self._alarm(entry, self._start_s(entry))

    def _alarm(self, entry: _Entry, at_s: float) -> None:
        """Look at it then, and not before."""
        self._due.pop(entry.number, None)
        if entry.alarm_s == at_s:
            return
        entry.alarm_s = at_s
        heapq.heappush(self._alarms, (at_s, entry.number, entry))
        if len(self._alarms) > 2 * len(self._entries) + _STALE:
            self._alarms = [alarm for alarm in self._alarms if alarm[2].alarm_s == alarm[0]]
            heapq.heapify(self._alarms)

    def _wake_up(self, now_s: float) -> list[_Entry]:
        """Those whose time has come are due; returns them."""
        alarms, woken = self._alarms, []
        while alarms and alarms[0][0] <= now_s:
            at_s, number, entry = heapq.heappop(alarms)
            if entry.alarm_s != at_s:
                continue
            entry.alarm_s = None
            start_s = self._start_s(entry)
            if start_s > now_s:
                self._alarm(entry, start_s)
            elif self._open(entry):
                self._due[number] = entry
                woken.append(entry)
        return woken

    def _open(self, entry: _Entry) -> bool:
        prediction = entry.prediction
        return entry.cursor < len(prediction.keys) and prediction.probability >= self.settings.least_probability

    def _start_s(self, entry: _Entry) -> float:
        prediction = entry.prediction
        speed = self.settings.transfer_bytes_per_s
        if self.settings.bytes_per_s:
            speed = min(speed, self.settings.bytes_per_s)
        missing = len(prediction.keys) - entry.cursor
        start_s = prediction.earliest_s - missing * self.chunk_bytes / speed - self.settings.margin_s
        return max(start_s, entry.paused_until_s)

    def _expire(self, now_s: float) -> None:
        """Once a second: end predictions whose time is over, and give up what was fetched and nobody expects any more. Where
        they are very many, only some; the others at the next occasion, which is at another time."""
        if now_s == self._clearing_s:
            return
        self._clearing_s = now_s
        self._clear(_CLEARED)
        if now_s < self._swept_s + _SWEEP_S:
            return
        ends = self._ends
        for _ in range(_ENDED):
            if not ends or now_s <= ends[0][0]:
                break
            _, _, entry = heapq.heappop(ends)
            if entry.active:
                self._withdraw((entry.prediction.predictor, entry.prediction.subject))
        else:
            return
        self._swept_s = now_s
        for key in [key for key in self._ready if not self._owned(key)]:
            self._account(self._ready.pop(key)).wasted_bytes += self.chunk_bytes

    def _owned(self, key: ChunkKey) -> bool:
        owner = self._owners.get(key)
        return owner is not None and owner[0].active

    def _clear(self, most: int) -> None:
        """Forget the keys of those who are not active any more: so many in one go."""
        owners, dropped = self._owners, self._dropped
        while most > 0 and dropped:
            entry, keys, first = dropped.popleft()
            some = keys[first : first + most]
            for key in some:
                owner = owners.get(key)
                if owner is not None and owner[0] is entry:
                    del owners[key]
            most -= max(1, len(some))
            if first + len(some) < len(keys):
                dropped.appendleft((entry, keys, first + len(some)))

    def _drop(self, name: tuple[str, str], entry: _Entry) -> None:
        entry.active = False
        entry.alarm_s = None
        self._due.pop(entry.number, None)
        del self._entries[name]
        self._keys_held -= len(entry.prediction.keys)
        if len(self._ends) > 2 * len(self._entries) + _STALE:
            self._ends = [end for end in self._ends if end[2].active]
            heapq.heapify(self._ends)
        self._dropped.append((entry, entry.prediction.keys, 0))
        # Heaps and rankings may know the entry for a while; they need not keep its keys.
        entry.prediction = replace(entry.prediction, keys=())
        if self._current is entry:
            self._current = None

    def _has_room(self) -> bool:
        return self.waiting_bytes + self.kept_bytes + self.chunk_bytes <= self.settings.share_bytes

    def _has_tokens(self, now_s: float) -> bool:
        rate = self.settings.bytes_per_s
        if not rate:
            return True
        if self._tokens_at_s is not None and now_s > self._tokens_at_s:
            most = max(self.chunk_bytes, rate * self.settings.burst_s)
            self._tokens_bytes = min(most, self._tokens_bytes + (now_s - self._tokens_at_s) * rate)
        self._tokens_at_s = now_s if self._tokens_at_s is None else max(now_s, self._tokens_at_s)
        return self._tokens_bytes >= self.chunk_bytes

    def _account(self, predictor: str) -> Account:
        account = self.accounts.get(predictor)
        if account is None:
            account = self.accounts[predictor] = Account()
        return account
