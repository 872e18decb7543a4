"""Client of control sockets: of a single cache, or of all workers with their answers merged."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from tiercache.control.framing import frame, receive
from tiercache.control.messages import LARGEST_MESSAGE_BYTES, Command, ControlError, Prefetch, Statistics
from tiercache.control.server import ANSWER_S
from tiercache.control.sockets import connect, is_believed

_MARGIN_S = 5.0
_FIGURES_S = 3.0
"""Deadline in seconds for statistics, shorter than a scrape of Prometheus: a cache that hangs must not hide the others."""
_LEAST = ("found", "promoted", "pinned", "chunks")
"""Figures merged by the minimum over ranks: a prefix is usable only as far as every rank has its part."""


async def ask(path: Path, command: Command) -> dict[str, Any]:
    """Return the answer of the cache behind `path`.

    Waits as long as the cache may take. Cancellation closes the connection; the operation that the command
    began continues. Raises ControlError: the refusal of the cache, "unreachable", "late" or "too_large".
    """
    message = frame(command)
    if len(message) > LARGEST_MESSAGE_BYTES:
        raise ControlError(
            "too_large", f"expected a message of at most {LARGEST_MESSAGE_BYTES} bytes, found {len(message)}"
        )
    limit_s = _FIGURES_S if isinstance(command, Statistics) else command.wait_s + ANSWER_S + _MARGIN_S
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await connect(path)
            try:
                writer.write(message)
                await writer.drain()
                packed = await receive(reader)
            finally:
                writer.transport.abort()  # `close` would wait until the cache reads
    except TimeoutError:
        raise ControlError("late", "the cache does not answer in time, and may still do what was asked") from None
    except (OSError, asyncio.IncompleteReadError) as error:
        raise ControlError("unreachable", f"no cache answers there: {error}") from None
    answer = msgspec.msgpack.decode(packed)
    if (refusal := answer.get("error")) is not None:
        raise ControlError(refusal["kind"], refusal["message"])
    found: dict[str, Any] = answer["ok"]
    return found


def find_sockets(configured: Path) -> list[Path]:
    """Return the sockets of the workers of a cache with `control_socket: configured`: that path, or a path for each
    rank.

    Leaves out sockets and links of users whom `is_believed` does not trust, since a shared directory may have them.
    """
    ranked = re.compile(re.escape(configured.name) + r"(\.\d+){0,2}")
    found = []
    with contextlib.suppress(OSError):  # there is no such directory
        for path in configured.parent.iterdir():
            with contextlib.suppress(OSError):  # it has gone meanwhile
                if ranked.fullmatch(path.name) and path.is_socket() and is_believed(path, path.lstat().st_uid):
                    found.append(path)
    return sorted(found)


class Fleet:
    """The workers whose sockets are named by `paths` (each a socket, or several with ranks appended).

    Keeps no state, so workers may start and stop.
    """

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def sockets(self) -> list[Path]:
        return list(dict.fromkeys(socket for path in self.paths for socket in find_sockets(path)))

    def missing(self) -> list[str]:
        """Return a sentence for each of `paths` at which there is no socket."""
        said = "no cache has a socket open there: is control_socket set in its configuration?"
        return [f"{path}: {said}" for path in self.paths if not find_sockets(path)]

    async def ask(self, command: Command) -> dict[str, Any]:
        """Return the merged answer, and under `failed` the errors of workers by socket.

        Counts of a prefix merge to the minimum over the workers, other counts to the maximum, and lists are joined. Raises
        the first ControlError, with its socket, if every worker failed.
        """
        if isinstance(command, Prefetch) and not command.handle:
            # All ranks use the same handle, so that the caller can query it later.
            command = msgspec.structs.replace(command, handle=secrets.token_hex(12))
        answers = await self.ask_each(command)
        good = [answer for answer in answers.values() if not isinstance(answer, ControlError)]
        failed = {path: answer for path, answer in answers.items() if isinstance(answer, ControlError)}
        if not good:
            path, error = next(iter(failed.items()))
            raise ControlError(error.kind, f"{path}: {error}")
        named = {"failed": {str(path): str(error) for path, error in failed.items()}} if failed else {}
        return _combined(good) | named

    async def ask_each(self, command: Command) -> dict[Path, dict[str, Any] | ControlError]:
        """Return the answers by socket. Raises ControlError ("unreachable") if there is no socket."""
        sockets = self.sockets()
        if not sockets:
            places = ", ".join(map(str, self.paths))
            raise ControlError("unreachable", f"no cache has a socket open at {places}: is control_socket set there?")

        async def answer(path: Path) -> dict[str, Any] | ControlError:
            try:
                return await ask(path, command)
            except ControlError as error:
                return error

        return dict(zip(sockets, await asyncio.gather(*map(answer, sockets)), strict=True))

    async def ask_named(self, command: Command) -> dict[str, dict[str, Any] | ControlError]:
        """Return the answers of `ask_each` by the socket's file name, or by its path if `paths` have equal file names."""
        paths = set(self.paths)
        unique = len({path.name for path in paths}) == len(paths)
        answers = await self.ask_each(command)
        return {socket.name if unique else str(socket): answer for socket, answer in answers.items()}


def _combined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    if len(answers) == 1:
        return answers[0]
    combined = dict(answers[0])
    for name, value in combined.items():
        values = [answer[name] for answer in answers]
        if isinstance(value, bool):
            combined[name] = all(values)
        elif isinstance(value, int):
            combined[name] = min(values) if name in _LEAST else max(values)
        elif isinstance(value, list):
            combined[name] = list(dict.fromkeys(chain.from_iterable(values)))
        elif isinstance(value, dict):
            combined[name] = {key: min(found.get(key, 0) for found in values) for key in value}
    return combined
