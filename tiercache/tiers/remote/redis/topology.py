"""Which server has a name: the only one, the master that Sentinels name, or the owner of a slot of a cluster.

Called from worker threads. Asking for the topology blocks, by one thread at a time.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, MovedError

from tiercache.tiers.remote.redis.address import Endpoint, RedisAddress
from tiercache.tiers.remote.redis.connector import Connector
from tiercache.tiers.remote.redis.failures import BrokenConnection, Refused

_PAUSE_S = 0.1
"""Between two questions for the topology."""


class Topology(ABC):
    @abstractmethod
    def endpoint_of(self, name: bytes) -> Endpoint:
        """Raises BrokenConnection or Refused when nobody says."""

    def lost(self, endpoint: Endpoint) -> None:  # noqa: B027 - most need not know
        """It does not answer, or is a replica by now."""

    def forwarded(self, to: AskError, sender: Endpoint) -> Endpoint:
        """Where a server says that a name lies."""
        return Endpoint(to.host.strip("[]") or sender.host, to.port)


class OneServer(Topology):
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def endpoint_of(self, name: bytes) -> Endpoint:
        return self._endpoint


class SentinelMaster(Topology):
    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._lock = threading.Lock()
        self._master: Endpoint | None = None
        self._ask_at_s = 0.0
        self._why = ""

    def endpoint_of(self, name: bytes) -> Endpoint:
        master = self._master
        if master is not None:
            return master
        with self._lock:
            if self._master is None:
                if time.monotonic() < self._ask_at_s:
                    raise BrokenConnection(self._why)
                try:
                    self._master = self._connector.master()
                except BrokenConnection as error:
                    self._ask_at_s = time.monotonic() + _PAUSE_S
                    self._why = str(error)
                    raise
            return self._master

    def lost(self, endpoint: Endpoint) -> None:
        if self._master == endpoint:
            self._master = None


class Cluster(Topology):
    """The table of slots, read anew when a server is lost or says that a slot is not its own (any more).

    Not redis-py's `NodesManager`: it is internal to its cluster client (its calls changed between 5 and 8) and keeps
    connections of its own, which `Connector.close` could not shut. Where a slot has no owner it asks all servers, each with
    its own deadline, at each refresh, with no pause between two; and a wrong password, a wrong mode and a server that is
    away are one kind of error. What it would save is reading the table.
    """

    def __init__(self, connector: Connector, address: RedisAddress) -> None:
        self._connector = connector
        self._seeds = address.endpoints
        self._lock = threading.Lock()
        self._owners: list[Endpoint | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._known: list[Endpoint] = []
        self._wrong = True
        self._ask_at_s = 0.0
        self._lost: Endpoint | None = None

    def endpoint_of(self, name: bytes) -> Endpoint:
        if self._wrong and time.monotonic() >= self._ask_at_s:
            with self._lock:
                if self._wrong and time.monotonic() >= self._ask_at_s:
                    self._refresh()
        owner: Endpoint | None = self._owners[key_slot(name)]
        if owner is None:
            raise BrokenConnection("no server of the cluster says who has the slot")
        return owner

    def lost(self, endpoint: Endpoint) -> None:
        self._lost = endpoint
        self._wrong = True

    def forwarded(self, to: AskError, sender: Endpoint) -> Endpoint:
        endpoint = super().forwarded(to, sender)
        if isinstance(to, MovedError):
            self._owners[to.slot_id] = endpoint
            self._wrong = True
        return endpoint

    def _refresh(self) -> None:
        """Ask one server after the other; the one that was lost last."""
        candidates = sorted(dict.fromkeys([*self._known, *self._seeds]), key=lambda place: place == self._lost)
        problem: BrokenConnection | Refused | None = None
        for candidate in candidates:
            try:
                self._read(candidate, self._connector.ask(candidate, "CLUSTER", "SLOTS"))
            except (BrokenConnection, Refused) as error:
                problem = problem or error
                continue
            self._wrong = False
            self._ask_at_s = time.monotonic() + _PAUSE_S
            return
        self._ask_at_s = time.monotonic() + _PAUSE_S
        if problem is not None and not self._known:
            raise problem

    def _read(self, asked: Endpoint, ranges: Iterable[Any]) -> None:
        """[first slot, last slot, [host, port, ...] of the master, replicas...]; an empty host is the one that was asked.

        Raises BrokenConnection for slots that no cluster has.
        """
        owners: list[Endpoint | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, (host, port, *_), *_ in ranges:
            if not 0 <= int(first) <= int(last) < REDIS_CLUSTER_HASH_SLOTS:
                raise BrokenConnection(
                    f"{asked}: CLUSTER SLOTS: expected slots from 0 to {REDIS_CLUSTER_HASH_SLOTS - 1}, "
                    f"found {first} to {last}"
                )
            found = host.decode() if isinstance(host, bytes) else host
            owner = Endpoint(found if found and found != "?" else asked.host, int(port))
            owners[int(first) : int(last) + 1] = [owner] * (int(last) + 1 - int(first))
        self._owners = owners
        self._known = list(dict.fromkeys(owner for owner in owners if owner is not None))


def make_topology(connector: Connector) -> Topology:
    address = connector.address
    if address.mode == "sentinel":
        return SentinelMaster(connector)
    return Cluster(connector, address) if address.mode == "cluster" else OneServer(address.endpoints[0])
