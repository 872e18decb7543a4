"""Requests to the server that owns a name: topology, pooled connections, redirections, retries. For worker threads.

redis-py makes the connections (TCP, TLS, Unix sockets, logins) and asks the Sentinels.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import redis
import redis.backoff
import redis.connection
import redis.retry
import redis.sentinel
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, MovedError

from tiercache.tiers.remote.base import RemoteSettings
from tiercache.tiers.remote.redis.address import Endpoint, RedisAddress
from tiercache.tiers.remote.redis.connection import (
    ConnectionLost,
    ConnectionTimeout,
    RedisConnection,
    ServerError,
    command,
)

T = TypeVar("T")

_ATTEMPTS = 5
_REFRESH_INTERVAL_S = 0.1
_ASKED = 4
"""Servers of a cluster that are asked for the table of owners at a time, so that each has enough of the timeout."""
_BACKOFF = redis.backoff.EqualJitterBackoff(cap=2.0, base=0.05)
_KEEPALIVE_S = 60
"""Idle seconds after which the kernel probes a connection, so that no firewall drops it."""
_REDIRECTIONS = ("MOVED", "ASK")
_NOT_SERVING = ("READONLY", "MASTERDOWN", "CLUSTERDOWN", "LOADING")
"""Errors of a server that is not a master, or not yet."""
_NO_FILE = (None, "NO_CERTIFICATE_OR_CRL_FOUND")
"""OpenSSL's reasons if a configured file is not a certificate."""
_NO_OWNER = ("", "no server of the cluster owns the slot")


class SettingRejected(Exception):
    """A setting is wrong and the operator must change it, such as a password or a scheme. Never holds secrets."""

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(problem)
        self.option = option
        self.problem = problem


@dataclass
class _Server:
    idle: list[RedisConnection] = field(default_factory=list)
    failures: int = 0
    retry_at_s: float = 0.0
    problem: str = ""


