"""The control socket of one cache: a Unix socket that only its user may open."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
from pathlib import Path
from typing import Any

from tiercache.control.framing import frame, receive
from tiercache.control.handler import Handler
from tiercache.control.messages import COMMAND, ControlError, decode, error_of
from tiercache.control.naming import Naming
from tiercache.control.served import ServedCache
from tiercache.control.sockets import bound
from tiercache.errors import ConfigError, TierCacheError

logger = logging.getLogger("tiercache.control")

_MOST_CONNECTIONS = 64
"""Limit of connections, each with one message at a time. Decoded numbers take ten times the memory of a message."""
_IDLE_S = 10.0
"""A connection is closed after this many seconds without a message, or while receiving one."""
_TAKEN_S = 10.0
"""Deadline in seconds for the client to read an answer."""
ANSWER_S = 20.0
"""Deadline in seconds for an answer, in addition to the wait that the message asks for."""


class ControlServer:
    """Bound to the cache's loop. Each connection carries one question at a time; each wait has a deadline.

    Messages use the cache's loop in short steps, at most one a round over all connections.
    """

    def __init__(self, path: Path, cache: ServedCache, naming: Naming) -> None:
        self.path = path
        self._handler = Handler(cache, naming)
        self._lock: int | None = None
        self._server: asyncio.Server
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Bind the path. Raises ConfigError if another process holds it, or if no socket can be made there.

        The holder of the lock file beside it owns the path, so a socket without a holder was left by a dead process.
        """
        try:
            self._lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.path.exists() and not self.path.is_socket():
                raise FileExistsError(errno.EEXIST, "there is something there that is no socket")
            self.path.unlink(missing_ok=True)
            # Start in two steps, so that there is a server to close if the second step is cancelled.
            self._server = await asyncio.start_unix_server(self._serve, sock=bound(self.path), start_serving=False)
            await self._server.start_serving()
        except asyncio.CancelledError:
            await self.close()
            raise
        except BlockingIOError:
            self._give_back_lock()
            raise ConfigError(
                f"control_socket: {self.path} is in use by another cache; give each engine its own"
            ) from None
        except OSError as error:
            self._give_back_lock()
            raise ConfigError(f"control_socket: no socket can be made at {self.path}: {error}") from None
        logger.info("control socket: %s", self.path)

    async def close(self) -> None:
        """Close the server. Idempotent. Closes connections that still wait for an answer."""
        if self._lock is None:
            return
        self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections.copy(), timeout=2.0)
        self.path.unlink(missing_ok=True)
        self._give_back_lock()

    def _give_back_lock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        # Without a write buffer, data is sent once `drain` returns, so a connection can be aborted at any time.
        writer.transport.set_write_buffer_limits(0)
        self._connections.add(task)
        try:
            if len(self._connections) > _MOST_CONNECTIONS:
                raise ControlError("busy", f"{_MOST_CONNECTIONS} connections are open already")
            while True:
                async with asyncio.timeout(_IDLE_S):
                    packed = await receive(reader)
                await self._reply(writer, await self._answer(packed))
        except ControlError as error:
            # The server is busy or the message is too large; the rest of this connection is not a message.
            with contextlib.suppress(TimeoutError, OSError):
                await self._reply(writer, error_of(error))
        except (asyncio.IncompleteReadError, OSError, TimeoutError, asyncio.CancelledError):
            pass  # closed by the client, idle for too long, or the cache closes
        finally:
            # `close` would wait for a client that does not read.
            writer.transport.abort()
            self._connections.discard(task)

    async def _answer(self, packed: bytes) -> dict[str, Any]:
        try:
            await self._handler.turn()
            command = decode(COMMAND, packed)
            async with asyncio.timeout(command.wait_s + ANSWER_S):
                return {"ok": await self._handler.answer(command)}
        except ControlError as error:
            return error_of(error)
        except TimeoutError:
            return error_of(ControlError("late", f"no answer within {ANSWER_S:g} s: a tier below may hang"))
        except TierCacheError as error:
            return error_of(ControlError("refused", str(error)))
        except Exception as error:
            logger.warning("a control message failed: %r", error)
            return error_of(ControlError("failed", f"{type(error).__name__}: {error}"))

    async def _reply(self, writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
        writer.write(frame(answer))
        async with asyncio.timeout(_TAKEN_S):
            await writer.drain()


def socket_path(configured: str, *ranks: tuple[int, int]) -> Path:
    """Return the path of a worker's socket: `configured`, with a dot and the rank for each (rank, ranks) above one."""
    return Path(configured + "".join(f".{rank}" for rank, ranks in ranks if ranks > 1))
