"""Requests to the server that owns a name: topology, pooled connections, redirections, retries. For worker threads."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, MovedError

from tiercache.tiers.remote.redis.address import Endpoint
from tiercache.tiers.remote.redis.connection import (
    ConnectionLost,
    ConnectionTimeout,
    RedisConnection,
    ServerError,
    command,
)
from tiercache.tiers.remote.redis.connector import Connector, SettingRejected

T = TypeVar("T")

_ATTEMPTS = 5
_EXIST_ROUNDS = 2
_REFRESH_INTERVAL_S = 0.1
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0
_IDLE_S = 240.0
"""Connections that were idle for longer are closed: a firewall between may have dropped them."""
_REDIRECTIONS = ("MOVED", "ASK")
_NOT_SERVING = ("READONLY", "MASTERDOWN", "CLUSTERDOWN", "LOADING")
"""Errors of a server that is no master, or not yet one."""
_NO_OWNER = ("", "no server of the cluster owns the slot")


class Topology:
    """The owners of names: one server, the master that the Sentinels name, or a cluster's slot table.

    The table is read again when a server is lost or redirects, by one thread at a time and at most every 100 ms.
    """

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._mode = connector.address.mode
        self._lock = threading.Lock()
        self._owners: list[Endpoint | None] = [None]
        """By slot in a cluster; else one entry."""
        self._lost: Endpoint | None = None
        self._stale = True
        self._refresh_at_s = 0.0
        self._problem = _NO_OWNER
        """The option that the operator must change, if any, and the reason why no owner is known."""
        if self._mode == "cluster":
            self._owners = [None] * REDIS_CLUSTER_HASH_SLOTS
        elif self._mode == "standalone":
            self._owners = [connector.address.endpoints[0]]
            self._stale = False

    def endpoint_of(self, name: bytes) -> Endpoint:
        """Return the owner of `name`. Raises ConnectionLost or SettingRejected when it is unknown."""
        if self._stale:
            with self._lock:
                if self._stale and time.monotonic() >= self._refresh_at_s:
                    self._refresh()
        owner = self._owners[key_slot(name) if self._mode == "cluster" else 0]
        if owner is None:
            option, problem = self._problem
            raise SettingRejected(option, problem) if option else ConnectionLost(problem)
        return owner

    def invalidate(self, endpoint: Endpoint) -> None:
        """Called when a server does not answer, or is no master any more."""
        self._lost = endpoint
        self._stale = self._mode != "standalone"

    def redirected(self, error: ServerError, sender: Endpoint) -> Endpoint:
        """Return the server that a MOVED or ASK reply names. Raises ConnectionLost."""
        try:
            target = (MovedError if error.code == "MOVED" else AskError)(error.text)
        except ValueError:
            raise ConnectionLost(f"not a redirection: {error}") from None
        endpoint = Endpoint(target.host.strip("[]") or sender.host, target.port)
        if self._mode == "cluster" and error.code == "MOVED" and 0 <= target.slot_id < REDIS_CLUSTER_HASH_SLOTS:
            self._owners[target.slot_id] = endpoint
            self._stale = True
        return endpoint

    def _refresh(self) -> None:
        """Read the table. The old one stays in use where that fails."""
        try:
            self._owners = [self._connector.master()] if self._mode == "sentinel" else self._slot_owners()
            self._stale, self._problem = False, _NO_OWNER
        except (ConnectionLost, SettingRejected) as error:
            # The text and not the error, whose traceback would keep the caller's payload alive.
            self._problem = (error.option if isinstance(error, SettingRejected) else "", str(error))
        finally:
            self._refresh_at_s = time.monotonic() + _REFRESH_INTERVAL_S

    def _slot_owners(self) -> list[Endpoint | None]:
        """Ask one server after the other, the lost one last."""
        known = [owner for owner in dict.fromkeys(self._owners) if owner is not None]
        candidates = dict.fromkeys([*known, *self._connector.address.endpoints])
        problem: ConnectionLost | SettingRejected | None = None
        for candidate in sorted(candidates, key=lambda endpoint: endpoint == self._lost):
            try:
                return _slot_owners_of(candidate, self._connector.ask(candidate, "CLUSTER", "SLOTS"))
            except (ConnectionLost, SettingRejected) as error:
                problem = problem or error
        assert problem is not None
        raise problem


def _slot_owners_of(asked: Endpoint, ranges: Any) -> list[Endpoint | None]:
    """Return the owners by slot from an answer to CLUSTER SLOTS. Raises ConnectionLost for slots that no cluster has."""
    owners: list[Endpoint | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    # [first slot, last slot, [host, port, ...] of the master, replicas...]; an empty host is the server that was asked.
    for first, last, (host, port, *_), *_ in ranges:
        if not 0 <= int(first) <= int(last) < REDIS_CLUSTER_HASH_SLOTS:
            raise ConnectionLost(
                f"{asked}: CLUSTER SLOTS: expected slots from 0 to {REDIS_CLUSTER_HASH_SLOTS - 1}, found {first} to {last}"
            )
        found = host.decode() if isinstance(host, bytes) else host
        owner = Endpoint(found if found and found != "?" else asked.host, int(port))
        owners[int(first) : int(last) + 1] = [owner] * (int(last) + 1 - int(first))
    return owners


@dataclass
class _ServerState:
    idle: list[RedisConnection] = field(default_factory=list)
    lost: bool = False
    failures: int = 0
    retry_at_s: float = 0.0
    problem: str = ""


class ConnectionPool:
    """Connections by server, at most as many to each as there are threads. Methods may be called from any thread.

    A server that cannot be connected to is tried again after an exponential backoff with jitter; until then `take` fails at
    once.
    """

    def __init__(self, connector: Connector) -> None:
        self.losses = 0
        """Grows when a server is lost and when it is back: what was known of its contents may be wrong."""
        self._connector = connector
        self._lock = threading.Lock()
        self._servers: dict[Endpoint, _ServerState] = {}
        self._busy: set[RedisConnection] = set()
        self._closed = False

    def take(self, endpoint: Endpoint) -> RedisConnection:
        """Return a connection that is the caller's until `give`. Blocks while it connects.

        Raises ConnectionLost or SettingRejected.
        """
        expired: list[RedisConnection] = []
        with self._lock:
            if self._closed:
                raise ConnectionLost("the tier is closed")
            server = self._servers.setdefault(endpoint, _ServerState())
            if server.idle and server.idle[-1].idle_since_s < time.monotonic() - _IDLE_S:
                expired, server.idle = server.idle, []
            connection = server.idle.pop() if server.idle else None
            if connection is not None:
                connection.reused = True
                self._busy.add(connection)
            elif time.monotonic() < server.retry_at_s:
                raise ConnectionLost(server.problem)
        for old in expired:
            old.close()
        if connection is None:
            connection = self._connect(endpoint, server)
        connection.renew()
        return connection

    def give(self, connection: RedisConnection) -> None:
        """Put a connection back, or close it if it cannot be used again."""
        connection.asking = False
        connection.idle_since_s = time.monotonic()
        with self._lock:
            self._busy.discard(connection)
            keep = connection.reusable and not self._closed
            if keep:
                self._servers.setdefault(connection.endpoint, _ServerState()).idle.append(connection)
        if not keep:
            connection.close()

    def invalidate(self, endpoint: Endpoint) -> None:
        """Close the idle connections to a server that was lost."""
        with self._lock:
            server = self._servers.setdefault(endpoint, _ServerState())
            idle, server.idle = server.idle, []
            server.lost = True
            self.losses += 1
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Make threads that wait for a server fail now. Idempotent; does not block."""
        with self._lock:
            self._closed = True
            idle = [connection for server in self._servers.values() for connection in server.idle]
            self._servers.clear()
            for connection in self._busy:
                connection.interrupt()
        for connection in idle:
            connection.close()

    @property
    def open_connections(self) -> int:
        with self._lock:
            return len(self._busy) + sum(len(server.idle) for server in self._servers.values())

    def _connect(self, endpoint: Endpoint, server: _ServerState) -> RedisConnection:
        try:
            connection = RedisConnection(self._connector.connect(endpoint), endpoint, self._connector.timeout_s)
        except (ConnectionLost, SettingRejected) as error:
            with self._lock:
                backoff_s = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(server.failures, 10))
                server.failures += 1
                server.retry_at_s = time.monotonic() + backoff_s * random.uniform(0.5, 1.0)
                server.problem = str(error)
                server.lost = True
                self.losses += 1
            raise
        with self._lock:
            if not self._closed:
                server.failures, server.retry_at_s = 0, 0.0
                self.losses += server.lost
                server.lost = False
                self._busy.add(connection)
                return connection
        connection.close()
        raise ConnectionLost("the tier is closed")


