"""Calls at a given time, in one thread."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable


class Later:
    """The calls must be short: they wait for one another."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None

    def at(self, due_s: float, call: Callable[[], object]) -> None:
        """`due_s` by time.monotonic()."""
        with self._change:
            item = (due_s, next(self._numbers), call)
            heapq.heappush(self._waiting, item)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            elif self._waiting[0] is item:
                self._change.notify()

    def _run(self) -> None:
        while True:
            for call in self._due():
                call()
                del call  # an idle thread keeps no ring mapped

    def _due(self) -> list[Callable[[], object]]:
        with self._change:
            while not self._waiting or self._waiting[0][0] > time.monotonic():
                self._change.wait(self._waiting[0][0] - time.monotonic() if self._waiting else None)
            calls = []
            now_s = time.monotonic()
            while self._waiting and self._waiting[0][0] <= now_s:
                calls.append(heapq.heappop(self._waiting)[2])
            return calls
