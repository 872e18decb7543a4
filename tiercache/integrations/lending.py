"""Lend an engine's memory to threads that copy, for as long as a transfer lasts."""

from __future__ import annotations

import threading

import numpy as np

from tiercache.payloads import Sink, Source


class TakenBack(Exception):
    """Raised if the engine has taken its memory back: it must not be read or written any more."""


class Lending:
    """Lends blocks, pages or rows of an engine to copying threads for one transfer. Each copy runs inside `with lending`.

    After `take_back` no copy begins. A late copy would write into memory that the engine has given to another request, or
    store that request's bytes under this transfer's key.
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

    def __exit__(self, *raised: object) -> None:
        with self._condition:
            self._copying -= 1
            self._condition.notify_all()

    def reading(self, source: Source) -> Source:
        """Return `source`, which reads the lent memory, as a source that raises TakenBack if it is taken back."""

        def fill(slot: np.ndarray) -> None:
            with self:
                source(slot)
                self.check()

        return fill

    def writing(self, sink: Sink) -> Sink:
        """Return `sink`, which writes into the lent memory, as a sink that raises TakenBack if it was taken back."""

        def take(chunk: np.ndarray) -> None:
            with self:
                sink(chunk)

        return take

    def check(self) -> None:
        """Raise TakenBack if the memory was taken back: bytes that were just read may have been overwritten."""
        if self._taken_back:
            raise TakenBack

    def take_back(self, wait_s: float) -> bool:
        """Let no copy begin, and wait for running ones. Return False if one still runs after `wait_s` seconds."""
        with self._condition:
            self._taken_back = True
            return self._condition.wait_for(lambda: not self._copying, max(0.0, wait_s))
