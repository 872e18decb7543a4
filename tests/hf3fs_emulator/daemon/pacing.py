"""Makes answers as late as a cluster's would be. The bytes themselves move at once, while the answer waits."""

from __future__ import annotations

import threading
import time

from tests.hf3fs_emulator.daemon.fuse_protocol import Opcode
from tests.hf3fs_emulator.pace import Pace

_LOOKS = {Opcode.LOOKUP, Opcode.GETATTR, Opcode.OPEN, Opcode.READDIR, Opcode.STATFS}
_CHANGES = {
    Opcode.SETATTR, Opcode.MKDIR, Opcode.UNLINK, Opcode.RMDIR, Opcode.RENAME, Opcode.RENAME2, Opcode.LINK,
    Opcode.CREATE, Opcode.FSYNC,
}  # fmt: skip
"""An ioctl is answered by the client's own daemon, and nobody waits for a release."""


class Pacing:
    def __init__(self) -> None:
        self.pace: Pace | None = None
        self._lock = threading.Lock()
        self._busy_until_s = {True: 0.0, False: 0.0}
        """The link in each direction; True reads."""

    def transfer_due_s(self, for_read: bool, length_bytes: int) -> float | None:
        """When a transfer that is claimed now may be reported, by time.monotonic(); None: at once."""
        pace = self.pace
        if pace is None:
            return None
        with self._lock:
            free_s = max(time.monotonic(), self._busy_until_s[for_read]) + length_bytes / pace.bytes_per_s
            self._busy_until_s[for_read] = free_s
        return free_s + pace.latency_s

    def call_s(self, opcode: int) -> float:
        pace = self.pace
        if pace is None:
            return 0.0
        return pace.look_s if opcode in _LOOKS else pace.change_s if opcode in _CHANGES else 0.0
