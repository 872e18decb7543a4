"""Names of the pages that this process stores after SGLang has cleared its storage: a generation of its own.

SGLang's storage is cleared when weights were replaced in memory. What is computed from then on is not what the files say
that are in the layout, so it may not have their names: another engine, or the next start, would take it for theirs.
SGLang does not say which weights they are now, so the names are this process's own until it ends,
however often the storage is attached.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_GENERATION_BYTES = 16

_current = b""


def current() -> bytes:
    """Return this process's generation; empty until `begin` was called."""
    return _current


def begin() -> bytes:
    """Begin a generation: what was stored before is not found any more, nor by others what is stored from now on."""
    global _current
    _current = os.urandom(_GENERATION_BYTES)
    return _current


class UnderWay:
    """Calls that have begun and not ended. Thread-safe."""

    def __init__(self) -> None:
        self._ended = threading.Condition()
        self._calls: set[object] = set()

    @contextmanager
    def call(self) -> Iterator[None]:
        call = object()
        with self._ended:
            self._calls.add(call)
        try:
            yield
        finally:
            with self._ended:
                self._calls.remove(call)
                self._ended.notify_all()

    def wait(self, limit_s: float) -> bool:
        """Wait until all that have begun by now have ended. Return False after `limit_s` seconds."""
        with self._ended:
            begun = set(self._calls)
            return self._ended.wait_for(lambda: begun.isdisjoint(self._calls), limit_s)
