"""Real servers on free ports of the loopback, started and killed by tests."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis

from tests.servers import processes
from tests.servers.ports import hold_port
from tests.servers.processes import Process

_CLUSTER_BUS = 10_000
"""A cluster's servers talk to one another this many ports above theirs."""


class Server(Process):
    """One redis-server, in the foreground."""

    def __init__(self, place: Path, *options: str, port: int | None = None, sentinel: bool = False) -> None:
        self.place = place
        self.port = port or hold_port(_CLUSTER_BUS)
        self._sentinel = sentinel
        self._options = options

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def socket_path(self) -> Path:
        return self.place / f"{self.port}.sock"

    def start(self) -> Server:
        self.place.mkdir(parents=True, exist_ok=True)
        plain = [] if "--tls-port" in self._options else ["--port", str(self.port)]
        socket_options = [] if self._sentinel else ["--unixsocket", self.socket_path.name, "--save", ""]  # in its --dir
        configuration = self.place / f"{self.port}.conf"
        if not configuration.exists():
            configuration.write_text("")
        self.process = subprocess.Popen(
            ["redis-server", str(configuration), *plain, "--bind", "127.0.0.1", "--dir", str(self.place)]
            + ["--daemonize", "no", *socket_options, *self._options],
            stdout=(self.place / f"{self.port}.log").open("ab"),
            stderr=subprocess.STDOUT,
        )
        return self

    def ready(self, **login: Any) -> Server:
        """Wait for its first answer, whatever it is."""

        def answers() -> bool:
            with self.client(**login) as client:
                try:
                    client.ping()
                except (redis.ResponseError, redis.AuthenticationError, redis.exceptions.BusyLoadingError):
                    return True
            return True

        until(answers, why=lambda: (self.place / f"{self.port}.log").read_text()[-2000:])
        return self

    def client(self, **options: Any) -> Any:
        """A client for what the test does behind the tier's back."""
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        return redis.Redis(port=self.port, socket_timeout=10, socket_connect_timeout=1, retry=retry, **options)


def until(condition: Callable[[], Any], why: Callable[[], str] = lambda: "") -> Any:
    """Ask until it is so; a refused connection is a no."""
    return processes.until(condition, redis.ConnectionError, redis.TimeoutError, why=why)


@contextlib.contextmanager
def running(place: Path, *options: str, **more: Any) -> Iterator[Server]:
    server = Server(place, *options, **more)
    try:
        yield server.start().ready(**({"ssl": True, "ssl_cert_reqs": "none"} if "--tls-port" in options else {}))
    finally:
        server.kill()


def tls_options(port: int, certificates: Path) -> tuple[str, ...]:
    """For `Server`: TLS on its port, and nothing else."""
    return (
        *("--tls-port", str(port), "--port", "0", "--tls-auth-clients", "no"),
        *("--tls-cert-file", str(certificates / "server.pem"), "--tls-key-file", str(certificates / "server.key")),
        *("--tls-ca-cert-file", str(certificates / "ca.pem")),
    )


class Cluster:
    """Three masters with a third of the slots each, and as many replicas as asked for."""

    def __init__(self, place: Path, replicas: int = 0) -> None:
        options = (
            *("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no"),
            *("--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0"),
        )
        self.nodes = [Server(place / f"node{number}", *options) for number in range(3 + replicas)]

    def start(self) -> Cluster:
        for node in self.nodes:
            node.start()
        for node in self.nodes:
            node.ready()
        masters = self.nodes[:3]
        bounds = [0, 5461, 10923, 16384]
        for epoch, node in enumerate(masters, 1):
            with node.client() as client:
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", epoch)
                client.execute_command("CLUSTER ADDSLOTSRANGE", bounds[epoch - 1], bounds[epoch] - 1)
        for node in self.nodes[1:]:
            with node.client() as client:
                client.execute_command("CLUSTER MEET", "127.0.0.1", self.nodes[0].port)
        until(lambda: all(self._knows(node) == len(self.nodes) for node in self.nodes))
        for number, node in enumerate(self.nodes[3:]):
            with node.client() as client:
                client.execute_command("CLUSTER REPLICATE", self.id_of(masters[number]))
        until(lambda: all(self._is_up(node) for node in self.nodes))
        until(lambda: all(self._connected_replicas(master) == 1 for master in masters[: len(self.nodes) - 3]))
        return self

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def id_of(self, node: Server) -> str:
        with node.client() as client:
            return str(client.execute_command("CLUSTER MYID").decode())

    def owner_of(self, slot: int) -> Server:
        return self.nodes[next(number for number, end in enumerate((5461, 10923, 16384)) if slot < end)]

    def _knows(self, node: Server) -> int:
        with node.client() as client:
            nodes = client.execute_command("CLUSTER NODES")
            return sum(1 for facts in nodes.values() if facts["connected"]) if isinstance(nodes, dict) else 0

    def _is_up(self, node: Server) -> bool:
        with node.client() as client:
            return bool(client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")

    def _connected_replicas(self, node: Server) -> int:
        with node.client() as client:
            return sum(1 for name in client.info("replication") if name.startswith("slave") and name[5:].isdecimal())
