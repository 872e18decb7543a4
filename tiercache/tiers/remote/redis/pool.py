"""Connections that are not in use, by server; and what is known of servers that went away."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tiercache.errors import TierUnavailable
from tiercache.tiers.remote.redis.address import Endpoint
from tiercache.tiers.remote.redis.channel import Channel
from tiercache.tiers.remote.redis.failures import BrokenConnection, Refused

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_IDLE_S = 240.0
"""Connections that nobody used for so long are closed rather than used: what lies between may have forgotten them."""


@dataclass
class _Place:
    """One server."""

    idle: list[Channel] = field(default_factory=list)
    lost: bool = False
    failures: int = 0
    retry_at_s: float = 0.0
    why: str = ""


class ConnectionPool:
    """Connections are made when a thread needs one, and a thread needs one of each server at a time: no more than there are
    threads are ever open to a server. All methods may be called from any thread; `take` blocks while it connects.

    After a connection could not be made the next one is tried after a pause that doubles, with some chance in it so that
    many caches do not come back to a server at the same moment; in between `take` fails at once.
    """

    def __init__(self, name: str, connect: Callable[[Endpoint], Channel]) -> None:
        self.name = name
        self.losses = 0
        """Grows when a server was lost and when it is there again: what was known of its contents may be wrong."""
        self._connect = connect
        self._lock = threading.Lock()
        self._places: dict[Endpoint, _Place] = {}
        self._busy: set[Channel] = set()
        self._closed = False

    def take(self, endpoint: Endpoint) -> Channel:
        """A connection of this thread's own, until `give`. Raises TierUnavailable, BrokenConnection or Refused."""
        with self._lock:
            self._check_open()
            place = self._places.setdefault(endpoint, _Place())
            stale = self._take_stale(place)
            channel = place.idle.pop() if place.idle else None
            if channel is not None:
                channel.used = True
                self._busy.add(channel)
            elif time.monotonic() < place.retry_at_s:
                raise TierUnavailable(f"{self.name}: {place.why}")
        for old in stale:
            old.close()
        if channel is None:
            channel = self._new(endpoint, place)
        channel.renew()
        return channel

    def give(self, channel: Channel) -> None:
        """Back, whatever became of it."""
        channel.asking = False
        channel.idle_since_s = time.monotonic()
        with self._lock:
            self._busy.discard(channel)
            keep = channel.clean and not self._closed
            if keep:
                self._places.setdefault(channel.endpoint, _Place()).idle.append(channel)
        if not keep:
            channel.close()

    def lost(self, endpoint: Endpoint) -> None:
        """A connection to it broke: the others that are idle are not worth a try."""
        with self._lock:
            place = self._places.setdefault(endpoint, _Place())
            idle, place.idle = place.idle, []
            place.lost = True
            self.losses += 1
        for channel in idle:
            channel.close()

    def close(self) -> None:
        """Whoever waits for a server fails now. Idempotent; blocks no longer than closing sockets takes."""
        with self._lock:
            self._closed = True
            idle = [channel for place in self._places.values() for channel in place.idle]
            self._places.clear()
            for channel in self._busy:
                channel.interrupt()
        for channel in idle:
            channel.close()

    @property
    def open_connections(self) -> int:
        with self._lock:
            return len(self._busy) + sum(len(place.idle) for place in self._places.values())

    def _new(self, endpoint: Endpoint, place: _Place) -> Channel:
        try:
            channel = self._connect(endpoint)
        except (BrokenConnection, Refused) as error:
            with self._lock:
                pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(place.failures, 10))
                place.failures += 1
                place.retry_at_s = time.monotonic() + pause_s * random.uniform(0.5, 1.0)
                place.why = str(error)
                place.lost = True
                self.losses += 1
            raise
        with self._lock:
            closed = self._closed
            if not closed:
                place.failures, place.retry_at_s = 0, 0.0
                self.losses += place.lost
                place.lost = False
                self._busy.add(channel)
        if closed:
            channel.close()
            raise TierUnavailable(f"{self.name} is closed")
        return channel

    def _take_stale(self, place: _Place) -> list[Channel]:
        oldest_s = time.monotonic() - _IDLE_S
        stale = [channel for channel in place.idle if channel.idle_since_s < oldest_s]
        if stale:
            place.idle = [channel for channel in place.idle if channel.idle_since_s >= oldest_s]
        return stale

    def _check_open(self) -> None:
        if self._closed:
            raise TierUnavailable(f"{self.name} is closed")
