"""The control socket of one cache: a Unix socket that only its user may open."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.control.handler import Handler
from tiercache.control.messages import ControlError, decode, frame, receive
from tiercache.control.naming import Naming
from tiercache.errors import ConfigError, TierCacheError

if TYPE_CHECKING:
    from tiercache.cache import TierCache

logger = logging.getLogger("tiercache.control")

_MOST_CONNECTIONS = 64
_BUSY_S = 1.0
"""For a question that will be refused."""
_IDLE_S = 60.0
"""A connection that asks nothing for so long, or takes so long to ask, is closed."""
_TAKEN_S = 10.0
"""For an answer to be taken."""
ANSWER_S = 20.0
"""For an answer, beyond what the message itself waits for."""


class ControlServer:
    """Lives on the cache's loop. Connections ask one thing after another; each wait has a deadline."""

    def __init__(self, path: Path, cache: TierCache, naming: Naming) -> None:
        self.path = path
        self._handler = Handler(cache, naming)
        self._lock: int | None = None
        self._server: asyncio.Server
        self._lines: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def start(self) -> None:
        """Take the path. Raises ConfigError when another process has it, or when no socket can be made there.

        Who holds the lock file beside it owns the path, so that what a dead process left is known to be nobody's.
        """
        try:
            self._lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.path.exists() and not self.path.is_socket():
                raise FileExistsError(errno.EEXIST, "there is something there that is no socket")
            self.path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._serve, sock=_bound(self.path))
        except BlockingIOError:
            self._give_back_lock()
            raise ConfigError(f"control_socket: {self.path} is in use by another cache; give each engine its own") from None
        except OSError as error:
            self._give_back_lock()
            raise ConfigError(f"control_socket: no socket can be made at {self.path}: {error}") from None
        logger.info("control socket: %s", self.path)

    async def close(self) -> None:
        """Idempotent. Whoever still waits for an answer is hung up on."""
        if self._lock is None:
            return
        self._server.close()
        for line, writer in self._lines.items():
            line.cancel()
            writer.close()
        if self._lines:
            await asyncio.wait(list(self._lines), timeout=2.0)
        self.path.unlink(missing_ok=True)
        self._give_back_lock()

    def _give_back_lock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = asyncio.current_task()
        assert line is not None
        busy = len(self._lines) >= _MOST_CONNECTIONS
        if len(self._lines) >= 2 * _MOST_CONNECTIONS:
            writer.close()
            return
        self._lines[line] = writer
        try:
            if busy:
                # After the question: whoever is hung up on while he writes does not get to read why.
                async with asyncio.timeout(_BUSY_S):
                    await receive(reader)
                raise ControlError("busy", f"{_MOST_CONNECTIONS} connections are open already")
            while True:
                async with asyncio.timeout(_IDLE_S):
                    packed = await receive(reader)
                await self._reply(writer, await self._answer(packed))
        except ControlError as error:
            # Busy, or too large: what follows on this connection is not a message.
            with contextlib.suppress(TimeoutError, OSError):
                await self._reply(writer, _refusal(error))
        except (asyncio.IncompleteReadError, OSError, TimeoutError):
            pass  # hung up, or fell silent
        except asyncio.CancelledError:
            pass  # the cache closes
        finally:
            writer.close()
            del self._lines[line]

    async def _answer(self, packed: bytes) -> dict[str, Any]:
        try:
            command = decode(packed)
            async with asyncio.timeout(command.wait_s + ANSWER_S):
                return {"ok": await self._handler.answer(command)}
        except ControlError as error:
            return _refusal(error)
        except TimeoutError:
            return _refusal(ControlError("late", f"no answer within {ANSWER_S:g} s: a tier below may hang"))
        except TierCacheError as error:
            return _refusal(ControlError("refused", str(error)))
        except Exception as error:
            logger.warning("a control message failed: %r", error)
            return _refusal(ControlError("failed", f"{type(error).__name__}: {error}"))

    async def _reply(self, writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
        writer.write(frame(answer))
        async with asyncio.timeout(_TAKEN_S):
            await writer.drain()


def socket_path(configured: str, *ranks: tuple[int, int]) -> Path:
    """The path of one worker's socket: `configured`, and for each (rank, number of ranks) above one, a dot and the rank."""
    return Path(configured + "".join(f".{rank}" for rank, ranks in ranks if ranks > 1))


def _bound(path: Path) -> socket.socket:
    """A socket whose file has mode 0600 from its first moment on."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(made.fileno(), 0o600)
        made.bind(str(path))
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made


def _refusal(error: ControlError) -> dict[str, Any]:
    return {"error": {"kind": error.kind, "message": str(error)}}