class Servers:
    """Run requests on the server that owns a name. Methods block, and may be called from any thread.

    They raise ConnectionLost, SettingRejected or ServerError.
    """

    def __init__(self, connector: Connector) -> None:
        self.pool = ConnectionPool(connector)
        self._connector = connector
        self._topology = Topology(connector)

    def close(self) -> None:
        """Make threads that wait for a server fail now. Idempotent."""
        self._connector.close()
        self.pool.close()

    def run(self, name: bytes, exchange: Callable[[RedisConnection], T]) -> T:
        """Return the result of `exchange` on a connection to the owner of `name`.

        `exchange` runs again after a redirection, after a reused connection is lost, and once where the server is no master
        any more. It reads all replies that it requested before it raises ServerError.
        """
        endpoint = self._topology.endpoint_of(name)
        asking = refreshed = False
        attempts_left = _ATTEMPTS
        while True:
            attempts_left -= 1
            connection = self._take(endpoint)
            connection.asking, asking = asking, False
            try:
                return exchange(connection)
            except ConnectionLost as error:
                self._invalidate(endpoint)
                if not attempts_left or not _worth_repeating(connection, error):
                    raise
                endpoint = self._topology.endpoint_of(name)
            except ServerError as error:
                if attempts_left and error.code in _REDIRECTIONS:
                    endpoint = self._topology.redirected(error, endpoint)
                    asking = error.code == "ASK"
                    continue
                if error.code in _NOT_SERVING:
                    self._invalidate(endpoint)
                if refreshed or error.code not in _NOT_SERVING:
                    raise
                refreshed = True
                endpoint = self._topology.endpoint_of(name)
            finally:
                self.pool.give(connection)

    def exist(self, names: Sequence[bytes]) -> list[bool]:
        """Return for each name if it exists. All servers are asked at once, with one send each.

        Names of a server that does not answer do not exist. Raises only when no server answers.
        """
        found: dict[int, bool] = {}
        problem: Exception | None = None
        positions = list(range(len(names)))
        for _ in range(_EXIST_ROUNDS):
            if positions:
                positions, problem = self._ask_existence(names, positions, found)
        for position in positions:
            try:
                found[position] = self.run(names[position], partial(_exists, name=names[position]))
            except (ConnectionLost, SettingRejected, ServerError) as error:
                problem = error
        if problem is not None and not found:
            raise problem
        return [found.get(position, False) for position in range(len(names))]

    def check(self, name: bytes) -> None:
        """Find out if the settings are right for the owner of `name`. Raises SettingRejected if they are not."""
        endpoint = self._topology.endpoint_of(name)
        connection = self.pool.take(endpoint)
        try:
            with contextlib.suppress(ServerError):
                connection.request(command(b"INFO", b"server"))
                self._check_mode(endpoint, connection.reply())
            _exists(connection, name)
        except ServerError as error:
            if error.code == "NOAUTH":
                raise SettingRejected("password", f"{endpoint} wants one") from None
            if error.code == "NOPERM":
                raise SettingRejected("username", f"the user may not use {name.decode()}: {error}") from None
            if error.code not in _REDIRECTIONS:
                raise
        finally:
            self.pool.give(connection)

    def _check_mode(self, endpoint: Endpoint, info: Any) -> None:
        info = info if isinstance(info, bytes) else b""
        is_cluster, is_sentinel = b"_mode:cluster" in info, b"_mode:sentinel" in info
        expected = self._connector.address.mode
        if is_cluster and expected == "standalone":
            problem = "is part of a cluster; expected mode: cluster, or redis-cluster:// in the URL"
            raise SettingRejected("mode", f"{endpoint} {problem}")
        if is_cluster and expected == "sentinel":
            problem = "is part of a cluster, which has no Sentinels; expected redis-cluster://"
            raise SettingRejected("url", f"{endpoint} {problem}")
        if is_sentinel:
            raise SettingRejected("url", f"{endpoint} is a Sentinel; expected redis-sentinel:// in the URL")

    def _ask_existence(
        self, names: Sequence[bytes], positions: Sequence[int], found: dict[int, bool]
    ) -> tuple[list[int], Exception | None]:
        """Add answers to `found`. Return the positions to ask about again, and a problem."""
        groups: dict[Endpoint, list[int]] = {}
        asked: list[tuple[RedisConnection, list[int]]] = []
        again: list[int] = []
        problem: Exception | None = None
        try:
            for position in positions:
                try:
                    groups.setdefault(self._topology.endpoint_of(names[position]), []).append(position)
                except (ConnectionLost, SettingRejected) as error:
                    problem = error
            for endpoint, members in groups.items():
                try:
                    connection = self._take(endpoint)
                except (ConnectionLost, SettingRejected) as error:
                    problem = error
                    continue
                asked.append((connection, members))
                try:
                    frames = b"".join([command(b"EXISTS", names[member]) for member in members])
                    connection.request(frames, replies=len(members))
                except ConnectionLost:
                    connection.interrupt()  # `reply` raises for it.
            for connection, members in asked:
                for index, member in enumerate(members):
                    try:
                        found[member] = connection.reply() == 1
                    except ServerError as error:
                        if error.code in _REDIRECTIONS:
                            self._topology.redirected(error, connection.endpoint)
                            again.append(member)
                        else:
                            problem = error
                    except ConnectionLost as error:
                        self._invalidate(connection.endpoint)
                        if _worth_repeating(connection, error):
                            again += members[index:]
                        else:
                            problem = error
                        break
        finally:
            for connection, _ in asked:
                self.pool.give(connection)
        return again, problem

    def _take(self, endpoint: Endpoint) -> RedisConnection:
        try:
            return self.pool.take(endpoint)
        except (ConnectionLost, SettingRejected):
            self._topology.invalidate(endpoint)
            raise

    def _invalidate(self, endpoint: Endpoint) -> None:
        self.pool.invalidate(endpoint)
        self._topology.invalidate(endpoint)


def _worth_repeating(connection: RedisConnection, error: ConnectionLost) -> bool:
    """Return True if the server may have restarted while the connection was idle."""
    return connection.reused and not isinstance(error, ConnectionTimeout)


def _exists(connection: RedisConnection, name: bytes) -> bool:
    connection.request(command(b"EXISTS", name))
    return connection.reply() == 1
