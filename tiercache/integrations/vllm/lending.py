"""The engine's blocks, lent to copying threads for one transfer, and taken back."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import numpy as np

from tiercache.payloads import Source


class TakenBack(Exception):
    """The engine took its blocks back: they must not be touched any more."""


class Lending:
    """A copy runs inside `with lending`; after `take_back` none begins, and it waits for those under way.

    Without it a copy that comes too late would write into a block that the engine has given to another request, or store
    that request's bytes under this one's key.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._copying = 0
        self._taken_back = False

    def __enter__(self) -> None:
        with self._condition:
            if self._taken_back:
                raise TakenBack
            self._copying += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._condition:
            self._copying -= 1
            self._condition.notify_all()

    def reading(self, source: Source) -> Source:
        """`source`, which reads what is lent."""

        def fill(slot: np.ndarray) -> None:
            with self:
                source(slot)
                self.check()

        return fill

    def check(self) -> None:
        """Raise TakenBack when what was just read may have been overwritten meanwhile."""
        if self._taken_back:
            raise TakenBack

    def take_back(self, wait_s: float) -> bool:
        """False when a copy is still running after `wait_s` seconds."""
        until_s = time.monotonic() + wait_s
        with self._condition:
            self._taken_back = True
            return self._condition.wait_for(lambda: not self._copying, max(0.0, until_s - time.monotonic()))
