"""One connection and its bytes: requests as our own frames, payloads from and into memory that is not ours.

redis-py connects and logs in; from then on nobody but this class touches the socket. A channel is used by one thread at a
time, and every wait releases the GIL. A plain socket blocks in the kernel, which wakes the thread a few times until the
deadline; a whole segment is one system call. TLS goes by records of 16 KiB.

By hand, since redis-py makes a `bytes` of every value, on the loop: beside its asynchronous client with hiredis
(`tiercache bench --only redis`, four chunks in flight, two busy cores) the tier gets 6 times and puts 1.4 (2 MiB) to 4 times
(32 MiB) as many bytes a second, checksums included, and the loop is late by 5 instead of 44 ms (p99, gets of 2 MiB).
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Any

from tiercache.tiers.remote.redis.address import Endpoint
from tiercache.tiers.remote.redis.failures import BrokenConnection, ServerError, TooSlow

Buffer = bytes | bytearray | memoryview

_ASKING = b"*1\r\n$6\r\nASKING\r\n"
_LINE_BYTES = 64
"""What is asked for where a line is expected and a payload may follow."""
_BUFFER_BYTES = 64 << 10
_LONGEST_SKIP_BYTES = 256 << 10
"""Rather than read more than this of something unwanted, the connection is given up."""
_LOOKS = 4
"""How often a thread that waits in the kernel looks at its deadline."""


def command(*words: bytes) -> bytes:
    """A request as RESP has it."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class Channel:
    """`connection` is a connected one of redis-py's. `timeout_s` is for each request, from `renew` on."""

    def __init__(self, connection: Any, endpoint: Endpoint, timeout_s: float) -> None:
        self.endpoint = endpoint
        self.used = False
        """Whether it has been idle since it was made: if it fails now, the server may be well."""
        self.asking = False
        """Whether each request goes to a server that is only about to own the name (see Redis Cluster's ASK)."""
        self.idle_since_s = 0.0
        self._owed = 0
        self._spent = False
        self._timeout_s = timeout_s
        self._deadline_s = 0.0
        self._connection = connection
        # There is no public name for it; it has had this one since redis-py 2.
        self._socket: socket.socket = connection._sock
        self._tls = isinstance(self._socket, ssl.SSLSocket)
        look_s = max(timeout_s / _LOOKS, 0.001)
        if self._tls:
            self._socket.settimeout(look_s)
        else:
            # A timeout of Python's own would make the socket non-blocking, with a poll and a turn of the GIL for each piece.
            self._socket.settimeout(None)
            interval = struct.pack("@ll", int(look_s), int(look_s % 1 * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, option, interval)
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        self.renew()

    @property
    def clean(self) -> bool:
        """Whether it can be used for something else: every reply has been read."""
        return not self._owed and not self._spent and self._start == self._end

    @property
    def in_step(self) -> bool:
        """Whether the replies still to come can be read."""
        return not self._spent

    def renew(self) -> None:
        """Give the next request its whole time."""
        self._deadline_s = time.monotonic() + self._timeout_s

    def interrupt(self) -> None:
        """Make whoever waits on it fail now. From any thread."""
        with contextlib.suppress(OSError):
            # Not SSLSocket's own, which drops its TLS state under the hands of the thread that uses it.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """By the thread that uses it, or when nobody does."""
        self._spent = True
        with contextlib.suppress(Exception):
            self._connection.disconnect()

    # Requests

    def request(self, *parts: Buffer, replies: int = 1) -> None:
        """Send `parts`, which make up so many whole requests (one, while `asking`)."""
        self._owed += replies
        self._send([_ASKING, *parts] if self.asking else parts)

    def _send(self, parts: Sequence[Buffer]) -> None:
        left = [memoryview(part) for part in parts if len(part)]
        while left:
            try:
                sent = self._socket.send(left[0]) if self._tls else self._socket.sendmsg(left)
            except (BlockingIOError, TimeoutError):
                self._check_deadline()
                continue
            except OSError as error:
                raise self._broken(error) from error
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = left[0][sent:]
                self._check_deadline()

    # Replies

    def reply(self) -> bytes | int | None:
        """A short reply. Raises ServerError for one that is an error."""
        line = self._reply_line(_BUFFER_BYTES)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b":":
            return self._number(rest)
        if kind == b"$":
            length = self._number(rest)
            return None if length < 0 else self.take(length)
        raise self._nonsense(line)

    def ask(self, request: bytes) -> bytes | int | ServerError | None:
        """The reply to one request; also one that is an error."""
        self.request(request)
        try:
            return self.reply()
        except ServerError as error:
            return error

    def value_bytes(self, ahead: int = _LINE_BYTES) -> int | None:
        """Begin a reply that is a value: its length; None where there is none. `take` and `take_into` must follow.

        `ahead`: how many bytes are received before more is known; what of a payload is among them is copied once more.
        """
        line = self._reply_line(ahead)
        if line[:1] != b"$":
            raise self._nonsense(line)
        length = self._number(line[1:])
        return None if length < 0 else length

    def take(self, length: int, *, last: bool = True) -> bytes:
        """The next bytes of a short value; `last` ones are followed by the end of the reply."""
        end = length + 2 if last else length
        if end > _BUFFER_BYTES:
            self._spent = True
            raise BrokenConnection(f"{self.endpoint} answers with {length} bytes where a short answer was expected")
        while self._end - self._start < end:
            self._fill(end - (self._end - self._start))
        taken = bytes(self._buffer[self._start : self._start + length])
        self._start += end
        return taken

    def take_into(self, into: memoryview) -> None:
        """The rest of a value, which is as long as `into`, and the end of the reply."""
        held = min(self._end - self._start, len(into))
        into[:held] = self._buffer[self._start : self._start + held]
        self._start += held
        end = bytearray(2)
        held_of_end = self._end - self._start
        if held_of_end:
            self.take(0)
            end = bytearray()
        if self._tls:
            self._receive_all(into[held:])
            if end:
                self.take(0)
        else:
            self._receive_scattered([into[held:], memoryview(end)])

    def skip(self, length: int) -> None:
        """Leave out the rest of a value. Of a long one the connection is left instead."""
        if length > _LONGEST_SKIP_BYTES:
            self._spent = True
            return
        self.take_into(memoryview(bytearray(length)))

    def _reply_line(self, most: int) -> bytes:
        if self.asking:
            self._raise_if_error(self._line(_LINE_BYTES))
        line = self._line(most)
        self._owed -= 1
        self._raise_if_error(line)
        return line

    def _raise_if_error(self, line: bytes) -> None:
        if line[:1] == b"-":
            raise ServerError(line[1:].decode("utf-8", "replace"))

    def _line(self, most: int) -> bytes:
        """Up to the next line end; at most so many bytes are received at a time."""
        buffer = self._buffer.obj
        assert isinstance(buffer, bytearray)
        searched = self._start
        while True:
            found = buffer.find(b"\r\n", searched, self._end)
            if found >= 0:
                line = bytes(self._buffer[self._start : found])
                self._start = found + 2
                return line
            if self._end - self._start >= 4096:
                raise self._nonsense(bytes(self._buffer[self._start : self._start + 40]))
            searched = max(self._start, self._end - 1) - self._start
            self._fill(most)
            searched += self._start

    def _fill(self, most: int) -> None:
        """Receive up to `most` bytes into the buffer."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end + most > _BUFFER_BYTES:
            held = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, len(held)
            self._buffer[: self._end] = held
        self._end += self._receive(self._buffer[self._end : self._end + most])

    def _receive_all(self, into: memoryview) -> None:
        while len(into):
            into = into[self._receive(into) :]
            self._check_deadline()

    def _receive_scattered(self, parts: list[memoryview]) -> None:
        parts = [part for part in parts if len(part)]
        while parts:
            try:
                received = self._socket.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                self._check_deadline()
                continue
            except OSError as error:
                raise self._broken(error) from error
            if not received:
                raise self._broken(None)
            while parts and received >= len(parts[0]):
                received -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][received:]
                self._check_deadline()

    def _receive(self, into: memoryview) -> int:
        while True:
            try:
                received = self._socket.recv_into(into, len(into))
            except (BlockingIOError, TimeoutError):
                self._check_deadline()
                continue
            except OSError as error:
                raise self._broken(error) from error
            if not received:
                raise self._broken(None)
            return received

    def _check_deadline(self) -> None:
        if time.monotonic() >= self._deadline_s:
            self._spent = True
            raise TooSlow(f"{self.endpoint} did not answer within {self._timeout_s:g} s")

    def _number(self, text: bytes) -> int:
        try:
            return int(text)
        except ValueError:
            raise self._nonsense(text) from None

    def _nonsense(self, line: bytes) -> BrokenConnection:
        self._spent = True
        return BrokenConnection(f"{self.endpoint} does not answer as a Redis server does: {line[:40]!r}")

    def _broken(self, error: OSError | None) -> BrokenConnection:
        self._spent = True
        if error is None:
            return BrokenConnection(f"{self.endpoint} closed the connection")
        return BrokenConnection(f"{self.endpoint}: {error.strerror or type(error).__name__}")
