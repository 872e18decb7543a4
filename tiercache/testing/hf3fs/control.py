"""Faults, as a test causes them while the daemon runs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tiercache.testing.hf3fs.channel import Channel
from tiercache.testing.hf3fs.statistics import Statistics

Direction = Literal["read", "write"]


class Control:
    """Faults strike operations in the order in which the daemon claims them, the oldest fault that applies first.

    `count` operations are struck, all until `clear` when it is None; of one `direction`, or of both when it is None.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._channel = Channel(socket)

    def close(self) -> None:
        self._channel.close()

    def fail(self, errno: int, count: int | None = 1, direction: Direction | None = None) -> None:
        """Complete with -errno; nothing is transferred."""
        self._channel.ask("fault", action="errno", value=errno, count=count, direction=direction)

    def shorten(self, to_bytes: int, count: int | None = 1, direction: Direction | None = None) -> None:
        """Transfer `to_bytes` at most, and say so."""
        self._channel.ask("fault", action="short", value=to_bytes, count=count, direction=direction)

    def delay(self, seconds: float, count: int | None = 1, direction: Direction | None = None) -> None:
        """Begin so much later. Others pass by, but those of the same batch are reported with it."""
        self._channel.ask("fault", action="delay", value=seconds, count=count, direction=direction)

    def lose(self, count: int | None = 1, direction: Direction | None = None) -> None:
        """Transfer, and never report it: the entry of the ring is gone for good."""
        self._channel.ask("fault", action="lose", count=count, direction=direction)

    def hang(self) -> None:
        """From now on the daemon takes operations and does nothing with them. The file system goes on."""
        self._channel.ask("hang")

    def resume(self) -> None:
        """Carry out what hangs, and go on."""
        self._channel.ask("resume")

    def until_hanging(self, operations: int) -> None:
        """Wait until so many operations hang. On a connection of its own: other threads may go on asking."""
        channel = Channel(self._socket)
        try:
            channel.ask("until_hanging", operations=operations)
        finally:
            channel.close()

    def clear(self) -> None:
        """No more faults, and nothing hangs."""
        self._channel.ask("clear")

    def statistics(self) -> Statistics:
        return Statistics(**self._channel.ask("statistics"))
