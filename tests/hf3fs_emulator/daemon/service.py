"""The daemon's Unix socket, by which tests cause faults and ask for numbers.

Lines of JSON. A request is `{"what": ..., other arguments}`, an answer `{"value": ...}` or `{"errno": ..., "why": ...}`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hf3fs_emulator.channel import short_name

Handler = Callable[..., Any]
"""Called with the arguments of the request."""

_LINE_BYTES = 1 << 16


class Service:
    def __init__(self, path: Path, handlers: dict[str, Handler]) -> None:
        self._handlers = handlers
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_name(path) as name:
            self._listener.bind(name)
        self._listener.listen(64)

    def start(self) -> None:
        threading.Thread(target=self._accept, name="service", daemon=True).start()

    def stop(self) -> None:
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="connection", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while line := connection.recv(_LINE_BYTES):
                connection.sendall(json.dumps(self._answer(line)).encode() + b"\n")

    def _answer(self, line: bytes) -> dict[str, Any]:
        request = json.loads(line)
        try:
            handler = self._handlers[request.pop("what")]
            return {"value": handler(**request)}
        except OSError as error:
            return {"errno": error.errno, "why": str(error)}
        except (KeyError, TypeError, ValueError) as error:
            return {"errno": errno.EINVAL, "why": f"{line!r}: {error!r}"}
