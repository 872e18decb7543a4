"""What a Redis server says when it does not do what it was asked, and what the cache makes of it."""

from __future__ import annotations

import re

from redis.exceptions import AskError, MovedError

from tiercache.errors import TierFull, TierUnavailable

FOREIGN_TYPE = "WRONGTYPE"
"""A list, hash or so lies under the name."""


_IN_A_SCRIPT = re.compile(r"@user_script: ?[0-9]+: -?")
"""So Redis 6.2 begins what a server that is full or a replica says inside of a script."""


class ServerError(Exception):
    """A reply that is an error. `code` is its first word: MOVED, OOM, ..."""

    def __init__(self, text: str) -> None:
        text = _IN_A_SCRIPT.sub("", text, count=1)
        super().__init__(text)
        self.text = text
        self.code = text.partition(" ")[0]


class BrokenConnection(ConnectionError):
    """The peer is gone, or what it says is no answer of a Redis server. The connection cannot be used any more."""


class TooSlow(BrokenConnection, TimeoutError):
    """No answer by the deadline."""


class Refused(Exception):
    """Something that the operator must mend: wrong password, wrong scheme, ... Never holds secrets."""

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(problem)
        self.option = option
        self.problem = problem


def redirection(error: ServerError) -> AskError:
    """Where the name lies (MovedError), or will lie. Raises BrokenConnection."""
    kind = MovedError if error.code == "MOVED" else AskError
    try:
        return kind(error.text.partition(" ")[2])
    except ValueError as problem:
        raise BrokenConnection(f"not a redirection: {error.text[:100]!r}") from problem


class Scattered(Exception):
    """Names of one slot, which is moving, lie on two servers, or on another one: to be asked for one by one."""


def failure(name: str, place: object, error: ServerError) -> TierFull | TierUnavailable:
    """What the scheduler is told about an error that nobody could do anything about."""
    if error.code == "OOM":
        return TierFull(f"{name}: {place} has reached its maxmemory and evicts nothing")
    return TierUnavailable(f"{name}: {place} answers: {error.text[:200]}")