class ConnectionPool:
    """Connections by server, at most as many to each as there are threads.

    A failed connection is retried after an exponential backoff with jitter; until then `take` fails at once. Methods
    may be called from any thread, and all but `give` and `close` block. They raise SettingRejected if the operator must
    change a setting, and ConnectionLost for temporary problems.
    """

    def __init__(self, address: RedisAddress, settings: RemoteSettings) -> None:
        self.address = address
        self.timeout_s = settings.timeout_s
        self._lock = threading.Lock()
        self._servers: dict[Endpoint, _Server] = {}
        self._closed = False
        options = settings.options
        self._common: dict[str, Any] = {
            "socket_timeout": settings.timeout_s,
            "socket_connect_timeout": float(options.get("connect_timeout_s") or 5.0),
            "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),
        }
        self._login: dict[str, Any] = {
            "username": address.username,
            "password": address.password,
            "db": address.database,
            "protocol": 2,
        }
        self._network: dict[str, Any] = {
            "socket_keepalive": True,
            "socket_keepalive_options": {socket.TCP_KEEPIDLE: _KEEPALIVE_S, socket.TCP_KEEPINTVL: _KEEPALIVE_S},
        }
        if address.tls:
            verify = bool(options.get("tls_verify", True))
            self._network |= {
                "ssl_cert_reqs": "required" if verify else "none",
                "ssl_check_hostname": verify,
                "ssl_ca_certs": options.get("tls_ca_file"),
                "ssl_certfile": options.get("tls_cert_file"),
                "ssl_keyfile": options.get("tls_key_file"),
            }

    def take(self, endpoint: Endpoint) -> RedisConnection:
        """Return a connection for exclusive use until `give`."""
        with self._lock:
            server = self._servers.setdefault(endpoint, _Server())
            connection = server.idle.pop() if server.idle else None
            if connection is None and time.monotonic() < server.retry_at_s:
                raise ConnectionLost(server.problem)
        if connection is None:
            return self._connect(endpoint, server)
        connection.reused = True
        connection.renew()
        return connection

    def has_idle(self, endpoint: Endpoint) -> bool:
        """Return True if `take` need not connect."""
        with self._lock:
            server = self._servers.get(endpoint)
            return server is not None and bool(server.idle)

    def give(self, connection: RedisConnection) -> None:
        """Put a connection back, or close it if it cannot be used again."""
        connection.asking = False
        with self._lock:
            keep = connection.reusable and not self._closed
            if keep:
                self._servers.setdefault(connection.endpoint, _Server()).idle.append(connection)
        if not keep:
            connection.close()

    def ask(self, endpoint: Endpoint, timeout_s: float, *words: str) -> Any:
        """Return the answer to a command, on a separate connection, each step of which may take `timeout_s`."""
        with self._in_use(endpoint, self._within(timeout_s)) as connection:
            connection.send_command(*words)
            answer = connection.read_response()
            connection.disconnect()
            return answer

    def master(self) -> Endpoint:
        """Return the master that the Sentinels name. They are asked one after another, and share the timeout."""
        sentinels = redis.sentinel.Sentinel(
            [(endpoint.host, endpoint.port) for endpoint in self.address.endpoints],
            sentinel_kwargs=self._within(self.timeout_s / len(self.address.endpoints))
            | self._network
            | {"password": self.address.sentinel_password, "ssl": self.address.tls},
        )
        try:
            host, port = sentinels.discover_master(self.address.service)
        except redis.sentinel.MasterNotFoundError as error:
            # redis-py has the errors of the Sentinels only as text.
            if str(error).count("AuthenticationError") == len(self.address.endpoints):
                raise SettingRejected("sentinel_password", "no Sentinel accepts it") from None
            raise ConnectionLost(f"no Sentinel knows a master of {self.address.service!r} that is up") from None
        except (redis.RedisError, OSError) as error:
            raise self._explained(self.address.endpoints[0], error) from None
        finally:
            for sentinel in sentinels.sentinels:
                with contextlib.suppress(redis.RedisError, OSError):
                    sentinel.connection_pool.disconnect()
        return Endpoint(host, int(port))

    def invalidate(self, endpoint: Endpoint) -> None:
        """Close the idle connections to a server that was lost."""
        with self._lock:
            server = self._servers.setdefault(endpoint, _Server())
            idle, server.idle = server.idle, []
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Close the idle connections. Those in use are closed by `give`, at their deadlines at the latest."""
        with self._lock:
            self._closed = True
            idle = [connection for server in self._servers.values() for connection in server.idle]
            self._servers.clear()
        for connection in idle:
            connection.close()

    def _connect(self, endpoint: Endpoint, server: _Server) -> RedisConnection:
        try:
            with self._in_use(endpoint, self._common) as raw:
                connection = RedisConnection(raw, endpoint, self.timeout_s)
        except (ConnectionLost, SettingRejected) as error:
            with self._lock:
                server.retry_at_s = time.monotonic() + _BACKOFF.compute(min(server.failures, 10))
                server.failures += 1
                server.problem = str(error)
            raise
        with self._lock:
            server.failures, server.retry_at_s = 0, 0.0
        return connection

    def _within(self, timeout_s: float) -> dict[str, Any]:
        """Return the common options of a connection, with a shorter timeout."""
        connect_s = min(timeout_s, self._common["socket_connect_timeout"])
        return self._common | {"socket_timeout": timeout_s, "socket_connect_timeout": connect_s}

    @contextlib.contextmanager
    def _in_use(self, endpoint: Endpoint, common: dict[str, Any]) -> Iterator[Any]:
        """Yield a redis-py connection that is logged in and has its database selected. Closes it if the block fails."""
        kind = redis.connection.SSLConnection if self.address.tls else redis.connection.Connection
        if endpoint.path:
            raw: Any = redis.connection.UnixDomainSocketConnection(path=endpoint.path, **common, **self._login)
        else:
            raw = kind(host=endpoint.host, port=endpoint.port, **common, **self._login, **self._network)
        if self._closed:
            raise ConnectionLost("the tier is closed")
        try:
            raw.connect()
            yield raw
        except (redis.RedisError, OSError) as error:
            raw.disconnect()
            raise self._explained(endpoint, error) from None

    def _explained(self, endpoint: Endpoint, error: Exception) -> SettingRejected | ConnectionLost:
        # Servers repeat the beginning of a command that they do not know, never a password.
        text = str(error).partition(", with args beginning with")[0][:200]
        if isinstance(error, redis.AuthenticationError):
            option = "password" if self.address.password is not None or not self.address.username else "username"
            return SettingRejected(option, f"{endpoint} does not accept it: {text}")
        if isinstance(error, redis.exceptions.NoPermissionError):
            return SettingRejected("username", f"the user may not do what a cache needs: {text}")
        if isinstance(error, redis.exceptions.InvalidResponse):
            return SettingRejected("url", f"what answers at {endpoint} is not a Redis server")
        if isinstance(error, redis.ResponseError):
            if "DB index" in text:
                return SettingRejected("database", f"{endpoint} has no database {self.address.database}")
            if "cluster support disabled" in text:
                return SettingRejected(
                    "mode", f"{endpoint} is not part of a cluster; expected mode: standalone, or redis://"
                )
            if "unknown command" in text:
                return SettingRejected("url", f"{endpoint} is not what the URL says: {text}")
            return ConnectionLost(f"{endpoint} answers: {text}")
        if isinstance(error, (redis.TimeoutError, TimeoutError)):
            return ConnectionTimeout(f"{endpoint} does not answer")
        tls = _cause(error, ssl.SSLError)
        if isinstance(tls, ssl.SSLCertVerificationError):
            return SettingRejected("tls_ca_file", f"the certificate of {endpoint} is not trusted: {tls.verify_message}")
        if type(tls) is ssl.SSLError and (tls.reason in _NO_FILE or tls.library in ("PEM", "X509")):
            problem = "tls_ca_file, tls_cert_file or tls_key_file is not PEM, or they do not belong together"
            return SettingRejected("tls_ca_file", problem)
        if isinstance(tls, ssl.SSLError) and tls.reason:
            return ConnectionLost(f"{endpoint}: TLS: {tls.reason}")
        if self.address.tls and not endpoint.path and _cause(error, FileNotFoundError) is not None:
            return SettingRejected("tls_ca_file", "one of tls_ca_file, tls_cert_file and tls_key_file is not there")
        return ConnectionLost(f"{endpoint} cannot be reached: {text}")


def _cause(error: BaseException | None, kind: type[BaseException]) -> Any:
    """Return the first of the causes of `error` that is of `kind`, or None."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


