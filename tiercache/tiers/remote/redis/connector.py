"""Connections by redis-py: TCP, TLS, Unix sockets, users and passwords; and what its errors mean."""

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
from tiercache.tiers.remote.redis.failures import BrokenConnection, Refused, TooSlow

_NO_FILE = (None, "NO_CERTIFICATE_OR_CRL_FOUND")
"""OpenSSL's reasons when a file of ours is no certificate."""


class Connector:
    def __init__(self, address: RedisAddress, settings: RemoteSettings) -> None:
        options = settings.options
        self.address = address
        self.timeout_s = settings.timeout_s
        self.connect_timeout_s = float(options.get("connect_timeout_s") or 5.0)
        self._tls: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._greeting: set[Any] = set()
        """Connections that are being made, or are asked for the topology."""
        self._closed = False
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
        """A connection of redis-py's, logged in, its database chosen. Blocks; in a thread.

        Raises Refused for what the operator must mend, BrokenConnection for what may pass.
        """
        connection = self._make(endpoint)
        with self._greeted(connection):
            try:
                connection.connect()
            except (redis.RedisError, OSError) as error:
                connection.disconnect()
                raise self._reason(endpoint, error) from None
        return connection

    def close(self) -> None:
        """Whoever is being greeted by a server that hangs fails now. From any thread; idempotent."""
        with self._lock:
            self._closed = True
            greeting = list(self._greeting)
        for connection in greeting:
            # There is no public name for it, see `Channel`. None: the server has not even accepted yet.
            if (sock := connection._sock) is not None:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _greeted(self, connection: Any) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise BrokenConnection("the tier is closed")
            self._greeting.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._greeting.discard(connection)

    def ask(self, endpoint: Endpoint, *words: str) -> Any:
        """The answer to a command, on a connection of its own. Raises as `connect`."""
        connection = self.connect(endpoint)
        try:
            with self._greeted(connection):
                connection.send_command(*words)
                return connection.read_response()
        except (redis.RedisError, OSError) as error:
            raise self._reason(endpoint, error) from None
        finally:
            connection.disconnect()

    def master(self) -> Endpoint:
        """Whom the Sentinels say is the master. Raises as `connect`."""
        sentinels = redis.sentinel.Sentinel(
            [(endpoint.host, endpoint.port) for endpoint in self.address.endpoints],
            sentinel_kwargs={
                "password": self.address.sentinel_password,
                "socket_timeout": self.timeout_s,
                "socket_connect_timeout": self.connect_timeout_s,
                "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),
                "ssl": self.address.tls,
                **self._tls,
            },
        )
        try:
            host, port = sentinels.discover_master(self.address.service)
        except redis.sentinel.MasterNotFoundError:
            if _all_refuse(sentinels.sentinels):
                raise Refused("sentinel_password", "no Sentinel that answers accepts it") from None
            raise BrokenConnection(f"no Sentinel knows a master of {self.address.service!r} that is up") from None
        except (redis.RedisError, OSError) as error:
            raise self._reason(self.address.endpoints[0], error, sentinel=True) from None
        finally:
            for sentinel in sentinels.sentinels:
                with contextlib.suppress(Exception):
                    sentinel.connection_pool.disconnect()
        return Endpoint(host, int(port))

    def speaks_plain(self, endpoint: Endpoint) -> bool:
        """Whether what answers there speaks Redis's protocol without TLS."""
        try:
            with socket.create_connection((endpoint.host, endpoint.port), self.connect_timeout_s) as plain:
                plain.sendall(b"PING\r\n")
                return plain.recv(1) in (b"+", b"-")
        except OSError:
            return False

    def speaks_tls(self, endpoint: Endpoint) -> bool:
        """Whether what answers there begins TLS."""
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        try:
            with (
                socket.create_connection((endpoint.host, endpoint.port), self.connect_timeout_s) as plain,
                context.wrap_socket(plain, server_hostname=endpoint.host),
            ):
                return True
        except ssl.SSLError as error:
            # It wants a certificate of ours, which only TLS can.
            return "ALERT" in (error.reason or "")
        except OSError:
            return False

    def _make(self, endpoint: Endpoint) -> Any:
        address = self.address
        common = {
            "username": address.username,
            "password": address.password,
            "db": address.database,
            "socket_timeout": self.timeout_s,
            "socket_connect_timeout": self.connect_timeout_s,
            "protocol": 2,
            "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),
        }
        if endpoint.path:
            return redis.connection.UnixDomainSocketConnection(path=endpoint.path, **common)
        if address.tls:
            return redis.connection.SSLConnection(host=endpoint.host, port=endpoint.port, **common, **self._tls)
        return redis.connection.Connection(host=endpoint.host, port=endpoint.port, **common)

    def _reason(self, endpoint: Endpoint, error: Exception, *, sentinel: bool = False) -> Refused | BrokenConnection:
        text = str(error)
        if isinstance(error, redis.AuthenticationError):
            if sentinel:
                return Refused("sentinel_password", f"the Sentinel at {endpoint} wants another one")
            option = "password" if self.address.password is not None or not self.address.username else "username"
            return Refused(option, f"{endpoint} does not accept it: {_told(text)}")
        if isinstance(error, redis.exceptions.NoPermissionError):
            return Refused("username", f"the user may not do what a cache needs: {_told(text)}")
        tls = _cause(error, ssl.SSLError)
        if isinstance(tls, ssl.SSLCertVerificationError):
            return Refused("tls_ca_file", f"the certificate of {endpoint} is not trusted: {tls.verify_message}")
        if type(tls) is ssl.SSLError and (tls.reason in _NO_FILE or tls.library in ("PEM", "X509")):
            problem = "tls_ca_file, tls_cert_file or tls_key_file is not PEM, or they do not belong together"
            return Refused("tls_ca_file", problem)
        if isinstance(tls, ssl.SSLError) and tls.reason:
            return BrokenConnection(f"{endpoint}: TLS: {tls.reason}")
        missing = _cause(error, FileNotFoundError)
        if missing is not None and self.address.tls and not endpoint.path:
            return Refused("tls_ca_file", "one of tls_ca_file, tls_cert_file and tls_key_file is not there")
        if isinstance(error, redis.exceptions.InvalidResponse):
            return Refused("url", f"what answers at {endpoint} is not a Redis server")
        if isinstance(error, redis.ResponseError):
            if "DB index" in text:
                return Refused("database", f"{endpoint} has no database {self.address.database}")
            if "cluster support disabled" in text:
                return Refused("mode", f"{endpoint} is not part of a cluster; expected mode: standalone, or redis://")
            if "unknown command" in text:
                return Refused("url", f"{endpoint} is not what the URL says: {_told(text)}")
            return BrokenConnection(f"{endpoint} answers: {_told(text)}")
        if isinstance(error, (redis.TimeoutError, TimeoutError)):
            return TooSlow(f"{endpoint} does not answer")
        return BrokenConnection(f"{endpoint} cannot be reached: {_told(text)}")


def _all_refuse(sentinels: Sequence[Any]) -> bool:
    """Whether some of them want another password, and none takes ours: redis-py takes that for a Sentinel that is away."""
    refused = False
    for sentinel in sentinels:
        try:
            sentinel.ping()
            return False
        except redis.AuthenticationError:
            refused = True
        except (redis.RedisError, OSError):
            continue
    return refused


def _cause(error: BaseException | None, kind: type[BaseException]) -> Any:
    """The first of the errors behind `error` that is of `kind`."""
    while error is not None:
        if isinstance(error, kind):
            return error
        error = error.__cause__ or error.__context__
    return None


def _told(text: str) -> str:
    """What a server said, cut: servers repeat the beginning of a command that they do not know, never a password."""
    return text.partition(", with args beginning with")[0][:200]
