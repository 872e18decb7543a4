"""A connection to a server: RESP requests, with payloads sent from and received into memory that the caller owns.

redis-py connects and logs in; from then on only this class uses the socket, since redis-py makes a `bytes` of every
value. A connection is used by one thread at a time, and every wait releases the GIL. On a plain socket a whole value is
one system call.
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

Buffer = bytes | bytearray | memoryview

_ASKING = b"*1\r\n$6\r\nASKING\r\n"
_LINE_BYTES = 64
"""Bytes to receive if a line is expected and a payload may follow."""
_LONGEST_LINE_BYTES = 4096
_REPLY_BYTES = 16 << 10
"""Bytes to receive at a time if a short reply is expected."""
_LONGEST_REPLY_BYTES = 64 << 10
_RENEWAL_BYTES = 1 << 20
_PIECE_BYTES = 2 << 20
_PIECES_AHEAD = 2
_DEADLINE_CHECKS = 4
"""Number of deadline checks per timeout by a thread that waits in the kernel."""


class ServerError(Exception):
    """An error reply. `code` is its first word: MOVED, OOM, ...; `text` is the rest."""

    def __init__(self, endpoint: Endpoint, reply: str) -> None:
        super().__init__(f"{endpoint} answers: {reply[:200]}")
        self.code, _, self.text = reply.partition(" ")


class ConnectionLost(ConnectionError):
    """The peer is gone, or its answer is not RESP. The connection cannot be used any more."""


class ConnectionTimeout(ConnectionLost, TimeoutError):
    """There was no answer by the deadline."""


def command(*words: bytes) -> bytes:
    """Return a request in RESP."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class RedisConnection:
    """Wraps a connected redis-py connection.

    The deadline of a request and its reply is `timeout_s` from `renew` on, and is renewed after each MiB of a payload,
    so that a long value may take longer and a stalled value may not. All methods that send or receive block, and raise
    ConnectionLost or ConnectionTimeout.
    """

    def __init__(self, connection: Any, endpoint: Endpoint, timeout_s: float) -> None:
        self.endpoint = endpoint
        self.reused = False
        """True if it has been idle since it was made: when it fails, the server may be healthy."""
        self.asking = False
        """True if each request goes to a server that only imports the slot (ASK in Redis Cluster)."""
        self._expected_replies = 0
        self._broken = False
        self._timeout_s = timeout_s
        self.raw = connection
        # redis-py has no public name for the socket.
        self._socket: socket.socket = connection._sock
        self._tls = isinstance(self._socket, ssl.SSLSocket)
        check_s = max(timeout_s / _DEADLINE_CHECKS, 0.001)
        if self._tls:
            self._socket.settimeout(check_s)
        else:
            # A timeout in Python makes the socket non-blocking, with a poll and a turn of the GIL for each piece.
            self._socket.settimeout(None)
            interval = struct.pack("@ll", int(check_s), int(check_s % 1 * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, option, interval)
        self._received = bytearray()
        """Bytes that were received and not consumed yet."""
        self.renew()

    @property
    def reusable(self) -> bool:
        """True if every reply was read to its end."""
        return not self._expected_replies and not self._broken and not self._received

    def renew(self) -> None:
        """Set the deadline to `timeout_s` from now."""
        self._deadline_s = time.monotonic() + self._timeout_s
        self._moved_bytes = 0

    def close(self) -> None:
        """Close the socket. Called when no other thread uses the connection."""
        self._broken = True
        with contextlib.suppress(Exception):
            self.raw.disconnect()

    def request(self, *parts: Buffer, replies: int = 1) -> None:
        """Send `parts`, which form `replies` whole requests (one while `asking`)."""
        self._expected_replies += replies
        left = [memoryview(part) for part in ([_ASKING, *parts] if self.asking else parts) if len(part)]
        while left:
            try:
                sent = self._socket.send(left[0]) if self._tls else self._socket.sendmsg(left)
            except (BlockingIOError, TimeoutError):
                sent = 0
            except OSError as error:
                raise self._lost(error) from error
            while left and sent >= len(left[0]):
                sent -= len(left[0])
                self._moved_bytes += len(left.pop(0))
            if left:
                left[0] = left[0][sent:]
                self._check_progress(sent)

    def reply(self) -> bytes | int | None:
        """Receive a short reply. Raises ServerError for an error reply."""
        line = self._reply_line(_REPLY_BYTES)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b":":
            return self._number(rest)
        if kind == b"$":
            length = self._number(rest)
            return None if length < 0 else self.take(length)
        raise self._malformed(line)

    def value_bytes(self, ahead_bytes: int = _LINE_BYTES) -> int | None:
        """Begin to receive a value: return its length, or None if there is none. Raises ServerError.

        `take`, `take_into` or `give_up` must follow. `ahead_bytes` are received in the first call; payload bytes among
        them are copied once more.
        """
        line = self._reply_line(ahead_bytes)
        if line[:1] != b"$":
            raise self._malformed(line)
        length = self._number(line[1:])
        return None if length < 0 else length

    def take(self, length: int, *, last: bool = True) -> bytes:
        """Return the next bytes of a short value. `last` bytes are followed by the end of the reply."""
        end = length + 2 if last else length
        if end > _LONGEST_REPLY_BYTES:
            self._broken = True
            raise ConnectionLost(f"{self.endpoint} answers with {length} bytes where a short answer was expected")
        while len(self._received) < end:
            self._receive_more(end - len(self._received))
        taken = bytes(self._received[:length])
        del self._received[:end]
        return taken

    def take_into(self, into: memoryview) -> None:
        """Receive the rest of a value, which has the length of `into`, and the end of the reply."""
        held = min(len(self._received), len(into))
        into[:held] = self._received[:held]
        del self._received[:held]
        rest = into[held:]
        while len(rest):
            received = self._receive(rest, all_of_it=True)
            rest = rest[received:]
            if len(rest):
                self._check_progress(received)
        self.take(0)

    def give_up(self) -> None:
        """Drop the rest of a value: the connection is closed when it is returned to the pool."""
        self._broken = True

    def _reply_line(self, most_bytes: int) -> bytes:
        if self.asking:
            self._raise_if_error(self._line(_LINE_BYTES))
        line = self._line(most_bytes)
        self._expected_replies -= 1
        self._raise_if_error(line)
        return line

    def _raise_if_error(self, line: bytes) -> None:
        if line[:1] == b"-":
            raise ServerError(self.endpoint, line[1:].decode("utf-8", "replace"))

    def _line(self, most_bytes: int) -> bytes:
        """Return the bytes up to the next line end. Each system call receives at most `most_bytes`."""
        while (end := self._received.find(b"\r\n")) < 0:
            if len(self._received) >= _LONGEST_LINE_BYTES:
                raise self._malformed(bytes(self._received[:40]))
            self._receive_more(most_bytes)
        line = bytes(self._received[:end])
        del self._received[: end + 2]
        return line

    def _receive_more(self, most_bytes: int) -> None:
        piece = memoryview(bytearray(most_bytes))
        self._received += piece[: self._receive(piece)]

    def _receive(self, into: memoryview, *, all_of_it: bool = False) -> int:
        """Receive some bytes; `all_of_it` waits in the kernel for as many as `into` has, up to the next deadline check."""
        flags = socket.MSG_WAITALL if all_of_it and not self._tls else 0
        while True:
            try:
                received = self._socket.recv_into(into, len(into), flags)
            except (BlockingIOError, TimeoutError):
                self._check_progress(0)
                continue
            except OSError as error:
                raise self._lost(error) from error
            if not received:
                raise self._lost(None)
            return received

    def _check_progress(self, moved_bytes: int) -> None:
        """Renew the deadline after each MiB; else raise ConnectionTimeout once it has passed."""
        self._moved_bytes += moved_bytes
        if self._moved_bytes >= _RENEWAL_BYTES:
            self.renew()
        elif time.monotonic() >= self._deadline_s:
            self._broken = True
            raise ConnectionTimeout(f"{self.endpoint} did not answer within {self._timeout_s:g} s")

    def _number(self, text: bytes) -> int:
        try:
            return int(text)
        except ValueError:
            raise self._malformed(text) from None

    def _malformed(self, line: bytes) -> ConnectionLost:
        self._broken = True
        return ConnectionLost(f"{self.endpoint} does not answer as a Redis server does: {line[:40]!r}")

    def _lost(self, error: OSError | None) -> ConnectionLost:
        self._broken = True
        if error is None:
            return ConnectionLost(f"{self.endpoint} closed the connection")
        return ConnectionLost(f"{self.endpoint}: {error.strerror or type(error).__name__}")


def get_value(
    connection: RedisConnection, name: bytes, into: memoryview, header_bytes: int
) -> tuple[bytes | None, int]:
    """Receive a value's first `header_bytes` bytes, which are returned, and the rest into `into`.

    If `into` is long, the value is read in pieces, two of them requested at a time, since servers are slow with long
    replies. If a value is replaced meanwhile, parts of both are read, which the checksum reveals.

    Returns the header and the number of bytes in `into`; None for the header if there is no value, or an empty value. A
    value longer than `into` is not received to its end. Raises ServerError.
    """
    longest = header_bytes + len(into)
    requests = [command(b"GET", name)]
    if longest > 2 * _PIECE_BYTES:
        starts = range(0, longest + 1, _PIECE_BYTES)
        requests = [command(b"GETRANGE", name, b"%d" % at, b"%d" % (at + _PIECE_BYTES - 1)) for at in starts]
    header: bytes | None = None
    received = number = sent = 0
    # The first reply's line and the header are received in one call, without any byte of the payload.
    ahead_bytes = len(b"$%d\r\n" % min(longest, _PIECE_BYTES)) + header_bytes
    while number < len(requests):
        connection.renew()
        for request in requests[sent : number + _PIECES_AHEAD]:
            connection.request(request)
            sent += 1
        length = connection.value_bytes(_LINE_BYTES if number else ahead_bytes)
        if length is None:
            break
        if length < _PIECE_BYTES:
            del requests[sent:]  # The value ends here; pieces already requested are empty.
        number += 1
        if number == 1 and length <= header_bytes:
            header = connection.take(length) or None
            continue
        if number == 1:
            header = connection.take(header_bytes, last=False)
            length -= header_bytes
        if received + length > len(into):
            connection.give_up()
            break
        connection.take_into(into[received : received + length])
        received += length
    return header, received


def set_value(
    connection: RedisConnection, name: bytes, header: bytes, payload: memoryview, options: Sequence[bytes]
) -> None:
    """Store the header and the payload as one value. Raises ServerError."""
    frame = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (
        3 + len(options), len(name), name, len(header) + len(payload), header,
    )  # fmt: skip
    connection.request(frame, payload, b"\r\n" + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in options]))
    connection.reply()
