"""Read traces: the arrival of requests and the blocks that each needs.

The keys of the first recognised line determine which of three formats a file has. All are JSON Lines, plain or gzipped.

**mooncake** (kvcache-ai/Mooncake, FAST'25): one request per line: `timestamp` (ms), `input_length`, `output_length`,
and `hash_ids` of blocks of 512 tokens, equal for equal prefixes across all requests.

**agentic** (callanjfox/kv-cache-tester): one session per line, with `id`, `block_size`, `hash_id_scope` and `requests`:
`t` (s, from the session's beginning), `in`, `out`, `hash_ids`, `api_time` (s, duration of the answer). Ids of scope
"local" belong to the session: two sessions share no block, even if their system prompts were equal.

**tiercache**: one request per line, in order of time:
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
from typing import IO, Any, cast

import msgspec

from tiercache.core.keys import ChunkKey
from tiercache.errors import TierCacheError

MOONCAKE_BLOCK_TOKENS = 512
DEFAULT_BLOCK_TOKENS = 256
_KEPT_PROBLEMS = 20


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
    """A trace file as an iterable. Each pass reads it again.

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
        offset_s = latest_s = 0.0
        for round_ in range(self.repeat):
            for request in self._once(f"{round_}:".encode() if round_ else b""):
                request.time_s += offset_s
                latest_s = request.time_s
                yield request
            offset_s = latest_s

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
            parse = _mooncake if self.format == "mooncake" else _own
            latest_s = float("-inf")
            for number, line in enumerate(file, 1):
                request = self._parsed(number, line, lambda line: parse(line, scope))
                if request is None:
                    continue
                if request.time_s < latest_s:
                    self._bad(number, f"time: {request.time_s:g} s is before {latest_s:g} s, of the line before it")
                    continue
                latest_s = request.time_s
                yield request

    def _sessions(self, file: IO[bytes], scope: bytes) -> Iterator[Request]:
        """Yield the requests of all sessions by time. Reads a session when the clock reaches its start."""
        lines = enumerate(file, 1)
        going: list[tuple[float, int, int, _Session]] = []
        started = 0
        while True:
            start_s = started * self.session_interval_s
            while not going or going[0][0] >= start_s:
                session = None
                for number, line in lines:
                    if line.strip() and (session := self._parsed(number, line, _session)) is not None:
                        break
                if session is None:
                    start_s = float("inf")
                    break
                session.prepare(start_s, scope, started)
                heapq.heappush(going, (session.time_s(0), started, 0, session))
                started += 1
                start_s = started * self.session_interval_s
            if not going:
                return
            _, number, turn, session = heapq.heappop(going)
            yield session.request(turn)
            if turn + 1 < len(session.requests):
                heapq.heappush(going, (session.time_s(turn + 1), number, turn + 1, session))

    def _parsed(self, number: int, line: bytes, parse: Callable[[bytes], Any]) -> Any:
        if not line.strip():
            return None
        try:
            return parse(line)
        except (msgspec.DecodeError, ValueError, OverflowError) as error:
            self._bad(number, str(error))
            return None

    def _bad(self, number: int, problem: str) -> None:
        text = f"{self.path}: line {number}: {problem}"
        if self.strict:
            raise TraceError(text)
        self.skipped += 1
        if len(self.problems) < _KEPT_PROBLEMS:
            self.problems.append(text)


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class _OwnLine(msgspec.Struct):
    time_s: float
    blocks: list[int | str]
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    input_tokens: int | None = None
    output_tokens: int = 0
    session: str | None = None
    duration_s: float | None = None
    lead_s: float | None = None


class _Turn(msgspec.Struct):
    t: float
    hash_ids: list[int]
    in_: int = msgspec.field(name="in")
    out: int = 0
    api_time: float | None = None