class Servers:
    """Runs requests on the server that owns a name: a single server, the Sentinels' master, or a cluster's owner.

    A thread reads the table of owners again when a server is lost or redirects, at most every 100 ms. Methods block,
    and may be called from any thread. They raise ConnectionLost, SettingRejected or ServerError.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool
        self._mode = pool.address.mode
        self._lock = threading.Lock()
        self._owners: list[Endpoint | None] = [None]
        """Owners by slot in a cluster; otherwise a single entry."""
        self._failed_s: dict[Endpoint, float] = {}
        """When each server was last lost or gave no table."""
        self._stale = True
        self._refresh_at_s = 0.0
        self._problem = _NO_OWNER
        """The option that the operator must change, if any, and the reason why no owner is known."""
        if self._mode == "cluster":
            self._owners = [None] * REDIS_CLUSTER_HASH_SLOTS
        elif self._mode == "standalone":
            self._owners = [pool.address.endpoints[0]]
            self._stale = False

    def run(self, name: bytes, exchange: Callable[[RedisConnection], T]) -> T:
        """Return the result of `exchange` on a connection to the owner of `name`.

        `exchange` runs again after a redirection, after a reused connection is lost, and once if the server is no
        longer a master. It must read all replies that it requested before it raises ServerError.
        """
        endpoint = self._owner(name)
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
                endpoint = self._owner(name)
            except ServerError as error:
                if attempts_left and error.code in _REDIRECTIONS:
                    endpoint = self._redirected(error, endpoint)
                    asking = error.code == "ASK"
                    continue
                if error.code in _NOT_SERVING:
                    self._invalidate(endpoint)
                if refreshed or error.code not in _NOT_SERVING:
                    raise
                refreshed = True
                endpoint = self._owner(name)
            finally:
                self.pool.give(connection)

    def exist(self, names: Sequence[bytes]) -> list[bool]:
        """Return a flag per name, True if it exists. All servers are asked at once, with one send each.

        Names of a server that does not answer count as missing, and those of servers that are still to be connected when
        connecting to others has taken the timeout. Raises only if no server answers.
        """
        found: dict[int, bool] = {}
        again: list[int] = []
        problem: Exception | None = None
        groups: dict[Endpoint, list[int]] = {}
        asked: list[tuple[RedisConnection, list[int]]] = []
        for position, name in enumerate(names):
            try:
                groups.setdefault(self._owner(name), []).append(position)
            except (ConnectionLost, SettingRejected) as error:
                problem = error
        try:
            deadline_s = time.monotonic() + self.pool.timeout_s
            for endpoint in sorted(groups, key=self.pool.has_idle, reverse=True):
                if time.monotonic() >= deadline_s:
                    break
                members = groups[endpoint]
                try:
                    asked.append((self._take(endpoint), members))
                    frames = b"".join([command(b"EXISTS", names[member]) for member in members])
                    with contextlib.suppress(ConnectionLost):  # `reply` raises it, too
                        asked[-1][0].request(frames, replies=len(members))
                except (ConnectionLost, SettingRejected) as error:
                    problem = error
            for connection, members in asked:
                for index, member in enumerate(members):
                    try:
                        found[member] = connection.reply() == 1
                    except ServerError as error:
                        if error.code in _REDIRECTIONS:
                            again.append(member)
                        else:
                            problem = error
                    except ConnectionLost as error:
                        self._invalidate(connection.endpoint)
                        problem = error
                        if _worth_repeating(connection, error):
                            again += members[index:]
                        break
        finally:
            for connection, _ in asked:
                self.pool.give(connection)
        for position in again:
            try:
                found[position] = self.run(names[position], partial(_exists, name=names[position]))
            except (ConnectionLost, SettingRejected, ServerError) as error:
                problem = error
        if problem is not None and not found:
            raise problem
        return [found.get(position, False) for position in range(len(names))]

    def check(self, name: bytes) -> None:
        """Check the settings with the owner of `name`. Raises SettingRejected if they are wrong."""
        endpoint = self._owner(name)
        connection = self.pool.take(endpoint)
        try:
            with contextlib.suppress(ServerError):
                connection.request(command(b"INFO", b"server"))
                info = connection.reply()
                if isinstance(info, bytes):
                    self._check_mode(endpoint, info)
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

    def _check_mode(self, endpoint: Endpoint, info: bytes) -> None:
        if b"_mode:sentinel" in info:
            raise SettingRejected("url", f"{endpoint} is a Sentinel; expected redis-sentinel:// in the URL")
        if b"_mode:cluster" in info and self._mode != "cluster":
            option = "mode" if self._mode == "standalone" else "url"
            raise SettingRejected(
                option, f"{endpoint} is part of a cluster; expected mode: cluster, or redis-cluster:// in the URL"
            )

    def _take(self, endpoint: Endpoint) -> RedisConnection:
        try:
            return self.pool.take(endpoint)
        except (ConnectionLost, SettingRejected):
            self._seek(endpoint)
            raise

    def _invalidate(self, endpoint: Endpoint) -> None:
        self.pool.invalidate(endpoint)
        self._seek(endpoint)

    # The table of owners

    def _owner(self, name: bytes) -> Endpoint:
        """Return the owner of `name`. Raises ConnectionLost or SettingRejected if it is unknown."""
        if self._stale:
            with self._lock:
                if self._stale and time.monotonic() >= self._refresh_at_s:
                    self._refresh()
        owner = self._owners[key_slot(name) if self._mode == "cluster" else 0]
        if owner is None:
            option, problem = self._problem
            raise SettingRejected(option, problem) if option else ConnectionLost(problem)
        return owner

    def _seek(self, endpoint: Endpoint) -> None:
        """Let the next request read the table again, since `endpoint` does not answer or is no longer a master."""
        self._failed_s[endpoint] = time.monotonic()
        self._stale = self._mode != "standalone"

    def _redirected(self, error: ServerError, sender: Endpoint) -> Endpoint:
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
        """Read the table. On failure the old table stays in use."""
        try:
            self._owners = [self.pool.master()] if self._mode == "sentinel" else self._slot_owners()
            self._stale, self._problem = False, _NO_OWNER
        except (ConnectionLost, SettingRejected) as error:
            # Keep the text and not the error, whose traceback would keep the caller's payload alive.
            self._problem = (error.option if isinstance(error, SettingRejected) else "", str(error))
        finally:
            self._refresh_at_s = time.monotonic() + _REFRESH_INTERVAL_S

    def _slot_owners(self) -> list[Endpoint | None]:
        """Ask a few servers one after another, within the timeout of one: those that never failed, then the earliest."""
        known = [owner for owner in dict.fromkeys(self._owners) if owner is not None]
        candidates = dict.fromkeys([*known, *self.pool.address.endpoints])
        asked = sorted(candidates, key=lambda endpoint: self._failed_s.get(endpoint, 0.0))[:_ASKED]
        problem: ConnectionLost | SettingRejected | None = None
        for endpoint in asked:
            try:
                answer = self.pool.ask(endpoint, self.pool.timeout_s / len(asked), "CLUSTER", "SLOTS")
                return _slot_owners_of(endpoint, answer)
            except (ConnectionLost, SettingRejected) as error:
                self._failed_s[endpoint] = time.monotonic()
                problem = problem or error
        assert problem is not None
        raise problem


def _slot_owners_of(asked: Endpoint, ranges: Any) -> list[Endpoint | None]:
    """Return the owners by slot from an answer to CLUSTER SLOTS. Raises ConnectionLost for slots that no cluster has."""
    owners: list[Endpoint | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    # [first slot, last slot, [host, port, ...] of the master, replicas...]; an empty host means the asked server.
    for first, last, (host, port, *_), *_ in ranges:
        if not 0 <= int(first) <= int(last) < REDIS_CLUSTER_HASH_SLOTS:
            raise ConnectionLost(f"{asked}: CLUSTER SLOTS: no cluster has the slots {first} to {last}")
        found = host.decode() if isinstance(host, bytes) else host
        owner = Endpoint(found if found and found != "?" else asked.host, int(port))
        owners[int(first) : int(last) + 1] = [owner] * (int(last) + 1 - int(first))
    return owners


def _worth_repeating(connection: RedisConnection, error: ConnectionLost) -> bool:
    """Return True if the server may have restarted while the connection was idle."""
    return connection.reused and not isinstance(error, ConnectionTimeout)


def _exists(connection: RedisConnection, name: bytes) -> bool:
    connection.request(command(b"EXISTS", name))
    return connection.reply() == 1
