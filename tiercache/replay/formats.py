"""Read traces: the arrival of requests and the blocks that each needs.

The keys of the first recognised line determine which of three formats a file has. All are JSON Lines, plain or gzipped.

**mooncake** (kvcache-ai/Mooncake, FAST'25): one request per line: `timestamp` (ms), `input_length`, `output_length`,
and `hash_ids` of blocks of 512 tokens, equal for equal prefixes across all requests.

**agentic** (callanjfox/kv-cache-tester): one session per line, with `id`, `block_size`, `hash_id_scope` and `requests`:
`t` (s, from the session's beginning), `in`, `out`, `hash_ids`, `api_time` (s, duration of the answer). Ids of scope
"local" belong to the session: two sessions share no block, even if their system prompts were equal.

**tiercache**: one request per line, in order of time, which may begin anywhere:
`{"time_s": 12.5, "blocks": ["a", 7], "block_tokens": 256, "input_tokens": 700, "output_tokens": 90, "session": "s1",
"duration_s": 4.1, "lead_s": 3.0}`
Only `time_s` and `blocks` are required. A block is a number or a text that stands for the whole prefix up to its end.
`session` joins the turns of one conversation, `duration_s` is the duration of the answer, and `lead_s` is the time
between the announcement and the request. Other keys are ignored.
"""

from __future__ import annotations

import gzip
import heapq
import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import IO, Annotated, TypeVar, cast

import msgspec

from tiercache.core.keys import ChunkKey
from tiercache.errors import TierCacheError

MOONCAKE_BLOCK_TOKENS = 512
DEFAULT_BLOCK_TOKENS = 256
_KEPT_PROBLEMS = 20
_BAD_LINE = (msgspec.DecodeError, ValueError, OverflowError, RecursionError)
"""Errors of a line that is not JSON, not UTF-8, nested too deeply, or of wrong values."""

T = TypeVar("T")


class TraceError(TierCacheError):
    """A trace cannot be replayed. The message names the file, the line and the problem."""


@dataclass(slots=True)
class Request:
    """An arrival. `keys` are all its blocks, of `block_tokens` tokens each (the last may be partial)."""

    time_s: float
    keys: list[ChunkKey]
    block_tokens: int
    input_tokens: int
    output_tokens: int = 0
    session: str | None = None
    duration_s: float | None = None
    lead_s: float | None = None

    @property
    def subject(self) -> str:
        """The subject of a hint about the request."""
        return self.session if self.session is not None else f"@{id(self)}"


@dataclass
class Trace:
    """A trace file as an iterable. Each pass reads it again. Times count from the first request.

    A request stays in memory while it is processed; an agentic session stays from its start to its last request.
    `strict` raises TraceError for a bad line; otherwise it is skipped and named in `problems` (of the last pass).
    """

    path: Path
    strict: bool = False
    session_interval_s: float = 0.0
    """Seconds between the starts of agentic sessions, which all start at 0 in their file."""
    repeat: int = 1
    """Number of passes over the trace, each with its own blocks and sessions."""
    limit: int | None = None
    """Largest number of requests; None means all."""
    format: str = field(init=False)
    problems: list[str] = field(default_factory=list)
    skipped: int = 0

    def __post_init__(self) -> None:
        self.format = _format_of(self.path)

    def __iter__(self) -> Iterator[Request]:
        self.problems, self.skipped = [], 0
        return itertools.islice(self._repeated(), self.limit)

    def _repeated(self) -> Iterator[Request]:
        latest_s = 0.0
        for round_ in range(self.repeat):
            offset_s: float | None = None
            for request in self._once(f"{round_}:".encode() if round_ else b""):
                if offset_s is None:
                    offset_s = latest_s - request.time_s
                request.time_s += offset_s
                latest_s = request.time_s
                yield request

    def _once(self, scope: bytes) -> Iterator[Request]:
        try:
            yield from self._read(scope)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{self.path}: cannot be read to its end: {error}") from error

    def _read(self, scope: bytes) -> Iterator[Request]:
        with _opened(self.path) as file:
            if self.format == "agentic":
                yield from self._sessions(file, scope)
                return
            request_of = _mooncake if self.format == "mooncake" else _own
            latest_s = 0.0
            for number, request in self._parsed(file, lambda line: request_of(line, scope)):
                if request.time_s < latest_s:
                    self._bad(number, f"time: {request.time_s:g} s is before {latest_s:g} s, of the line before it")
                    continue
                latest_s = request.time_s
                yield request

    def _sessions(self, file: IO[bytes], scope: bytes) -> Iterator[Request]:
        """Yield the requests of all sessions by time. Holds the sessions that have begun and not ended."""
        coming: list[_Coming] = []
        for number, (_, session) in enumerate(self._parsed(file, _session)):
            start_s = number * self.session_interval_s
            while coming and coming[0][0] < start_s:
                yield _pop(coming)
            own_scope = scope + b"%d:" % number if session.hash_id_scope == "local" else scope
            _push(coming, number, session.turns(start_s, own_scope))
        while coming:
            yield _pop(coming)

    def _parsed(self, file: IO[bytes], parse: Callable[[bytes], T]) -> Iterator[tuple[int, T]]:
        """Yield the number of each good line, and what `parse` makes of it."""
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                found = parse(line)
            except _BAD_LINE as error:
                self._bad(number, str(error))
            else:
                yield number, found

    def _bad(self, number: int, problem: str) -> None:
        text = f"{self.path}: line {number}: {problem}"
        if self.strict:
            raise TraceError(text)
        self.skipped += 1
        if len(self.problems) < _KEPT_PROBLEMS:
            self.problems.append(text)


