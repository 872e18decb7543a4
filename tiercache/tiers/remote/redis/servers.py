"""Requests to whichever server has a name: redirections followed, stale connections replaced, all else a clean failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from tiercache.errors import TierUnavailable
from tiercache.tiers.remote.redis.address import Endpoint
from tiercache.tiers.remote.redis.channel import Channel
from tiercache.tiers.remote.redis.connector import Connector
from tiercache.tiers.remote.redis.failures import (
    BrokenConnection,
    Refused,
    Scattered,
    ServerError,
    TooSlow,
    failure,
    redirection,
)
from tiercache.tiers.remote.redis.pool import ConnectionPool
from tiercache.tiers.remote.redis.topology import Topology

T = TypeVar("T")

_ATTEMPTS = 6
_TRY_AGAIN_S = 0.02
_GONE = ("READONLY", "MASTERDOWN", "CLUSTERDOWN", "LOADING")
"""Answers of servers that are not (yet, any more) what they should be."""


class Servers:
    """Blocks; for worker threads. Each attempt takes a bounded time, and there are few."""

    def __init__(self, name: str, connector: Connector, topology: Topology) -> None:
        self.name = name
        self.topology = topology
        self._connector = connector
        timeout_s = connector.timeout_s
        self.pool = ConnectionPool(name, lambda endpoint: Channel(connector.connect(endpoint), endpoint, timeout_s))
        self._closing = threading.Event()

    def close(self) -> None:
        self._closing.set()
        self._connector.close()
        self.pool.close()

    def run(self, name: bytes, exchange: Callable[[Channel], T], *, several: bool = False) -> T:
        """What `exchange` returns, on a connection to the server of `name`. It may be called again, on another one.

        `exchange` lets ServerErrors pass once it has read the replies of all that it asked. Those that are not about the
        whereabouts of `name` end up in the caller's hands. `several`: it is about several names of a slot; Scattered is
        raised when they no longer lie together. Raises TierUnavailable.
        """
        target: Endpoint | None = None
        asking = False
        problem: Exception | None = None
        for attempt in range(_ATTEMPTS):
            endpoint = target or self.endpoint_of(name)
            target, was_asking, asking = None, asking, False
            channel = self.take(endpoint)
            channel.asking = was_asking
            stale = channel.used
            try:
                return exchange(channel)
            except BrokenConnection as error:
                self.lost(endpoint)
                problem = error
                if not stale or isinstance(error, TooSlow):
                    break
            except ServerError as error:
                problem = error
                if several and error.code in ("ASK", "TRYAGAIN"):
                    raise Scattered from None
                if error.code in ("MOVED", "ASK"):
                    target = self.topology.forwarded(redirection(error), endpoint)
                    asking = error.code == "ASK"
                elif error.code == "TRYAGAIN":
                    self._closing.wait(_TRY_AGAIN_S * (attempt + 1))
                elif error.code in _GONE:
                    # Another one may be the master by now; without such knowledge there is nothing to ask again.
                    self.lost(endpoint)
                    if attempt or error.code == "LOADING":
                        break
                else:
                    raise
            finally:
                self.pool.give(channel)
        if isinstance(problem, ServerError):
            raise failure(self.name, endpoint, problem) from None
        raise TierUnavailable(f"{self.name}: {problem}") from problem

    def endpoint_of(self, name: bytes) -> Endpoint:
        """Raises TierUnavailable."""
        try:
            return self.topology.endpoint_of(name)
        except (BrokenConnection, Refused) as error:
            raise TierUnavailable(f"{self.name}: {error}") from None

    def take(self, endpoint: Endpoint) -> Channel:
        """A connection, to be given back to the pool. Raises TierUnavailable."""
        try:
            return self.pool.take(endpoint)
        except (BrokenConnection, Refused) as error:
            self.topology.lost(endpoint)
            raise TierUnavailable(f"{self.name}: {error}") from None

    def lost(self, endpoint: Endpoint) -> None:
        self.pool.lost(endpoint)
        self.topology.lost(endpoint)
