"""HTTP connections that are given up when no request comes: half a header must not hold one of few places for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADERS_S = 10.0
"""For the header of a connection's first request; and, after an answer, for that of the next one."""


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """As uvicorn's, which waits for headers without an end."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def _wait(self) -> None:
        asyncio.get_running_loop().call_later(HEADERS_S, self._hang_up_if_still, self.cycle)

    def _hang_up_if_still(self, before: Any) -> None:
        if self.cycle is before:
            self.transport.close()
