"""What is found out when the tier opens: whether somebody must mend something, or the server is merely not there yet."""

from __future__ import annotations

from tiercache.tiers.remote.redis.address import Endpoint
from tiercache.tiers.remote.redis.channel import command
from tiercache.tiers.remote.redis.connector import Connector
from tiercache.tiers.remote.redis.failures import BrokenConnection, Refused, ServerError, TooSlow
from tiercache.tiers.remote.redis.layout import head_name
from tiercache.tiers.remote.redis.servers import Servers


def look_at(servers: Servers, connector: Connector, prefix: str) -> None:
    """Raises Refused with a sentence for the operator, BrokenConnection or ServerError for what may pass. Blocks."""
    name = head_name(prefix, bytes(24))
    endpoint = servers.topology.endpoint_of(name)
    try:
        channel = servers.pool.take(endpoint)
    except BrokenConnection as error:
        raise _explained(connector, endpoint, error) from None
    try:
        _check_mode(connector, endpoint, _mode(channel.ask(command(b"INFO", b"server"))))
        answer = channel.ask(command(b"EXISTS", name))
    except BrokenConnection as error:
        raise _explained(connector, endpoint, error) from None
    finally:
        servers.pool.give(channel)
    if isinstance(answer, ServerError):
        if answer.code == "NOAUTH":
            raise Refused("password", f"{endpoint} wants one")
        if answer.code == "NOPERM":
            raise Refused("username", f"the user may not use names that begin with {prefix!r}: {answer.text[:200]}")
        if answer.code not in ("MOVED", "ASK"):
            raise answer


def _mode(answer: object) -> str:
    """standalone, sentinel or cluster; empty where the server does not tell."""
    if isinstance(answer, bytes):
        for line in answer.split(b"\r\n"):
            field, _, value = line.partition(b":")
            if field in (b"redis_mode", b"server_mode"):
                return value.decode("utf-8", "replace")
    return ""


def _check_mode(connector: Connector, endpoint: Endpoint, found: str) -> None:
    wanted = connector.address.mode
    if found == "cluster" and wanted == "standalone":
        raise Refused(
            "mode", f"{endpoint} is part of a cluster; expected mode: cluster, or redis-cluster:// in the URL"
        )
    if found == "cluster" and wanted == "sentinel":
        raise Refused("url", f"{endpoint} is part of a cluster, which has no Sentinels; expected redis-cluster://")
    if found == "sentinel":
        raise Refused("url", f"{endpoint} is a Sentinel; expected redis-sentinel:// in the URL")


def _explained(connector: Connector, endpoint: Endpoint, error: BrokenConnection) -> Refused | BrokenConnection:
    """The commonest mistake looks like a broken connection: one side speaks TLS and the other does not."""
    if endpoint.path:
        return error
    if connector.address.tls:
        if connector.speaks_plain(endpoint):
            return Refused("tls", f"{endpoint} does not speak TLS; expected redis:// and tls unset")
    elif not isinstance(error, TooSlow) and connector.speaks_tls(endpoint):
        return Refused("tls", f"{endpoint} speaks TLS; expected tls: true, or rediss:// in the URL")
    return error
