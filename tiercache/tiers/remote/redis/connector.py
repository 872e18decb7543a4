"""Connections made by redis-py: TCP, TLS, Unix sockets, logins, Sentinels; and the meaning of its errors."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import redis
import redis.backoff
import redis.connection
import redis.retry
import redis.sentinel

from tiercache.tiers.remote.base import RemoteSettings
from tiercache.tiers.remote.redis.address import Endpoint, RedisAddress
from tiercache.tiers.remote.redis.connection import ConnectionLost, ConnectionTimeout

_NO_FILE = (None, "NO_CERTIFICATE_OR_CRL_FOUND")
"""OpenSSL's reasons when a file of ours is no certificate."""


class SettingRejected(Exception):
    """A setting that the operator must change: a wrong password, a wrong scheme, ... Never holds secrets."""

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(problem)
        self.option = option
        self.problem = problem


class Connector:
    """Make connections and ask for the topology. All methods but `close` block; they may be called from any thread.

    They raise SettingRejected for what the operator must change, and ConnectionLost for what may pass.
    """

    def __init__(self, address: RedisAddress, settings: RemoteSettings) -> None:
        options = settings.options
        self.address = address
        self.timeout_s = settings.timeout_s
        self.connect_timeout_s = float(options.get("connect_timeout_s") or 5.0)
        self._lock = threading.Lock()
        self._connecting: set[Any] = set()
        """Connections that log in or ask for the topology now."""
        self._closed = False
        self._common: dict[str, Any] = {
            "socket_timeout": self.timeout_s,
            "socket_connect_timeout": self.connect_timeout_s,
            "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),
        }
        self._login: dict[str, Any] = {
            "username": address.username,
            "password": address.password,
            "db": address.database,
            "protocol": 2,
        }
        self._tls: dict[str, Any] = {}
        if address.tls:
            verify = options.get("tls_verify", True)
            self._tls = {
                "ssl_cert_reqs": "required" if verify else "none",
                "ssl_check_hostname": bool(verify),
                "ssl_ca_certs": options.get("tls_ca_file"),
                "ssl_certfile": options.get("tls_cert_file"),
                "ssl_keyfile": options.get("tls_key_file"),
            }

    def connect(self, endpoint: Endpoint) -> Any:
        """Return a redis-py connection that is logged in and has its database selected."""
        connection = self._make(endpoint)
        with self._interruptible(connection):
            try:
                connection.connect()
            except (redis.RedisError, OSError) as error:
                connection.disconnect()
                raise self._explained(endpoint, error) from None
        return connection

    def ask(self, endpoint: Endpoint, *words: str) -> Any:
        """Return the answer to a command, on a connection of its own."""
        connection = self.connect(endpoint)
        try:
            with self._interruptible(connection):
                connection.send_command(*words)
                return connection.read_response()
        except (redis.RedisError, OSError) as error:
            raise self._explained(endpoint, error) from None
        finally:
            connection.disconnect()

    def master(self) -> Endpoint:
        """Return the master that the Sentinels name."""
        sentinels = redis.sentinel.Sentinel(
            [(endpoint.host, endpoint.port) for endpoint in self.address.endpoints],
            sentinel_kwargs=self._common
            | self._tls
            | {"password": self.address.sentinel_password, "ssl": self.address.tls},
        )
        try:
            host, port = sentinels.discover_master(self.address.service)
        except redis.sentinel.MasterNotFoundError:
            if _all_reject_password(sentinels.sentinels):
                raise SettingRejected("sentinel_password", "no Sentinel that answers accepts it") from None
            raise ConnectionLost(f"no Sentinel knows a master of {self.address.service!r} that is up") from None
        except (redis.RedisError, OSError) as error:
            raise self._explained(self.address.endpoints[0], error, sentinel=True) from None
        finally:
            for sentinel in sentinels.sentinels:
                with contextlib.suppress(Exception):
                    sentinel.connection_pool.disconnect()
        return Endpoint(host, int(port))

    def close(self) -> None:
        """Make threads fail now that wait for a login or for the topology. Idempotent."""
        with self._lock:
            self._closed = True
            connecting = list(self._connecting)
        for connection in connecting:
            if (sock := connection._sock) is not None:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _interruptible(self, connection: Any) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise ConnectionLost("the tier is closed")
            self._connecting.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connecting.discard(connection)

    def _make(self, endpoint: Endpoint) -> Any:
        options = self._common | self._login
        if endpoint.path:
            return redis.connection.UnixDomainSocketConnection(path=endpoint.path, **options)
        if self.address.tls:
            return redis.connection.SSLConnection(host=endpoint.host, port=endpoint.port, **options, **self._tls)
        return redis.connection.Connection(host=endpoint.host, port=endpoint.port, **options)

    def _explained(
        self, endpoint: Endpoint, error: Exception, *, sentinel: bool = False
    ) -> SettingRejected | ConnectionLost:
        text = _shortened(str(error))
        if isinstance(error, redis.AuthenticationError):
            if sentinel:
                return SettingRejected("sentinel_password", f"the Sentinel at {endpoint} wants another one")
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
        return self._explained_tls(endpoint, error) or ConnectionLost(f"{endpoint} cannot be reached: {text}")

    def _explained_tls(self, endpoint: Endpoint, error: Exception) -> SettingRejected | ConnectionLost | None:
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
        return None


def _all_reject_password(sentinels: Sequence[Any]) -> bool:
    """Return True if some Sentinels want another password and none accepts ours. redis-py takes them for unreachable."""
    rejected = False
    for sentinel in sentinels:
        try:
            sentinel.ping()
            return False
        except redis.AuthenticationError:
            rejected = True
        except (redis.RedisError, OSError):
            continue
    return rejected


def _cause(error: BaseException | None, kind: type[BaseException]) -> Any:
    """Return the first of the errors behind `error` that is of `kind`, or None."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def _shortened(text: str) -> str:
    """Cut a server's answer. Servers repeat the beginning of a command that they do not know, never a password."""
    return text.partition(", with args beginning with")[0][:200]