class _Session(msgspec.Struct):
    id: str
    requests: list[_Turn]
    block_size: int = 64
    hash_id_scope: str = "local"
    start_s: float = 0.0
    scope: bytes = b""

    def prepare(self, start_s: float, scope: bytes, number: int) -> None:
        self.start_s = start_s
        if self.hash_id_scope == "local":
            scope += b"%d:" % number
        self.scope = scope
        self.id = f"{scope.decode()}{self.id}"

    def time_s(self, turn: int) -> float:
        return self.start_s + self.requests[turn].t

    def request(self, turn: int) -> Request:
        entry = self.requests[turn]
        return Request(
            self.time_s(turn),
            _keys(entry.hash_ids, self.scope),
            self.block_size,
            entry.in_,
            entry.out,
            session=self.id,
            duration_s=entry.api_time,
        )


_decode_mooncake = msgspec.json.Decoder(_MooncakeLine).decode
_decode_own = msgspec.json.Decoder(_OwnLine).decode
_decode_session = msgspec.json.Decoder(_Session).decode


def _mooncake(line: bytes, scope: bytes) -> Request:
    found = _decode_mooncake(line)
    _check(found.timestamp, found.input_length, found.output_length)
    keys = _keys(found.hash_ids, scope)
    return Request(found.timestamp / 1000, keys, MOONCAKE_BLOCK_TOKENS, found.input_length, found.output_length)


def _own(line: bytes, scope: bytes) -> Request:
    found = _decode_own(line)
    if found.block_tokens < 1:
        raise ValueError(f"block_tokens: expected at least 1, found {found.block_tokens}")
    tokens = len(found.blocks) * found.block_tokens if found.input_tokens is None else found.input_tokens
    _check(found.time_s, tokens, found.output_tokens)
    _check_duration("duration_s", found.duration_s)
    _check_duration("lead_s", found.lead_s)
    session = found.session if found.session is None or not scope else scope.decode() + found.session
    return Request(
        found.time_s,
        [_key_of_text(block, scope) if isinstance(block, str) else _keys((block,), scope)[0] for block in found.blocks],
        found.block_tokens,
        tokens,
        found.output_tokens,
        session,
        found.duration_s,
        found.lead_s,
    )


def _session(line: bytes) -> _Session:
    session = _decode_session(line)
    if session.block_size < 1:
        raise ValueError(f"block_size: expected at least 1, found {session.block_size}")
    if not session.requests:
        raise ValueError("requests: expected at least one, found none")
    latest_s = float("-inf")
    for turn, entry in enumerate(session.requests):
        _check(entry.t, entry.in_, entry.out)
        if entry.t < latest_s:
            raise ValueError(f"requests[{turn}].t: {entry.t:g} s is before {latest_s:g} s, of the one before it")
        _check_duration(f"requests[{turn}].api_time", entry.api_time)
        wrong = [number for number in entry.hash_ids if not 0 <= number < 1 << 64]
        if wrong:
            raise ValueError(f"requests[{turn}].hash_ids: expected numbers in 0 .. 2**64-1, found {wrong[0]}")
        latest_s = entry.t
    return session


def _check(time: float, input_tokens: int, output_tokens: int) -> None:
    if not 0 <= time < float("inf"):
        raise ValueError(f"time: expected a number from 0 on, found {time}")
    if input_tokens < 0 or output_tokens < 0:
        raise ValueError(f"lengths: expected 0 or more tokens, found {min(input_tokens, output_tokens)}")


def _check_duration(name: str, seconds: float | None) -> None:
    if seconds is not None and seconds < 0:
        raise ValueError(f"{name}: expected a number of seconds from 0 on, found {seconds:g}")


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
    try:
        with _opened(path) as file:
            for line in itertools.islice(file, 100):
                try:
                    found = msgspec.json.decode(line)
                except msgspec.DecodeError:
                    continue
                if isinstance(found, dict):
                    for name, key in (("mooncake", "timestamp"), ("agentic", "requests"), ("tiercache", "time_s")):
                        if key in found:
                            return name
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    raise TraceError(f"{path}: expected mooncake, agentic or tiercache JSON Lines; no such line among the first 100")
