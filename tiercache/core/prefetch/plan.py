"""The plan of the prefetcher: which predicted chunks to bring into the hot cache now, and an account of what came of it.

Pure: no I/O, no clock. A driver (the simulator, or the asynchronous prefetcher) tells it what is predicted, what was asked
for, what arrived and what was evicted, and asks it what to fetch next. A wrong prediction costs the bandwidth that the
settings allow and nothing else: it displaces nothing that is expected sooner, and demand reads go first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp

from tiercache.core.alarms import Alarms
from tiercache.core.bucket import TokenBucket
from tiercache.core.keys import ChunkKey
from tiercache.core.prediction.base import Prediction
from tiercache.core.prefetch.expected import Entry, Expected
from tiercache.core.prefetch.transfers import Transfers

_RUN = 32
"""Chunks that are fetched for one prediction before others are looked at again."""
_RANKED = 64
"""Predictions that are compared for each run; which ones they are is found out once a second."""
_RENEWED = 4096
"""Chunks expected sooner that are passed over in one search for a victim: some milliseconds."""
_SWEEP_S = 1.0
_TURNOVER_S = 60.0
"""Over which evictions are averaged (exponentially)."""
_CLEARED = 4096
"""Keys of predictions that count no more, which are cleared away in one go."""
_ENDED = 512
"""Predictions whose time is over, which are ended in one go."""


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


@dataclass(frozen=True, slots=True)
class Fetch:
    """A chunk to bring into the hot cache now, and the chunk before it in its prefix."""

    key: ChunkKey
    parent: ChunkKey | None
    rate: float
    """Expected uses per second: what it is weighed against its victim by."""
    priority: int


class PrefetchPlan:
    """All methods are synchronous and take the time (seconds of one monotonic clock) where they need it.

    The driver's loop: `next` until it returns None, begin each fetch, then sleep until `wake_s` or until something changes.
    It tells `transfers` what was `fetched` or `failed`, and what every request `asked` for; and the plan what was `evicted`
    from the hot cache.
    """

    def __init__(self, settings: PrefetchSettings, chunk_bytes: int) -> None:
        self.settings = settings
        self.chunk_bytes = chunk_bytes
        self.kept_bytes = 0
        """Of the share: what the driver keeps besides what was fetched (hot chunks that are expected, and pins)."""
        self.transfers = Transfers(chunk_bytes)
        self.accounts = self.transfers.accounts
        self._expected = Expected()
        self._alarms: Alarms[Entry] = Alarms()
        """When entries are looked at that are not due."""
        self._due: dict[int, Entry] = {}
        """Whose time has come, by number."""
        self._ends: Alarms[Entry] = Alarms()
        self._ranked: list[Entry] = []
        self._ranked_s = float("-inf")
        self._swept_s = float("-inf")
        self._clearing_s = float("-inf")
        self._current: Entry | None = None
        self._current_left = 0
        burst_bytes = settings.bytes_per_s * settings.burst_s
        self._bucket = TokenBucket(settings.bytes_per_s, max(chunk_bytes, burst_bytes), burst_bytes)
        self._turnover_bytes = 0.0
        self._turnover_at_s = 0.0

    # What is predicted

    def offer(self, prediction: Prediction, now_s: float) -> None:
        """Act on a prediction; it replaces an older one of the same predictor and subject."""
        old = self._expected.entries.get((prediction.predictor, prediction.subject))
        if old is not None:
            self._drop(old)
        if now_s > prediction.latest_s + prediction.grace_s or not prediction.keys:
            return
        entry = self._expected.add(prediction, now_s)
        self._ends.set(entry, entry.expires_s)
        self._reopen(entry)
        self._current = None
        while self._expected.too_many:
            self._withdraw(next(iter(self._expected.entries.values())))
        # Twice what comes, so that what is left behind does not grow.
        self._expected.clear(2 * len(prediction.keys))

    def withdraw(self, predictor: str, subject: str) -> None:
        """It will not come true (or has). Chunks that were fetched for it stay, and are used or evicted."""
        entry = self._expected.entries.get((predictor, subject))
        if entry is not None:
            self._withdraw(entry)
        self._expected.clear(_CLEARED)

    def _withdraw(self, entry: Entry) -> None:
        self.transfers.cancelled(entry.missing, entry.prediction.predictor)
        self._drop(entry)

    def acts_on(self, predictor: str, subject: str) -> bool:
        """Whether its latest prediction still counts: it was neither withdrawn nor has its time run out."""
        return (predictor, subject) in self._expected.entries

    # What to do

    def next(self, now_s: float, resident: Callable[[ChunkKey], bool]) -> Fetch | None:
        """The chunk to fetch now; it counts as begun. None when there is none, or no budget: see `wake_s`.

        `resident` says that a chunk needs no fetch: it is hot, or no tier has it.
        """
        if not self._has_room() or not self._has_tokens(now_s):
            self._expire(now_s)
            return None
        in_flight = self.transfers.in_flight
        while (entry := self._choose(now_s)) is not None:
            keys = entry.prediction.keys
            position = entry.cursor
            while position < len(keys) and (keys[position] in in_flight or resident(keys[position])):
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
            self.transfers.began(key, prediction.predictor)
            self._bucket.take(self.chunk_bytes)
            parent = keys[position - 1] if position else None
            return Fetch(key, parent, entry.rate(now_s), prediction.priority)
        return None

    def wake_s(self, now_s: float) -> float | None:
        """When to ask `next` again, if nothing is reported before; None: only then."""
        if not self._has_tokens(now_s):
            return now_s + max(1e-6, self._bucket.wait_s(self.chunk_bytes))
        if self._due:
            return now_s + _SWEEP_S
        at_s = self._alarms.next_s
        return max(now_s + _SWEEP_S, at_s) if at_s is not None else None

    def yields_to(self, victim: ChunkKey, fetch: Fetch, now_s: float) -> bool:
        """Whether `victim` may be evicted for `fetch`: it is not expected, or much later."""
        owner = self._expected.owner(victim)
        if owner is None:
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
            owner = self._expected.owner(victim)
            assert owner is not None  # to whom the victim does not yield
            renew(self._expected.keys_of(owner[0]))
            left -= len(owner[0].prediction.keys)
        return left > 0

    # What happened

    def no_room(self, fetch: Fetch, now_s: float) -> None:
        """As `failed`: everything in the hot cache is expected sooner, or is leased. It is tried again a little later."""
        self.transfers.failed(fetch.key)
        owner = self._expected.owner(fetch.key)
        if owner is not None:
            entry, position = owner
            entry.cursor = min(entry.cursor, position)
            entry.paused_until_s = now_s + _SWEEP_S
            self._reopen(entry)
        self._current = None

    def met(self, key: ChunkKey) -> None:
        """The request that was expected first for it has come: if evicted now, it is not fetched again for that one."""
        self._expected.forget_owner(key)

    def evicted(self, keys: Sequence[ChunkKey], now_s: float) -> None:
        """They left the hot cache."""
        if now_s > self._turnover_at_s:
            self._turnover_bytes, self._turnover_at_s = self._turnover(now_s), now_s
        self._turnover_bytes += len(keys) * self.chunk_bytes
        transfers = self.transfers
        if not transfers.ready and not self._expected.owners:
            return  # nobody is expected
        for key in keys:
            if key in transfers.ready:
                transfers.evicted(key)
            owner = self._expected.owner(key)
            if owner is None:
                self._expected.forget_owner(key)
            else:
                entry, position = owner
                entry.cursor = min(entry.cursor, position)
                self._reopen(entry)

    def lifetime_s(self, now_s: float) -> float:
        """How long a chunk that is not used should stay in the hot cache, if that goes on turning over as it did lately."""
        turnover = self._turnover(now_s) / _TURNOVER_S
        return self.settings.hot_bytes / turnover if turnover > 0 else float("inf")

    def _turnover(self, now_s: float) -> float:
        return self._turnover_bytes * exp(-max(0.0, now_s - self._turnover_at_s) / _TURNOVER_S)

    def expects(self, key: ChunkKey) -> bool:
        """Whether somebody may still come for it."""
        return key in self.transfers.ready or self._expected.owner(key) is not None

    def _choose(self, now_s: float) -> Entry | None:
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

    def _best(self, candidates: list[Entry], now_s: float) -> Entry | None:
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
            # What is overdue is believed for its time of grace: its predictor may say something else by now.
            elif prediction.chance(min(now_s, prediction.expected_s), until_s) < least:
                self._alarm(entry, now_s + max(_SWEEP_S, (prediction.expected_s - now_s) / 8))
            else:
                ranked.append(entry)
        best = heapq.nlargest(_RANKED, ranked, key=lambda entry: (-entry.prediction.priority, entry.rate(now_s)))
        self._ranked = best
        return best[0] if best else None

    def _reopen(self, entry: Entry) -> None:
        """There is something to fetch for it, now or later."""
        if self._open(entry):
            self._alarm(entry, self._start_s(entry))

    def _alarm(self, entry: Entry, at_s: float) -> None:
        """Look at it then, and not before."""
        self._due.pop(entry.number, None)
        self._alarms.set(entry, at_s)

    def _wake_up(self, now_s: float) -> list[Entry]:
        """Those whose time has come are due; returns them."""
        woken = []
        while (at_s := self._alarms.next_s) is not None and at_s <= now_s:
            entry = self._alarms.pop()
            start_s = self._start_s(entry)
            if start_s > now_s:
                self._alarm(entry, start_s)
            elif self._open(entry):
                self._due[entry.number] = entry
                woken.append(entry)
        return woken

    def _open(self, entry: Entry) -> bool:
        return entry.missing > 0 and entry.prediction.probability >= self.settings.least_probability

    def _start_s(self, entry: Entry) -> float:
        prediction = entry.prediction
        speed = self.settings.transfer_bytes_per_s
        if self.settings.bytes_per_s:
            speed = min(speed, self.settings.bytes_per_s)
        start_s = prediction.earliest_s - entry.missing * self.chunk_bytes / speed - self.settings.margin_s
        return max(start_s, entry.paused_until_s)

    def _expire(self, now_s: float) -> None:
        """Once a second: end predictions whose time is over, and give up what was fetched and nobody expects any more. Where
        they are very many, only some; the others at the next occasion, which is at another time."""
        if now_s == self._clearing_s:
            return
        self._clearing_s = now_s
        self._expected.clear(_CLEARED)
        if now_s < self._swept_s + _SWEEP_S:
            return
        for _ in range(_ENDED):
            end_s = self._ends.next_s
            if end_s is None or now_s <= end_s:
                break
            self._withdraw(self._ends.pop())
        else:
            return
        self._swept_s = now_s
        for key in [key for key in self.transfers.ready if self._expected.owner(key) is None]:
            self.transfers.removed(key)

    def _drop(self, entry: Entry) -> None:
        self._due.pop(entry.number, None)
        self._alarms.cancel(entry)
        self._ends.cancel(entry)
        self._expected.drop(entry)
        if self._current is entry:
            self._current = None

    def _has_room(self) -> bool:
        return self.transfers.waiting_bytes + self.kept_bytes + self.chunk_bytes <= self.settings.share_bytes

    def _has_tokens(self, now_s: float) -> bool:
        return not self.settings.bytes_per_s or self._bucket.has(self.chunk_bytes, now_s)
