"""Read servers and credentials from the URL and the options beside it. No I/O."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from tiercache.config.secrets import shown_scheme
from tiercache.tiers.remote.base import RemoteSettings

Mode = Literal["standalone", "sentinel", "cluster"]

_SCHEMES: dict[str, tuple[Mode | None, bool]] = {
    "redis": (None, False),
    "rediss": (None, True),
    "valkey": (None, False),
    "valkeys": (None, True),
    "resp": (None, False),
    "unix": ("standalone", False),
    "redis-sentinel": ("sentinel", False),
    "redis-cluster": ("cluster", False),
}
"""Map from scheme to the mode (None: the option `mode` decides), and True if the scheme means TLS."""
_PORT = 6379
_SENTINEL_PORT = 26379


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server: host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        return self.path or (f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}")


@dataclass(frozen=True)
class RedisAddress:
    mode: Mode
    endpoints: tuple[Endpoint, ...]
    """The server, the Sentinels, or some servers of the cluster, which know the others."""
    tls: bool = False
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    database: int = 0
    service: str = ""
    sentinel_password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """Return the servers without credentials."""
        servers = ", ".join(str(endpoint) for endpoint in self.endpoints)
        if self.mode == "standalone":
            return servers
        return f"{self.service} of Sentinels {servers}" if self.mode == "sentinel" else f"cluster of {servers}"


def read_address(settings: RemoteSettings) -> RedisAddress:
    """Return the address in `settings`.

    Raises ConfigError, which shows nothing but the scheme of a wrong URL, since the rest may hold a password.
    """
    options = settings.options
    scheme, _, rest = settings.url.partition("://")
    if scheme not in _SCHEMES or "://" not in settings.url:
        found = f"the scheme {shown!r}" if (shown := shown_scheme(settings.url)) else "no scheme"
        raise settings.error("url", f"expected one of {', '.join(f'{name}://' for name in _SCHEMES)}, found {found}")
    mode, tls = _SCHEMES[scheme]
    # Split the credentials off first: a password may hold a ?, and the known parameters hold no @.
    credentials, _, rest = rest.rpartition("@")
    rest, _, query = rest.partition("?")
    user, colon, password = credentials.partition(":")
    username = unquote(user) or options.get("username")
    secret = unquote(password) if colon else options.get("password")
    database: str | int = options.get("database") or 0
    service = options.get("sentinel_service") or os.environ.get("REDIS_SERVICE_NAME") or "mymaster"
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in ("db", "database"):
            raise settings.error("url", "expected no parameter but db; other settings are options of their own")
        database = value
    if scheme == "unix":
        if not rest.startswith("/"):
            raise settings.error("url", "expected unix:///path/of/the/socket")
        endpoints = [Endpoint(path=unquote(rest))]
    else:
        hosts, _, path = rest.partition("/")
        for part in filter(None, path.split("/")):
            if mode == "sentinel" and not part.isdecimal():
                service = unquote(part)
            else:
                database = part
        port = _SENTINEL_PORT if mode == "sentinel" else _PORT
        endpoints = [_endpoint(settings, host.strip(), port) for host in hosts.split(",")]
        mode = mode or options.get("mode") or "standalone"
    assert mode is not None
    if not str(database).isdecimal():
        raise settings.error("url", "expected the number of a database behind the host and /, or behind ?db=")
    if options.get("tls") is False and tls:
        raise settings.error("tls", f"is false, but {scheme}:// means TLS")
    if options.get("tls") and scheme == "unix":
        raise settings.error("tls", "expected none on a Unix socket")
    address = RedisAddress(
        mode,
        tuple(endpoints),
        tls or bool(options.get("tls")),
        username,
        secret,
        int(database),
        service,
        options.get("sentinel_password"),
    )
    _check(settings, address)
    return address


def _check(settings: RemoteSettings, address: RedisAddress) -> None:
    """Raise ConfigError for settings that exclude one another."""
    if address.mode == "standalone" and len(address.endpoints) > 1:
        raise settings.error("url", "several hosts are a cluster (redis-cluster://) or Sentinels (redis-sentinel://)")
    if address.mode == "cluster" and address.database:
        raise settings.error("database", f"a cluster has only database 0, found {address.database}")
    if address.username and not address.password:
        raise settings.error("password", "expected one, since there is a username")
    if set(settings.options.get("prefix") or "") & set("{}"):
        raise settings.error(
            "prefix", "expected no braces, which mark the part of a name that selects its slot in a cluster"
        )


def _endpoint(settings: RemoteSettings, text: str, default_port: int) -> Endpoint:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # the resolver would raise the same error at every request
    except ValueError:
        host, port = None, None
    if not host or parts.netloc != text:
        raise settings.error("url", "expected host or host:port behind the scheme")
    return Endpoint(host, port or default_port)
