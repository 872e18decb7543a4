"""Files of writes that did not come to their end. Synchronous; for worker threads."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable

from tiercache.tiers.files.access import ABSENT
from tiercache.tiers.files.changes import PendingFile
from tiercache.tiers.files.ledger import Ledger

_MOST = 1024
_AT_A_TIME = 4
"""What a write tries to remove, of what earlier ones have left."""


class Abandoned:
    """What could not be removed, or may be there, stays counted, and is tried again."""

    def __init__(self, ledger: Callable[[], Ledger]) -> None:
        self._ledger = ledger
        self._left: deque[PendingFile] = deque(maxlen=_MOST)

    def __bool__(self) -> bool:
        return bool(self._left)

    def remove(self, pending: PendingFile) -> None:
        """Remove a file that will not be published, if it is there, and only then give back what it was charged."""
        try:
            with contextlib.suppress(*ABSENT):
                os.unlink(pending.path)
        except OSError:
            try:
                os.lstat(pending.path)
                self._left.append(pending)  # it stays, and stays counted
                return
            except ABSENT:
                pass
            except OSError:
                self._left.append(pending)  # nobody knows: the mount is dead
                return
        self._ledger().correct(-pending.charged_bytes)

    def remove_some(self) -> None:
        """A few of what is left, the first of them first."""
        for _ in range(min(_AT_A_TIME, len(self._left))):
            self._remove_first()

    def remove_all(self) -> None:
        """As far as that can be done now."""
        for _ in range(len(self._left)):
            left = len(self._left)
            self._remove_first()
            if len(self._left) >= left:
                break  # it fails still

    def _remove_first(self) -> None:
        with contextlib.suppress(IndexError):  # another write took it
            self.remove(self._left.popleft())
