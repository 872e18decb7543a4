"""HTTP connections that may take so much and no more: of memory, and of a place among few."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 64
"""Connections that are served at a time."""
HEADERS_S = 10.0
"""For the header of a connection's first request; and, after an answer, for that of the next one."""
TAKEN_S = 10.0
"""For a client to take what was written to it."""
SPARED_S = 1.0
"""When all places are taken, who has asked nothing for so long gives his to somebody else."""
HEADER_BYTES = 16 << 10
_AHEAD_BYTES = 256 << 10
"""What a client may send of its next requests before the present one is answered."""


class Connection(H11Protocol):
    """As uvicorn's for h11, which bounds headers and answers one request after another. That one waits without an end for a
    header, for a client to take its answer, and keeps what a client sends ahead."""

    idle_since_s: float | None = None
    """None while a request is being answered."""
    _hang_up: asyncio.TimerHandle | None = None
    _untaken: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > MOST:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._hang_up, self._untaken):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self.idle_since_s = None
            if len(self.conn.trailing_data[0]) > _AHEAD_BYTES:
                self.transport.abort()

    def on_response_complete(self) -> None:
        answered = self.cycle
        self._wait()
        super().on_response_complete()
        if self.cycle is not answered:
            self.idle_since_s = None  # the next one was here already

    def pause_writing(self) -> None:
        super().pause_writing()
        self._untaken = self.loop.call_later(TAKEN_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None

    def _wait(self) -> None:
        """For the next request."""
        self.idle_since_s = self.loop.time()
        if self._hang_up is not None:
            self._hang_up.cancel()
        self._hang_up = self.loop.call_later(HEADERS_S, self._hang_up_if_still, self.cycle)

    def _hang_up_if_still(self, before: Any) -> None:
        if self.cycle is before:
            # Not `close`, which waits for as long as the client does not read.
            self.transport.abort()

    def _make_room(self) -> None:
        """Hang up on who has asked nothing for longest; else on the new one, if there are too many to say so to it."""
        before_s = self.loop.time() - SPARED_S
        connections: set[Any] = self.connections
        idle = [one for one in connections if one.idle_since_s is not None and one.idle_since_s < before_s]
        if idle:
            min(idle, key=lambda one: one.idle_since_s).transport.abort()
        elif len(self.connections) > 2 * MOST:
            self.transport.abort()
