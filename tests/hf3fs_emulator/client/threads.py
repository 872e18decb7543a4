"""The rule that one thread submits to a ring and one thread waits on it."""

from __future__ import annotations

import threading


class OneThread:
    """Belongs to the first thread that calls `check`, until that thread has ended."""

    def __init__(self, rule: str) -> None:
        self._rule = rule
        self._owner: threading.Thread | None = None

    def check(self) -> None:
        """Raises RuntimeError in any other thread. The real library corrupts the ring instead."""
        current = threading.current_thread()
        owner = self._owner
        if owner is current:
            return
        if owner is not None and owner.is_alive():
            raise RuntimeError(f"{self._rule}; it is {owner.name}, and this is {current.name}")
        self._owner = current
