"""What must be found in a place, and what must not, as its workers told it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf

_REMEMBERED = 8


class Promises:
    """Of one place.

    A worker speaks before it does something that ends a promise and after it has done what makes one; a kill in between
    leaves the chunk in neither set, where both answers are right.
    """

    def __init__(self) -> None:
        self._promised_s: dict[int, float] = {}
        self._forgotten: set[int] = set()
        self._history: dict[int, deque[tuple[float, str, str]]] = {}
        self._void_until_s = 0.0
        self.made = 0

    def note(self, who: str, what: str, numbers: Iterable[int], at_s: float) -> None:
        """Record an event, to explain later why a chunk should have been there."""
        for number in numbers:
            self._history.setdefault(number, deque(maxlen=_REMEMBERED)).append((at_s, who, what))

    def history(self, number: int) -> str:
        """The promise that holds, and the last events: many puts of the same chunk push older ones out."""
        events = self._history.get(number, ())
        last_s = max((at_s for at_s, _, _ in events), default=0.0)
        told = [f"{at_s - last_s:.3f} s {who} {what}" for at_s, who, what in events]
        if number in self._promised_s:
            told.insert(0, f"promised since {self._promised_s[number] - last_s:.3f} s")
        return ", ".join(told)

    def putting(self, numbers: Iterable[int]) -> None:
        self._forgotten.difference_update(numbers)

    def promised(self, numbers: Iterable[int], since_s: float, at_s: float) -> None:
        if since_s < self._void_until_s:
            return
        for number in numbers:
            self._promised_s.setdefault(number, at_s)
            self.made += 1

    def forgetting(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._promised_s.pop(number, None)

    def forgotten(self, numbers: Iterable[int]) -> None:
        self._forgotten.update(numbers)

    def void(self, until_s: float = inf) -> None:
        """The place has lost, or may have, what it held; what was begun before `until_s` may be lost, too."""
        self._void_until_s = until_s
        self._promised_s.clear()
        self._forgotten.clear()

    @property
    def is_void(self) -> bool:
        """For as long as nobody knows until when."""
        return self._void_until_s == inf

    def was_due(self, number: int, since_s: float) -> bool:
        """Whether who asked for it from `since_s` until now had to find it."""
        return self._promised_s.get(number, since_s) < since_s

    @property
    def due(self) -> list[int]:
        return sorted(self._promised_s)

    @property
    def gone(self) -> list[int]:
        return sorted(self._forgotten)
