"""What is said on one connection: a head read or set, many segments moved with some of them on their way.

Each reads all replies that it has asked for before it raises: the connection is as good as before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tiercache.core.header import PACKED_BYTES
from tiercache.errors import CorruptChunk
from tiercache.tiers.remote.redis.channel import Channel, command
from tiercache.tiers.remote.redis.failures import FOREIGN_TYPE, ServerError
from tiercache.tiers.remote.redis.layout import HEAD_BYTES, MANIFEST_BYTES, Segment, is_ours, lies_elsewhere

_WINDOW = 2
"""Segments asked for or sent and not answered: the next one is on its way when one is done, and the server holds no more
than these in memory for us."""

_PUBLISH = b"""
local function withdraw(answer)
  for number = 1, #KEYS do
    redis.pcall('UNLINK', KEYS[number])
  end
  return answer
end
local set = redis.pcall('SET', KEYS[1], ARGV[1], 'NX', unpack(ARGV, 3))
if not set or set.err then
  return redis.pcall('GETRANGE', KEYS[1], 0, #ARGV[1]) == ARGV[1] and 1 or set or 0
end
for number = 2, #KEYS do
  local answer
  if ARGV[2] == '' then
    answer = redis.pcall('PERSIST', KEYS[number])
  else
    answer = redis.pcall('PEXPIRE', KEYS[number], ARGV[2])
  end
  if type(answer) == 'table' then
    return withdraw(answer)
  end
  if answer ~= 1 and redis.pcall('EXISTS', KEYS[number]) ~= 1 then
    return withdraw(-1)
  end
end
return 1
"""
"""Nobody sees what a script has done before its end. SET is first: it is what a server without memory refuses, and only as
long as a script has written nothing."""
_TAKE_AWAY = b"""
if redis.pcall('STRLEN', KEYS[1]) ~= tonumber(ARGV[2])
or redis.pcall('GETRANGE', KEYS[1], 0, %d) ~= ARGV[1] then
  return 0
end
local first
for number = 1, #KEYS do
  local answer = redis.pcall('UNLINK', KEYS[number])
  if type(answer) == 'table' then
    return answer
  end
  first = first or answer
end
return first
""" % (HEAD_BYTES - 1)
"""What goes wrong inside is the answer, so that it is said as without a script, by Redis 6.2 too."""


class Missing(Exception):
    """A segment is not there: evicted, expired, or removed meanwhile."""


def get_head(channel: Channel, name: bytes, into: memoryview) -> tuple[bytes | None, int]:
    """The header, and how many bytes of payload came into `into`; or header and manifest, and none. None: there is no value.

    Of a value that cannot be a chunk of ours, or is longer than `into`, only the beginning is returned.
    """
    channel.request(command(b"GET", name))
    # The line of a payload as long as `into`, and the header: received in one call, and no byte of the payload with them.
    length = channel.value_bytes(len(b"$%d\r\n" % (PACKED_BYTES + len(into))) + PACKED_BYTES)
    if length is None:
        return None, 0
    if length < PACKED_BYTES:
        return channel.take(length), 0
    if length == HEAD_BYTES:
        value = channel.take(length)
        if lies_elsewhere(value, length) or not is_ours(value) or len(into) < MANIFEST_BYTES:
            return value, 0
        into[:MANIFEST_BYTES] = value[PACKED_BYTES:]
        return value[:PACKED_BYTES], MANIFEST_BYTES
    header = channel.take(PACKED_BYTES, last=False)
    rest = length - PACKED_BYTES
    if rest > len(into) or not is_ours(header):
        channel.skip(rest)
        return header, 0
    channel.take_into(into[:rest])
    return header, rest


def set_head(channel: Channel, name: bytes, value: bytes, payload: memoryview, ttl_ms: int | None) -> bool:
    """Whether there was none yet."""
    options = [b"NX"] if ttl_ms is None else [b"NX", b"PX", b"%d" % ttl_ms]
    _request_set(channel, name, value, payload, options)
    return channel.reply() is not None


def publish(
    channel: Channel, names: list[bytes], head: bytes, ttl_ms: int | None, segments_ttl_ms: int | None
) -> bool:
    """Set `head` under the first of `names` and give the segments, which are the others, their final expiry (or none), in
    one step. Whether there was no head yet, or this one: after an answer that was lost.

    Raises Missing when a segment is gone: then nothing is left of the chunk.
    """
    expiry = b"" if segments_ttl_ms is None else b"%d" % segments_ttl_ms
    options = [] if ttl_ms is None else [b"PX", b"%d" % ttl_ms]
    channel.request(command(b"EVAL", _PUBLISH, b"%d" % len(names), *names, head, expiry, *options))
    answer = channel.reply()
    if answer == -1:
        raise Missing
    return answer == 1


def look(channel: Channel, name: bytes) -> tuple[bytes, int]:
    """The beginning of a value, enough to know what it is, and its length; -1 where there is none."""
    channel.request(command(b"GETRANGE", name, b"0", b"%d" % (HEAD_BYTES - 1)))
    channel.request(command(b"STRLEN", name))
    channel.request(command(b"EXISTS", name))  # for an empty value is as long as none
    problem = None
    beginning: bytes | int | None = b""
    try:
        beginning = channel.reply()
    except ServerError as error:
        problem = error
    try:
        length = channel.reply()
    finally:
        there = channel.reply() if channel.in_step else 0
    if problem is not None:
        raise problem
    assert isinstance(beginning, bytes) and isinstance(length, int)
    return beginning, length if there == 1 else -1


def take_away(channel: Channel, names: list[bytes], beginning: bytes, length: int) -> bool:
    """Unlink all of `names`, in one step, if the first of them still is what `look` has found. Whether it was."""
    channel.request(command(b"EVAL", _TAKE_AWAY, b"%d" % len(names), *names, beginning, b"%d" % length))
    return channel.reply() == 1


def fetch(channel: Channel, segments: list[Segment]) -> None:
    """Read all of `segments` into their parts. What has arrived is taken off the list."""

    def request(segment: Segment) -> None:
        channel.request(command(b"GET", segment.name))

    def receive(segment: Segment) -> None:
        try:
            length = channel.value_bytes()
        except ServerError as error:
            if error.code == FOREIGN_TYPE:
                raise CorruptChunk(f"{segment.name.decode()} is no segment of ours") from None
            raise
        if length is None:
            raise Missing
        if length != len(segment.part):
            channel.skip(length)
            raise CorruptChunk(f"{segment.name.decode()}: expected {len(segment.part)} bytes, found {length}")
        channel.take_into(segment.part)

    _in_window(channel, segments, _WINDOW, request, receive)


def send(channel: Channel, segments: list[Segment], ttl_ms: int) -> None:
    """Store all of `segments`, to expire. What is stored is taken off the list."""
    options = [b"PX", b"%d" % ttl_ms]

    def request(segment: Segment) -> None:
        _request_set(channel, segment.name, b"", segment.part, options)

    def receive(segment: Segment) -> None:
        channel.reply()

    _in_window(channel, segments, _WINDOW, request, receive)


def expire(channel: Channel, segments: list[Segment], ttl_ms: int | None) -> list[Segment]:
    """Give those of `segments` that are there another expiry, or none. Returns those with which there was nothing to do."""
    unchanged: list[Segment] = []

    def request(segment: Segment) -> None:
        if ttl_ms is None:
            channel.request(command(b"PERSIST", segment.name))
        else:
            channel.request(command(b"PEXPIRE", segment.name, b"%d" % ttl_ms))

    def receive(segment: Segment) -> None:
        if channel.reply() != 1:
            unchanged.append(segment)

    _in_window(channel, segments, len(segments), request, receive)
    return unchanged


def keep(channel: Channel, segments: list[Segment], ttl_ms: int | None) -> None:
    """As `expire`. Raises Missing when one is gone."""

    def request(segment: Segment) -> None:
        channel.request(command(b"EXISTS", segment.name))

    def receive(segment: Segment) -> None:
        if channel.reply() != 1:
            raise Missing

    # PERSIST says the same of what is gone and of what has no expiry any more: who stores the same chunk finishes for us.
    doubtful = expire(channel, segments, ttl_ms)
    _in_window(channel, doubtful, len(doubtful), request, receive)


def unlink(channel: Channel, segments: list[Segment]) -> bool:
    """Whether one of them was there."""
    answers: list[bool] = []

    def request(segment: Segment) -> None:
        channel.request(command(b"UNLINK", segment.name))

    def receive(segment: Segment) -> None:
        answers.append(channel.reply() == 1)

    _in_window(channel, segments, len(segments), request, receive)
    return any(answers)


def _in_window(
    channel: Channel,
    segments: list[Segment],
    window: int,
    request: Callable[[Segment], None],
    receive: Callable[[Segment], None],
) -> None:
    """Request all, receive all, `window` of them in between. After the first problem nothing more is requested."""
    waiting: deque[Segment] = deque()
    unasked = deque(segments)
    problem: Exception | None = None
    while waiting or (unasked and problem is None):
        while unasked and problem is None and len(waiting) < window:
            channel.renew()
            request(unasked[0])
            waiting.append(unasked.popleft())
        segment = waiting.popleft()
        channel.renew()
        try:
            receive(segment)
            segments.remove(segment)
        except (ServerError, Missing, CorruptChunk) as error:
            problem = problem or error
            if not channel.in_step:
                break
    if problem is not None:
        raise problem


def _request_set(channel: Channel, name: bytes, value: bytes, payload: memoryview, options: list[bytes]) -> None:
    """SET of `value` and `payload` in one."""
    frame = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (
        3 + len(options), len(name), name, len(value) + len(payload), value,
    )  # fmt: skip
    channel.request(frame, payload, b"\r\n" + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in options]))
