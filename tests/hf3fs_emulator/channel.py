"""The other end of the daemon's Unix socket."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def short_name(path: Path) -> Iterator[str]:
    """A name for the socket at `path` that fits into the 108 bytes which a socket's address has."""
    directory = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


class Channel:
    """Asks one thing at a time and waits for the answer. Threads may share it."""

    def __init__(self, path: Path, timeout_s: float | None = None) -> None:
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            with short_name(path) as name:
                self._socket.connect(name)
        except BaseException:
            self._socket.close()
            raise
        self._answers = self._socket.makefile("rb")

    def close(self) -> None:
        self._answers.close()
        self._socket.close()

    def ask(self, what: str, **arguments: Any) -> Any:
        """Raises OSError with the daemon's errno, ConnectionError when it is gone, TimeoutError when it takes too long."""
        request = json.dumps({"what": what, **arguments}).encode() + b"\n"
        with self._lock:
            self._socket.sendall(request)
            line = self._answers.readline()
        if not line:
            raise ConnectionResetError(f"{what}: the emulator's daemon is gone")
        answer = json.loads(line)
        if "errno" in answer:
            raise OSError(answer["errno"], answer["why"])
        return answer["value"]
