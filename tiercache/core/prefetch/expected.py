"""The predictions that are acted on, and which of them expects a chunk first."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from tiercache.core.keys import ChunkKey
from tiercache.core.prediction.base import Prediction

_MOST_KEYS = 1 << 18
"""Of all predictions together: some 70 MB. Of more, the ones that were made first are not acted on any more."""
_NEAR_S = 0.05
"""Rates are not told apart below so short a time."""


class Entry:
    """A prediction that is acted on. `cursor`: every key before it is resident, on its way, or cannot be had."""

    __slots__ = ("active", "cursor", "number", "paused_until_s", "prediction")

    def __init__(self, prediction: Prediction, number: int) -> None:
        self.prediction = prediction
        self.number = number
        self.cursor = 0
        self.active = True
        self.paused_until_s = float("-inf")

    def __lt__(self, other: Entry) -> bool:
        return self.number < other.number

    @property
    def name(self) -> tuple[str, str]:
        return self.prediction.predictor, self.prediction.subject

    @property
    def missing(self) -> int:
        """Chunks behind the cursor."""
        return len(self.prediction.keys) - self.cursor

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


class Expected:
    """Bounded in keys. What a prediction owned that is not acted on any more is cleared away later, in parts (`clear`)."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, str], Entry] = {}
        """By predictor and subject, the first one first."""
        self._keys_held = 0
        self._numbers = count()
        self.owners: dict[ChunkKey, tuple[Entry, int]] = {}
        """By key: the entry that is expected first, and the key's place there. One that is not `active` does not count."""
        self._dropped: deque[tuple[Entry, Sequence[ChunkKey], int]] = deque()
        """Entries that may own keys still though not active, those keys, and from where on they are not cleared away yet."""

    def add(self, prediction: Prediction, now_s: float) -> Entry:
        entry = self.entries[prediction.predictor, prediction.subject] = Entry(prediction, next(self._numbers))
        self._keys_held += len(prediction.keys)
        owners = self.owners
        rate = entry.rate(now_s)
        for position, key in enumerate(prediction.keys):
            owner = owners.get(key)
            if owner is None or not owner[0].active or owner[0].rate(now_s) <= rate:
                owners[key] = entry, position
        return entry

    @property
    def too_many(self) -> bool:
        return self._keys_held > _MOST_KEYS and len(self.entries) > 1

    def drop(self, entry: Entry) -> None:
        entry.active = False
        del self.entries[entry.name]
        self._keys_held -= len(entry.prediction.keys)
        self._dropped.append((entry, entry.prediction.keys, 0))
        # Alarms and rankings may know the entry for a while; they need not keep its keys.
        entry.prediction = replace(entry.prediction, keys=())

    def owner(self, key: ChunkKey) -> tuple[Entry, int] | None:
        """The entry that is expected first for it, and its place there."""
        owner = self.owners.get(key)
        return owner if owner is not None and owner[0].active else None

    def keys_of(self, entry: Entry) -> list[ChunkKey]:
        """Those for which it is expected first."""
        owners, nobody = self.owners, (None, 0)
        return [key for key in entry.prediction.keys if owners.get(key, nobody)[0] is entry]

    def forget_owner(self, key: ChunkKey) -> None:
        self.owners.pop(key, None)

    def clear(self, most: int) -> None:
        """Forget the keys of entries that are not active any more: so many in one go."""
        owners, dropped = self.owners, self._dropped
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
