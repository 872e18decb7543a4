"""Generations: separate page names for this process after SGLang has cleared its storage.

SGLang clears its storage after weights were replaced in memory. KV computed from then on does not match the weight
files in the layout, so it must not share names with other engines or with the next start. SGLang does not report the
new weights, so the names are private to this process until it ends, however often the storage is attached.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_GENERATION_BYTES = 16

_current = b""


def current() -> bytes:
    """Return this process's generation; empty until the first call of `begin`."""
    return _current


def begin() -> bytes:
    """Begin a generation: earlier pages are no longer found, and other processes do not find later pages."""
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
        """Wait until all calls that have begun by now have ended. Return False after `limit_s` seconds."""
        with self._ended:
            begun = set(self._calls)
            return self._ended.wait_for(lambda: begun.isdisjoint(self._calls), limit_s)
