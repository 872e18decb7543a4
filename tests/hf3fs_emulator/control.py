"""Faults, as a test causes them while the daemon runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from tests.hf3fs_emulator.channel import Channel
from tests.hf3fs_emulator.pace import Pace
from tests.hf3fs_emulator.statistics import Statistics

Direction = Literal["read", "write"]
Call = Literal["open", "fsync", "rename", "unlink", "mkdir"]


class Control:
    """Faults strike operations in the order in which the daemon claims them, the oldest fault that applies first.

    `count` operations are struck, all until `clear` when it is None; of one `direction`, or of both when it is None. Methods
    that wait raise TimeoutError after `patience_s`.
    """

    def __init__(self, socket: Path, patience_s: float = 30.0) -> None:
        self.patience_s = patience_s
        self._socket = socket
        self._channel = Channel(socket)

    def close(self) -> None:
        self._channel.close()

    def fail(self, errno: int, count: int | None = 1, direction: Direction | None = None) -> None:
        """Complete with -errno, or with -EIO for one that 3FS does not report; nothing is transferred."""
        self._channel.ask("fault", action="errno", value=errno, count=count, direction=direction)

    def shorten(self, to_bytes: int, count: int | None = 1, direction: Direction | None = None) -> None:
        """Transfer `to_bytes` at most, and say so."""
        self._channel.ask("fault", action="short", value=to_bytes, count=count, direction=direction)

    def delay(self, seconds: float, count: int | None = 1, direction: Direction | None = None) -> None:
        """Begin so much later. Others pass by, but those of the same batch are reported with it."""
        self._channel.ask("fault", action="delay", value=seconds, count=count, direction=direction)

    def hold(self, count: int | None = 1, direction: Direction | None = None) -> None:
        """Begin after `resume` or `clear`. Others pass by, but those of the same batch are reported with it."""
        self._channel.ask("fault", action="hold", count=count, direction=direction)

    def lose(self, count: int | None = 1, direction: Direction | None = None) -> None:
        """Transfer, and never report it: the entry of the ring is gone for good."""
        self._channel.ask("fault", action="lose", count=count, direction=direction)

    def fail_call(self, call: Call, errno: int, count: int | None = 1) -> None:
        """Let a system call on the mount fail."""
        self._channel.ask("call_fault", call=call, errno=errno, count=count)

    def hang(self) -> None:
        """From now on the daemon takes operations and does nothing with them. The file system goes on."""
        self._channel.ask("hang")

    def resume(self) -> None:
        """Carry out what hangs, and go on."""
        self._channel.ask("resume")

    def until_hanging(self, operations: int) -> None:
        """Wait until so many operations hang."""
        self._wait("until_hanging", operations=operations)

    def until_struck(self, faults: int) -> None:
        """Wait until so many faults have struck since the daemon's start."""
        self._wait("until_struck", faults=faults)

    def until_registered(self, buffers: int, rings: int) -> None:
        """Wait until exactly so many buffers and rings are registered."""
        self._wait("until_registered", buffers=buffers, rings=rings)

    def pace(self, pace: Pace | None) -> None:
        """Answer calls on the mount no faster than this; None: at once."""
        self._channel.ask("pace", **({} if pace is None else asdict(pace)))

    def clear(self) -> None:
        """No more faults, nothing hangs, and nothing is paced."""
        self._channel.ask("clear")

    def statistics(self) -> Statistics:
        return Statistics(**self._channel.ask("statistics"))

    def _wait(self, what: str, **arguments: Any) -> None:
        channel = Channel(self._socket, self.patience_s)  # of its own: other threads may go on asking
        try:
            channel.ask(what, **arguments)
        finally:
            channel.close()
