"""Check the owner of a Unix socket: in a directory that others may write to, any user can create any name."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from pathlib import Path

from tiercache.control.messages import ControlError
from tiercache.errors import TierCacheError

_CREDENTIALS = struct.Struct("3i")
"""pid, uid and gid, as in `struct ucred`."""


def bound(path: Path) -> socket.socket:
    """Return a bound socket whose file has mode 0600 from the start."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(made.fileno(), 0o600)
        made.bind(str(path))
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made


async def connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection. Raises OSError, and ControlError ("refused") unless the listener's user is trusted."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        _check_peer(path, writer.get_extra_info("socket"))
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer


def _check_peer(path: Path, connection: socket.socket) -> None:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(packed)
    if not is_believed(path, user):
        raise ControlError(
            "refused",
            f"{path}: user {user} answers there, and not user {os.geteuid()}, who asks; run both as one user, or put the "
            "socket into a directory that only you may write to",
        )


def is_believed(path: Path, user: int) -> bool:
    """Return True if `user` may own a socket at `path`: root, this user, or the only user who can create it there."""
    ours = (0, os.geteuid())
    if user in ours:
        return True
    directory = path.parent.stat()
    return directory.st_uid in (*ours, user) and not directory.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def check_private(directory: Path) -> None:
    """Raise TierCacheError unless it is a directory that only this user can access, and OSError if it is missing."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise TierCacheError(
            f"{directory}: expected a directory of this user with mode 0700 for lookup sockets; remove what is there"
        )
