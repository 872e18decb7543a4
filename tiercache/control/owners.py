"""Whose a control socket is: in a directory that others may write to, anybody can put one under any name."""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

from tiercache.control.messages import ControlError

_CREDENTIALS = struct.Struct("3i")
"""Process, user, group."""


def check_peer(path: Path, connection: socket.socket) -> None:
    """Raises ControlError ("refused") unless whoever listens at `path` may be told what prompts are coming."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(packed)
    if not is_believed(path, user):
        raise ControlError(
            "refused",
            f"{path}: user {user} answers there, and not user {os.geteuid()}, who asks; run both as one user, or put the "
            "socket into a directory that nobody else may write to",
        )


def is_believed(path: Path, user: int) -> bool:
    """Whether `user` may have a socket at `path`: root and we may, others where only they, root and we can put one."""
    ours = (0, os.geteuid())
    if user in ours:
        return True
    directory = path.parent.stat()
    return directory.st_uid in (*ours, user) and not directory.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
