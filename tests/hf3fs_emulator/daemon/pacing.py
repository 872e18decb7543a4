"""Makes answers of calls on the mount late."""

from __future__ import annotations

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

    def call_s(self, opcode: int) -> float:
        pace = self.pace
        if pace is None:
            return 0.0
        return pace.look_s if opcode in _LOOKS else pace.change_s if opcode in _CHANGES else 0.0
