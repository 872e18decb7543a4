"""HTTP connections that may take so much and no more: of memory, and of a place among few."""

from __future__ import annotations

import asyncio
import heapq
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 128
"""Connections that are served at a time. A new one takes the place of the one that has said nothing for longest."""
_MORE = 64
"""Of connections on top of these, when all are being answered: they are told so."""
HEADERS_S = 10.0
"""For the header of a connection's first request; and, after an answer, for that of the next one."""
TAKEN_S = 10.0
"""For a client to take what was written to it."""
HEADER_BYTES = 16 << 10
_AHEAD_BYTES = 256 << 10
"""What a client may send of its next requests before the present one is answered."""


class Connection(H11Protocol):
    """As uvicorn's for h11, which bounds headers and answers one request after another. That one waits without an end for a
    header, for a client to take its answer, and keeps what a client sends ahead."""

    idle_since_s: float | None = None
    """Since when it says nothing of what we wait for: a request, or the rest of one. None while one is being answered."""
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
        # uvicorn's own limit counts tasks, too, and those of aborted connections end a little later. At 0 it answers 503.
        self.limit_concurrency = 0 if len(self.connections) > MOST else None
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self.idle_since_s = self.loop.time() if self.cycle.more_body else None
            if len(self.conn.trailing_data[0]) > _AHEAD_BYTES:
                self.transport.abort()

    def on_response_complete(self) -> None:
        answered = self.cycle
        self._wait()
        super().on_response_complete()
        if self.cycle is not answered:
            self.idle_since_s = self.loop.time() if self.cycle.more_body else None  # the next one was here already

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
        """Abort as many connections as are too many, the longest silent first; else the new one, if there are too many to
        tell it so."""
        connections: set[Any] = self.connections
        silent = [one for one in connections if one.idle_since_s is not None and one is not self]
        for one in heapq.nsmallest(len(connections) - MOST, silent, key=lambda one: one.idle_since_s):
            connections.discard(one)  # not counted until its end is noticed
            one.transport.abort()
        if len(connections) > MOST + _MORE:
            connections.discard(self)
            self.transport.abort()
