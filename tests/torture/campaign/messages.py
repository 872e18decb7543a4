"""What the referee and a worker say to one another: JSON lines, one message each, over a Unix socket."""

from __future__ import annotations

import socket
import time
from typing import Any

import msgspec


class Order(msgspec.Struct, frozen=True):
    """What a worker is: its place in the campaign, and how its cache is configured."""

    name: str
    """For people: disk-1.42 is the 42nd process in slot 1 of the place disk."""
    place: str
    slot: int
    seed: str
    overrides: dict[str, Any]
    """Of `Config.load`."""
    log: str
    """A file for what it logs."""


class Work(msgspec.Struct, frozen=True, tag=True):
    """Do operations by seed until told otherwise."""


class Rest(msgspec.Struct, frozen=True, tag=True):
    """Stop working, write everything, say `Rested`."""


class Prove(msgspec.Struct, frozen=True, tag=True):
    """Forget a chunk of your own, put it and flush it; say `Proved`."""

    number: int


class Find(msgspec.Struct, frozen=True, tag=True):
    """Get these chunks; say `Found`."""

    numbers: list[int]


class End(msgspec.Struct, frozen=True, tag=True):
    """Close and exit."""


Command = Work | Rest | Prove | Find | End


class Opened(msgspec.Struct, frozen=True, tag=True):
    after_s: float


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The cache could not be opened; the process ends."""

    why: str


class Putting(msgspec.Struct, frozen=True, tag=True):
    """Before anything is done: from now on these may be there again."""

    numbers: list[int]


class Promised(msgspec.Struct, frozen=True, tag=True):
    """Chunks that were put from `since_s` on and flushed, with nothing given up meanwhile: every process must find them."""

    numbers: list[int]
    since_s: float
    at_s: float


class Forgetting(msgspec.Struct, frozen=True, tag=True):
    """Before anything is done: from now on these may be missing."""

    numbers: list[int]


class Forgotten(msgspec.Struct, frozen=True, tag=True):
    """Nobody who begins from now on may find these."""

    numbers: list[int]


class Missed(msgspec.Struct, frozen=True, tag=True):
    """A chunk that a worker asked for in time, from `since_s` on, and that was not there. `by`: get or lookup."""

    number: int
    since_s: float
    by: str
    found: str
    """What the cache looked like then, for people."""


class Wrong(msgspec.Struct, frozen=True, tag=True):
    """A chunk had other bytes than its key's."""

    number: int
    what: str


class Broken(msgspec.Struct, frozen=True, tag=True):
    """Something else that must not be: an exception, an operation that outlived its deadline."""

    what: str


class Counted(msgspec.Struct, frozen=True, tag=True):
    """What was done since the last one; a sign of life."""

    operations: dict[str, int]
    longest_s: dict[str, float]
    evicted: int
    """Chunks, by the tier."""
    corrupt: int


class Proved(msgspec.Struct, frozen=True, tag=True):
    well: bool


class Found(msgspec.Struct, frozen=True, tag=True):
    numbers: list[int]


class Rested(msgspec.Struct, frozen=True, tag=True):
    """All is written, and nothing is under way."""


Report = (
    Opened | Refused | Putting | Promised | Forgetting | Forgotten | Missed | Wrong | Broken | Counted | Proved | Found
    | Rested
)  # fmt: skip

_COMMANDS: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
_REPORTS: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)
_ENCODER = msgspec.json.Encoder()


def packed(message: Any) -> bytes:
    return _ENCODER.encode(message) + b"\n"


def command_of(line: bytes) -> Command:
    return _COMMANDS.decode(line)


def report_of(line: bytes) -> Report:
    return _REPORTS.decode(line)


class Mouth:
    """A worker's way to say things. Returns once the kernel has it: what was said before a kill is heard after it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def say(self, message: Report) -> None:
        self._connection.sendall(packed(message))


def now_s() -> float:
    """One clock for all processes of a machine."""
    return time.monotonic()
