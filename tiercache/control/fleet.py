"""One command to all workers of a cache, and one answer out of theirs."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import msgspec

from tiercache.control.client import ask, find_sockets
from tiercache.control.messages import Command, ControlError, Prefetch

_LEAST = ("found", "promoted", "pinned", "chunks")
"""Of what several ranks say, what all of them can say: a prefix is where each rank has its part of it."""


class Fleet:
    """The workers whose sockets are named by `paths` (each one socket, or several with ranks appended). Keeps no state:
    workers may come and go."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def sockets(self) -> list[Path]:
        return [socket for path in self.paths for socket in find_sockets(path)]

    async def ask(self, command: Command) -> dict[str, Any]:
        """What all say, as one: the least of what they have, and under `failed` who could not do it.

        Raises ControlError when none could: what the first one says.
        """
        if isinstance(command, Prefetch) and not command.handle:
            # Every rank calls it by the same name, so that one can ask all of them for it later.
            command = msgspec.structs.replace(command, handle=secrets.token_hex(12))
        answers = await self.ask_each(command)
        good = [answer for answer in answers.values() if not isinstance(answer, ControlError)]
        if not good:
            raise next(iter(answers.values()))  # type: ignore[misc]
        failed = {str(path): str(answer) for path, answer in answers.items() if isinstance(answer, ControlError)}
        return _combined(good) | ({"failed": failed} if failed else {})

    async def ask_each(self, command: Command) -> dict[Path, dict[str, Any] | ControlError]:
        """By socket. Raises ControlError ("unreachable") when there is none."""
        sockets = self.sockets()
        if not sockets:
            places = ", ".join(map(str, self.paths))
            raise ControlError("unreachable", f"no cache has a socket open at {places}: is control_socket set there?")
        answers = await asyncio.gather(*(_ask(path, command) for path in sockets))
        return dict(zip(sockets, answers, strict=True))


async def _ask(path: Path, command: Command) -> dict[str, Any] | ControlError:
    try:
        return await ask(path, command)
    except ControlError as error:
        return error


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
        elif isinstance(value, dict):
            combined[name] = {key: min(found.get(key, 0) for found in values) for key in value}
    return combined
