"""The other end of a control socket: for programs on the same machine, and for the HTTP server."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec

from tiercache.control.framing import frame, receive
from tiercache.control.messages import LARGEST_MESSAGE_BYTES, Command, ControlError
from tiercache.control.server import ANSWER_S
from tiercache.control.sockets import connect, is_believed

_MARGIN_S = 5.0


async def ask(path: Path, command: Command, *, timeout_s: float | None = None) -> dict[str, Any]:
    """The answer of the cache behind `path`. Raises ControlError: what the cache says, "unreachable", "late" or "too_large".

    By default it waits as long as the cache may take. Cancelled, it hangs up; what the command began goes on.
    """
    message = frame(command)
    if len(message) > LARGEST_MESSAGE_BYTES:
        raise ControlError("too_large", f"expected a message of at most {LARGEST_MESSAGE_BYTES} bytes, found {len(message)}")
    try:
        async with asyncio.timeout(command.wait_s + ANSWER_S + _MARGIN_S if timeout_s is None else timeout_s):
            packed = await _exchange(path, message)
    except TimeoutError:
        raise ControlError("late", f"{path}: the cache does not answer in time") from None
    except (OSError, asyncio.IncompleteReadError) as error:
        raise ControlError("unreachable", f"{path}: no cache answers there: {error}") from None
    answer = msgspec.msgpack.decode(packed)
    if (refusal := answer.get("error")) is not None:
        raise ControlError(refusal["kind"], refusal["message"])
    found: dict[str, Any] = answer["ok"]
    return found


def find_sockets(configured: Path) -> list[Path]:
    """The sockets that the workers of a cache with `control_socket: configured` have open: that path, or one a rank. What
    users have put there who are not to be believed is left out."""
    ranked = re.compile(re.escape(configured.name) + r"(\.\d+){0,2}")
    try:
        return sorted(path for path in configured.parent.iterdir() if ranked.fullmatch(path.name) and _is_ours(path))
    except OSError:
        return []


def _is_ours(path: Path) -> bool:
    """A socket that may be believed: in a shared directory others may have put theirs there, or a link to some socket."""
    try:
        return path.is_socket() and is_believed(path, path.lstat().st_uid)
    except OSError:
        return False


async def _exchange(path: Path, message: bytes) -> bytearray:
    reader, writer = await connect(path)
    try:
        writer.write(message)
        await writer.drain()
        return await receive(reader)
    finally:
        # Not `close`, which waits for as long as the cache does not read.
        writer.transport.abort()