_Coming = tuple[float, int, Request, Iterator[Request]]
"""The next request of a session: its time, the number of the session, the request, and those after it."""


def _push(coming: list[_Coming], number: int, turns: Iterator[Request]) -> None:
    if (request := next(turns, None)) is not None:
        heapq.heappush(coming, (request.time_s, number, request, turns))


def _pop(coming: list[_Coming]) -> Request:
    _, number, request, turns = heapq.heappop(coming)
    _push(coming, number, turns)
    return request


_Id = Annotated[int, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class _MooncakeLine(msgspec.Struct):
    timestamp: _Seconds
    input_length: _Count
    output_length: _Count
    hash_ids: list[_Id]


class _OwnLine(msgspec.Struct):
    time_s: _Seconds
    blocks: list[_Id | str]
    block_tokens: _Positive = DEFAULT_BLOCK_TOKENS
    input_tokens: _Count | None = None
    output_tokens: _Count = 0
    session: str | None = None
    duration_s: _Seconds | None = None
    lead_s: _Seconds | None = None


class _Turn(msgspec.Struct):
    t: _Seconds
    hash_ids: list[_Id]
    in_: _Count = msgspec.field(name="in")
    out: _Count = 0
    api_time: _Seconds | None = None


class _Session(msgspec.Struct):
    id: str
    requests: Annotated[list[_Turn], msgspec.Meta(min_length=1)]
    block_size: _Positive = 64
    hash_id_scope: str = "local"

    def turns(self, start_s: float, scope: bytes) -> Iterator[Request]:
        name = f"{scope.decode()}{self.id}"
        for turn in self.requests:
            keys = _keys(turn.hash_ids, scope)
            yield Request(
                start_s + turn.t, keys, self.block_size, turn.in_, turn.out, session=name, duration_s=turn.api_time
            )


_decode_mooncake = msgspec.json.Decoder(_MooncakeLine).decode
_decode_own = msgspec.json.Decoder(_OwnLine).decode
_decode_session = msgspec.json.Decoder(_Session).decode


def _mooncake(line: bytes, scope: bytes) -> Request:
    found = _decode_mooncake(line)
    keys = _keys(found.hash_ids, scope)
    return Request(found.timestamp / 1000, keys, MOONCAKE_BLOCK_TOKENS, found.input_length, found.output_length)


def _own(line: bytes, scope: bytes) -> Request:
    found = _decode_own(line)
    return Request(
        found.time_s,
        [_key_of_text(block, scope) if isinstance(block, str) else _keys((block,), scope)[0] for block in found.blocks],
        found.block_tokens,
        len(found.blocks) * found.block_tokens if found.input_tokens is None else found.input_tokens,
        found.output_tokens,
        found.session if found.session is None or not scope else scope.decode() + found.session,
        found.duration_s,
        found.lead_s,
    )


def _session(line: bytes) -> _Session:
    session = _decode_session(line)
    latest_s = 0.0
    for number, turn in enumerate(session.requests):
        if turn.t < latest_s:
            raise ValueError(f"requests[{number}].t: {turn.t:g} s is before {latest_s:g} s, of the one before it")
        if (largest := max(turn.hash_ids, default=0)) >= 1 << 64:
            raise ValueError(f"requests[{number}].hash_ids: expected numbers below 2**64, found {largest}")
        latest_s = turn.t
    return session


def _keys(ids: list[int] | tuple[int, ...], scope: bytes) -> list[ChunkKey]:
    if not scope:
        return [number.to_bytes(8, "big") for number in ids]
    return [scope + number.to_bytes(8, "big") for number in ids]


def _key_of_text(text: str, scope: bytes) -> ChunkKey:
    return scope + blake2b(text.encode(), digest_size=16).digest()


def _opened(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast("IO[bytes]", gzip.open(path)) if packed else path.open("rb")


def _format_of(path: Path) -> str:
    """Return the format of the first line, among 100, that has a key of a known format. Raises TraceError."""
    if path.is_fifo():
        raise TraceError(f"{path}: expected a file, found a pipe, which can be read only once")
    try:
        with _opened(path) as file:
            for line in itertools.islice(file, 100):
                try:
                    found = msgspec.json.decode(line)
                except _BAD_LINE:
                    continue
                if isinstance(found, dict):
                    for name, key in (("mooncake", "timestamp"), ("agentic", "requests"), ("tiercache", "time_s")):
                        if key in found:
                            return name
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    raise TraceError(f"{path}: expected mooncake, agentic or tiercache JSON Lines; no such line among the first 100")
