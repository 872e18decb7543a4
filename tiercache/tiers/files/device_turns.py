"""Turns at a device: so many writes of a directory are there at a time. Synchronous; for worker threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE_S = 0.05
"""How long a write waits for its turn: where each takes long, or hangs, the others are not kept."""
LARGE_BYTES = 1 << 20
"""A write of less needs no turn: it takes many of them to keep a device busy."""


class DeviceTurns:
    """Writes that are at a device together end together, since it serves all alike: then all of them wait for the file
    system's commit and for the counter, and the device for them. Where fewer are there, others take their places."""

    def __init__(self, places: int | None) -> None:
        """None: nobody waits."""
        self._places = threading.Semaphore(places) if places is not None else None

    @contextmanager
    def taken(self, length_bytes: int) -> Iterator[None]:
        """Hold one while so much is written. It goes on without where none was free for a moment."""
        places = self._places if length_bytes >= LARGE_BYTES else None
        is_ours = places is not None and places.acquire(timeout=_PATIENCE_S)
        try:
            yield
        finally:
            if places is not None and is_ours:
                places.release()


EVERYBODYS = DeviceTurns(None)
